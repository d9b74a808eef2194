"""The command line: ``weightclip COMMAND``, one file per command."""

from __future__ import annotations

from weightclip.cli._app import main as main
