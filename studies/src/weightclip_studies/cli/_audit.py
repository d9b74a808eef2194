"""``weightclip-study audit``: the audits of ``weightclip audit``, and those of the studies' own code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weightclip.cli import audit_and_show


def audit(
    quick: Annotated[bool, typer.Option("--quick", help="A few minutes instead of ten or more.")] = False,
    seed: Annotated[int, typer.Option(help="Root of all randomness: the same seed gives the same report.")] = 0,
    epsilon: Annotated[list[float] | None, typer.Option(help="Claim to audit by sampling (repeatable).")] = None,
    delta: Annotated[float, typer.Option(help="delta of every claim.")] = 1e-5,
    out: Annotated[Path, typer.Option(help="Folder for report.json, the pictures and the tables.")] = Path(
        "runs/audit"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """All audits of weightclip, the image heads' trainer, and the printed algorithms, which must be caught.

    Example: weightclip-study audit --quick
    """
    from weightclip_studies.audit import extra_audits

    audit_and_show(quick, seed, epsilon, delta, out, as_json, extra_audits)
