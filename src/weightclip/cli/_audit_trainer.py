"""``weightclip audit my_module:make_trainer``: the audit of somebody's own trainer."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from weightclip.audit import Trainer


def audit_own(place: str, runs: int, seed: int, out: Path, as_json: bool) -> None:
    """Audit the trainer at ``module:function``; exit code 1 if its claim is refuted."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from weightclip.audit import audit_trainer, trainer_figure

    if runs < 40:
        raise typer.BadParameter("at least 40 runs are needed, fewer can refute nothing", param_hint="--runs")
    trainer = load_trainer(place)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(trainer.name, total=2 * runs)
        found = audit_trainer(trainer, runs=runs, seed=seed, progress=lambda i, _: bar.update(task, completed=i))
    picture = trainer_figure(found, out / "trainer.png")
    report = json.dumps(found.to_dict(), indent=2)
    (out / "trainer.json").write_text(report + "\n")
    typer.echo(report if as_json else f"{found}\nwritten: {out / 'trainer.json'}, {picture}")
    if found.violation:
        console.print(f"VIOLATION {found.name}: claimed {found.epsilon:g}, at least {found.result.epsilon_lower:.3g}",
                      style="bold red", highlight=False)  # fmt: skip
        raise typer.Exit(1)


def load_trainer(place: str) -> Trainer:
    """The trainer that ``module:function`` makes, or the one that is there."""
    from weightclip.audit import Trainer

    def bad(text: str) -> typer.BadParameter:
        return typer.BadParameter(text, param_hint="TRAINER")

    module_name, _, name = place.partition(":")
    if not module_name or not name:
        raise bad(f"expected module:function, got {place!r}")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise bad(f"cannot import {module_name!r}: {error}") from None
    finally:
        sys.path.pop(0)
    found: Any = getattr(module, name, None)
    if found is None:
        raise bad(f"module {module_name!r} has no {name!r}")
    found = found() if callable(found) and not isinstance(found, Trainer) else found
    if not isinstance(found, Trainer):
        raise bad(f"{place} gives a {type(found).__name__}: it must give a weightclip.audit.Trainer")
    return found
