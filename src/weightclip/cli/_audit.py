"""``weightclip audit``: try to refute the claimed epsilon, of weightclip itself or of somebody's own trainer."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from weightclip.audit import Check, ExtraAudit, Report, Trainer


def audit(
    trainer: Annotated[
        str | None,
        typer.Argument(help="module:function that gives a weightclip.audit.Trainer: audits that one and nothing else."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few minutes instead of ten or more.")] = False,
    seed: Annotated[int, typer.Option(help="Root of all randomness: the same seed gives the same report.")] = 0,
    epsilon: Annotated[list[float] | None, typer.Option(help="Claim to audit by sampling (repeatable).")] = None,
    delta: Annotated[float, typer.Option(help="delta of every claim.")] = 1e-5,
    out: Annotated[Path, typer.Option(help="Folder for report, pictures and tables.")] = Path("runs/audit"),
    runs: Annotated[int, typer.Option(help="Of a trainer of your own: trainings on each data set.")] = 1000,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Try to refute a claimed epsilon: of weightclip's real engine, or of a trainer of yours; exit code 1 if it fails.

    Example: weightclip audit --quick --epsilon 1 --epsilon 8
    """
    if trainer is not None:
        return audit_own(trainer, runs, seed, out, as_json)
    audit_and_show(quick, seed, epsilon, delta, out, as_json)


def audit_and_show(
    quick: bool,
    seed: int,
    epsilon: list[float] | None,
    delta: float,
    out: Path,
    as_json: bool,
    extra: Callable[[], Sequence[ExtraAudit]] = tuple,
) -> None:
    """Run all audits and those of ``extra``, write the report, show it; exit code 1 if a claim was refuted."""
    import torch
    from rich.console import Console

    from weightclip.audit import run_audit, write_report

    epsilons = tuple(epsilon or (1.0, 2.0, 4.0, 8.0))
    if not all(0 < e <= 30 for e in epsilons):
        raise typer.BadParameter("claims must lie in (0, 30]", param_hint="--epsilon")
    if not 0 < delta < 0.5:
        raise typer.BadParameter("delta must lie in (0, 0.5)", param_hint="--delta")
    torch.set_num_threads(1)  # matrices of ten by ten: more threads only wait for each other
    console = Console(stderr=True)
    with _progress(console, "audit") as show:
        report = run_audit(
            quick=quick,
            seed=seed,
            epsilons=epsilons,
            delta=delta,
            extra=extra(),
            progress=lambda label, done, total: show(description=label, completed=done, total=total),
        )
        show(description="pictures")
        files = write_report(report, out)
    if as_json:
        typer.echo(report.to_json())
    else:
        _show(report, Console())
        typer.echo("written: " + ", ".join(str(f) for f in files[:3]) + (" ..." if len(files) > 3 else ""))
    for line in report.failures:
        console.print(f"VIOLATION {line}", style="bold red", highlight=False)
    if report.failures:
        raise typer.Exit(1)


def _show(report: Report, console: Console) -> None:
    """Three short tables: trainers, claims, the printed algorithm."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from weightclip.audit import EXACT, gdp_estimate_of

    def table(title: str, *columns: str) -> Table:
        new = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, collapse_padding=True)
        for i, name in enumerate(columns):
            # on a narrow screen the words are broken, never the numbers
            new.add_column(name, justify="right" if i else "left", no_wrap=i > 0)
        return new

    trainers: dict[str, dict[str, Check]] = {}
    for c in report.checks:
        if c.audit in EXACT:
            trainers.setdefault(c.subject, {})[c.audit] = c
    title = "Exact: largest effect of one record; 1 is allowed"
    exact = table(title, "trainer", "search", "trained", "step", "run", "draws", "K-norm")
    for name, found in trainers.items():
        exact.add_row(name, *(_cell(found.get(audit)) for audit in EXACT))
    console.print(exact)
    title = f"Sampled: epsilon at delta = {report.delta:g}"
    bounds = table(title, "audit, trainer", "q", "claimed", "95% lower", "GDP", "")
    for c in report.checks:
        if c.audit not in EXACT:
            rate, estimate = c.details.get("rate"), gdp_estimate_of(c)
            numbers = (rate, c.allowed, c.measured, estimate)
            shown = ("" if value is None or math.isnan(value) else f"{value:.3g}" for value in numbers)
            verdict = "[red]violation[/red]" if c.violation else "[green]ok[/green]"
            bounds.add_row(f"{c.audit}, {c.subject}", *shown, verdict)
    console.print(bounds)
    if report.printed:
        printed = table("The algorithm as printed, claimed epsilon = 1", "flaw", "shift", "95% lower", "")
        for case in report.printed:
            caught = "[green]caught[/green]" if case.result.violation else "[red]missed[/red]"
            printed.add_row(case.name, f"{case.shift:.3g}", f"{case.result.epsilon_lower:.3g}", caught)
        console.print(printed)
    wrong = sum(bool(r.disagreement) for r in report.accountants)
    console.print(f"independent accountants: {len(report.accountants)} settings, {wrong} disagreements")


def _cell(check: Check | None) -> str:
    if check is None:
        return ""
    return f"{check.measured:.3f}" + (" [red]violation[/red]" if check.violation else "")


@contextlib.contextmanager
def _progress(console: Console, label: str) -> Iterator[Callable[..., None]]:
    """A bar that goes when the block ends; what is given takes what changes."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda **news: bar.update(task, **news)


def audit_own(place: str, runs: int, seed: int, out: Path, as_json: bool) -> None:
    """Audit the trainer at ``module:function``; exit code 1 if its claim is refuted."""
    from rich.console import Console

    from weightclip.audit import audit_trainer, trainer_figure

    if runs < 40:
        raise typer.BadParameter("at least 40 runs are needed, fewer can refute nothing", param_hint="--runs")
    trainer = load_trainer(place)
    console = Console(stderr=True)
    with _progress(console, trainer.name) as show:
        found = audit_trainer(
            trainer, runs=runs, seed=seed, progress=lambda done, total: show(completed=done, total=total)
        )
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
