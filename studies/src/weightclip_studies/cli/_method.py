"""`weightclip-study reproduce method`: the measurements behind the method's choices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

PARTS = ("mechanisms", "exponential", "norms", "caps", "defaults", "effects")
_OUT, _STORE = Path("results/method"), Path("runs/effects.sqlite")


def method(
    out: Annotated[Path, typer.Option(help="Folder the results are written to.")] = _OUT,
    only: Annotated[
        str, typer.Option(help="Comma-separated parts: mechanisms, exponential, norms, caps, defaults, effects.")
    ] = "",
    store: Annotated[
        Path, typer.Option(help="Results store (SQLite) of the part `effects`; a killed run continues from it.")
    ] = _STORE,
    quick: Annotated[
        bool, typer.Option("--quick", help="A short run for a first look; written beside, not over.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON summary instead of text.")] = False,
) -> None:
    """Gaussian against K-norm noise, tightness of norms, cost of caps, choice of defaults, effect of τ, X_0 and C.

    Example: weightclip-study reproduce method
    """
    from weightclip_studies import method as study

    parts = [p.strip() for p in only.split(",") if p.strip()] or list(PARTS)
    for part in parts:
        if part not in PARTS:
            raise typer.BadParameter(f"unknown {part!r}: choose from {', '.join(PARTS)}", param_hint="--only")
    out = Path("runs/quick/method") if quick and out == _OUT else out

    def say(line: str) -> None:
        typer.echo(line, err=True)

    files: list[Path] = []
    for part in parts:
        say(part)
        if part == "mechanisms":
            files += study.mechanisms_study(out)
        elif part == "exponential":
            few = {"datasets": ("breast_cancer",), "hidden": (0,), "steps": 4, "lrs": (0.1,), "seeds": 1}
            files += study.exponential_study(out, say=say, **(few if quick else {}))  # type: ignore[arg-type]
        elif part == "norms":
            files += study.norms_study(out, **({"datasets": ("dropout",), "steps": 30, "records": 64} if quick else {}))
        elif part == "caps":
            files += study.caps_study(out, **({"small": True, "repeats": 1, "steps": 5} if quick else {}))
        elif part == "effects":
            tiny = {"datasets": ("dropout",), "seeds": 2, "search_seeds": 1, "rates": (1.0,), "values": (0.5, 2.0),
                    "layers": ((2.0, 1.0),), "only": ("table",)}  # fmt: skip
            files += study.effects_study(out, store, say=say, **(tiny if quick else {}))  # type: ignore[arg-type]
        else:
            short = {"datasets": ("dropout",), "seeds": 1, "lrs": (0.03,), "epochs": 1, "limit": 1000}
            files += study.defaults_study(out, say=say, **(short if quick else {}))  # type: ignore[arg-type]
    typer.echo(json.dumps({"files": [str(f) for f in files]}) if as_json else f"written to {out}")


def register(app: typer.Typer) -> None:
    """Add the command to the `reproduce` application."""
    app.command()(method)
