"""`weightclip-study reproduce figure`: the paper's accuracy figure on the paper's networks."""

from __future__ import annotations

import importlib.util
import json
import math
import time
from pathlib import Path
from typing import Annotated

import typer

from weightclip.errors import WeightclipError
from weightclip_studies.cli._images import DeviceOption, JsonOption, _device, _names

_OUT = Path("results/figure")
_QUICK = Path("runs/quick/figure")
_BENCH = Path("results/bench/step.csv")


def figure(
    out: Annotated[Path, typer.Option(help="Folder of rows, table, picture and page; finished runs are kept.")] = _OUT,
    datasets: Annotated[str, typer.Option(help="Comma-separated: mnist, fashion_mnist, cifar10.")] = "",
    methods: Annotated[str, typer.Option(help="Comma-separated methods; all by default.")] = "",
    epsilons: Annotated[str, typer.Option(help="Comma-separated; those of the plan by default.")] = "",
    trials: Annotated[int, typer.Option(help="Settings tried for every method; 1 takes those of the plan.", min=1)] = 5,
    seeds: Annotated[int, typer.Option(help="Seeds of each chosen setting; 0: trials only.", min=0)] = 3,
    ablation: Annotated[
        bool, typer.Option(help="Instead: normalisation, standardisation, views, averaging on and off.")
    ] = False,
    change: Annotated[list[str] | None, typer.Option(help="A field of every recipe, as name=value.")] = None,
    within: Annotated[
        float, typer.Option(help="Seconds after which the call ends; call again to go on. 0: no limit.", min=0)
    ] = 0,
    finish: Annotated[
        bool, typer.Option(help="Test a run as it is when --within ends, instead of putting it aside.")
    ] = False,
    like: Annotated[
        Path | None, typer.Option(help="With --fit: folder of short trials, for their pace and best rate.")
    ] = None,
    fit: Annotated[
        float, typer.Option(help="Steps and views of WRN-16-4 for a run of so many seconds; 0: the plan's.", min=0)
    ] = 0,
    plan: Annotated[bool, typer.Option(help="Show the cells in order, with steps that fit into --within.")] = False,
    prepare: Annotated[bool, typer.Option(help="Check packages and data and calibrate noise; train nothing.")] = False,
    draw: Annotated[
        bool, typer.Option(help="Write table, picture and page only, from the rows already there.")
    ] = False,
    audit: Annotated[bool, typer.Option(help="Audit every network and method of the rows already there.")] = False,
    limit: Annotated[int | None, typer.Option(help="Use only so many records (for a first look).", min=100)] = None,
    device: DeviceOption = "",
    as_json: JsonOption = False,
) -> None:
    """Accuracy against epsilon of the ConvNet and WRN-16-4 by every method; resumable, one row for each finished run.

    Example: weightclip-study reproduce figure --datasets mnist --within 500
    """
    began = time.monotonic()
    from weightclip_studies import figure as room

    sets = _names(datasets, tuple(room.EPSILONS), "datasets")
    ways = _names(methods, tuple(room.METHODS), "methods")
    changes = _changes(change or [])
    if like is not None and not fit:
        raise WeightclipError("figure: --like says how long a step takes; give --fit SECONDS too.")
    if fit:
        changes = _settled(out if out != _OUT else _QUICK, like, fit) | changes
    if (limit is not None or changes) and out == _OUT:
        out = _QUICK  # a first look never replaces results
    cells = room.ablations(sets, ways) if ablation else room.cells(sets, ways, _levels(epsilons))
    if plan:
        _show(cells, within or 480)
        return
    if audit:
        rows = room.audit(out)
        worst = max((max(r["falsifier"], r["one_step"]) for r in rows), default=0.0)
        typer.echo(json.dumps({"largest": worst}) if as_json else f"largest share of a bound that was found: {worst}")
        return
    if not draw:
        study = room.Figure(
            out, _device(device), trials, seeds, limit, began + within if within else math.inf, changes,
            finish, say=lambda line: typer.echo(f"{time.monotonic() - began:7.1f} s  {line}", err=True),
        )  # fmt: skip
        study.check(cells)
        if prepare:
            typer.echo(f"ready: {len(cells)} cells, noise in {out / 'noise.json'}")
            return
        study.run(cells)
        if study.failed:
            raise WeightclipError(f"{study.failed} of {len(cells)} cells failed, the others are kept: see above.")
        if not study.rows:
            typer.echo("no run was finished yet: run the same command again to go on")
            return
    if not (out / "figure.jsonl").exists():
        raise WeightclipError(f"no rows in {out}: run weightclip-study reproduce figure without --draw first.")
    if importlib.util.find_spec("matplotlib") is None:  # as on a machine that only trains
        if draw:
            raise WeightclipError("matplotlib is not installed: pip install matplotlib, or draw on another machine.")
        rows = str(out / "figure.jsonl")
        told = f"rows written to {rows}; table, picture and page: weightclip-study reproduce figure --draw"
        typer.echo(json.dumps({"files": [rows]}) if as_json else told)
        return
    files = [room.table(out), room.draw(out), room.page(out)]
    typer.echo(json.dumps({"files": [str(f) for f in files]}) if as_json else f"written to {out}")


def _settled(out: Path, like: Path | None, seconds: float) -> dict[str, object]:
    """What the first call chose for the time that was given; later calls go on with it."""
    from weightclip_studies.figure import ROWS_FILE, read_rows, settle

    file = out / "settled.json"
    if not file.exists():
        out.mkdir(parents=True, exist_ok=True)
        looked = [] if like is None else read_rows(like / ROWS_FILE)
        file.write_text(json.dumps(settle(looked, seconds, _BENCH)) + "\n")
    found: dict[str, object] = json.loads(file.read_text())
    typer.echo(f"settled: {found}", err=True)
    return found


def _show(cells: list, seconds: float) -> None:
    """The cells in order: steps of each run, and how many fit."""
    from weightclip_studies.figure import steps_within

    for cell in cells:
        recipe = cell.base()
        fit = steps_within(recipe, seconds, _BENCH) if _BENCH.exists() else None
        known = "not measured" if fit is None else f"about {fit} fit into {seconds:g} s of one H200"
        typer.echo(f"{cell.key}: {recipe.steps} steps of {recipe.batch} x {max(1, recipe.views)}; {known}")


def _levels(text: str) -> list[float] | None:
    try:
        found = [float(e) for e in text.split(",") if e.strip()]
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is no list of numbers", param_hint="--epsilons") from error
    if any(not 0 < e < 100 for e in found):
        raise typer.BadParameter("choose numbers above 0 and below 100", param_hint="--epsilons")
    return found or None


def _changes(texts: list[str]) -> dict[str, object]:
    """Fields of `Recipe` given as name=value, in the type of their default."""
    from weightclip_studies.figure import Recipe

    fields, found = Recipe("convnet", "joint").to_dict(), {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in fields or name in ("network", "method") or not value:
            raise typer.BadParameter(f"{text!r}: name one of {', '.join(fields)} as name=value", param_hint="--change")
        kind = type(fields[name])
        try:
            found[name] = value == "true" if kind is bool else kind(value)
        except ValueError as error:
            raise typer.BadParameter(f"{text!r}: {name} is a number", param_hint="--change") from error
    return found


def register(app: typer.Typer) -> None:
    """Add the command to the `reproduce` application."""
    app.command()(figure)
