"""The typer application of the studies, with the manners of ``weightclip`` itself: one-line errors and exit codes."""

from __future__ import annotations

from collections.abc import Sequence

from weightclip.cli import assemble, run

COMMANDS = ("reproduce", "extractor", "text", "tune", "bench", "data", "audit")
"""In the order ``--help`` shows them."""

app = assemble(
    "weightclip-study",
    "The experiments behind weightclip: the paper's tables and figures, text, searches, benchmarks, data sets, audits.",
    "weightclip_studies.cli",
    COMMANDS,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``weightclip-study`` and exit."""
    run(app, arguments)
