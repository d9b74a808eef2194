"""The command line of the studies: ``weightclip-study COMMAND``, one file per command."""

from __future__ import annotations

from weightclip_studies.cli._app import main as main
