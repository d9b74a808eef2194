"""The command line: ``weightclip COMMAND``, one file per command.

`assemble` and `run` make another command line of the same manners: the studies have one.

Imports `accounting`, `audit`, `engine`, `losses`, `noise`, `sampling`, `search`, `tabular` and `text`; no room imports
it.
"""

from __future__ import annotations

from weightclip.cli._app import assemble as assemble
from weightclip.cli._app import main as main
from weightclip.cli._app import run as run
from weightclip.cli._audit import audit_and_show as audit_and_show
