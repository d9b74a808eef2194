"""``weightclip train``: a private model from a table in a file."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table as Grid

from weightclip.errors import WeightclipError


def train(
    data: Annotated[Path, typer.Argument(help="table: .csv, .tsv (also .gz), .parquet, .arrow or .feather")],
    target: Annotated[str, typer.Option(help="column to predict")],
    epsilon: Annotated[float, typer.Option(help="privacy budget, preprocessing included")],
    out: Annotated[Path, typer.Option(help="model folder to write")],
    delta: Annotated[float | None, typer.Option(help="its delta (default 1/n^2, rounded down)")] = None,
    schema: Annotated[Path | None, typer.Option(help="JSON file: types, public ranges and categories")] = None,
    task: Annotated[str, typer.Option(help="classification or regression")] = "classification",
    classes: Annotated[str | None, typer.Option(help="public class labels, separated by commas")] = None,
    target_range: Annotated[str | None, typer.Option(help="public range of a numeric target, as LOW,HIGH")] = None,
    ignore: Annotated[list[str] | None, typer.Option(help="column to leave out (repeatable)")] = None,
    categorical: Annotated[list[str] | None, typer.Option(help="column to treat as categorical (repeatable)")] = None,
    hidden: Annotated[str | None, typer.Option(help="hidden widths like 32,16; 'none' for a linear model")] = None,
    epochs: Annotated[float | None, typer.Option(help="passes over the data")] = None,
    public_scaling: Annotated[bool, typer.Option(help="scale by public ranges alone, pay nothing for it")] = False,
    non_private_scaling: Annotated[bool, typer.Option(help="read feature statistics UNPAID (epsilon = inf)")] = False,
    delimiter: Annotated[str | None, typer.Option(help="of delimited text (default comma, tab for .tsv)")] = None,
    seed: Annotated[int | None, typer.Option(help="repeatable noise, for experiments only")] = None,
    accountant: Annotated[str, typer.Option(help="pld or rdp")] = "pld",
    overwrite: Annotated[bool, typer.Option(help="replace an older model folder")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the privacy report as JSON")] = False,
) -> None:  # fmt: skip
    """Train a private model on a table and write a model folder.

    Example: weightclip train data.csv --target income --epsilon 1 --out model/
    """
    from weightclip._streams import Streams
    from weightclip._tabular import _defaults, _files, _folder
    from weightclip._tabular._fit import (
        NonPrivateScaling,
        Plan,
        PrivateScaling,
        PublicScaling,
        fit_classifier,
        fit_regressor,
    )

    regression = _task(task)
    if public_scaling and non_private_scaling:
        raise WeightclipError("--public-scaling and --non-private-scaling exclude each other.")
    if not epsilon > 0:
        raise WeightclipError(f"--epsilon must be positive, got {epsilon:g}.")
    if delta is not None and not 0 < delta < 1:
        raise WeightclipError(f"--delta must lie strictly between 0 and 1, got {delta:g}.")
    known = _schema(schema, classes, target_range, ignore, categorical, target)
    _check_folder(out, overwrite)
    console = Console(stderr=True)
    with Progress(console=console, transient=True) as bar:
        reading = bar.add_task("reading", total=None)
        try:
            loaded = _files.load(_files.File(data, delimiter), target, known, regression)
        except OSError as error:
            raise WeightclipError(f"cannot set up a scratch file ({error.strerror or error}).") from error
        bar.remove_task(reading)
        n = len(loaded.table)
        if not as_json:
            console.print(_types(loaded))
        how = NonPrivateScaling() if non_private_scaling else PublicScaling() if public_scaling else PrivateScaling()
        steps = bar.add_task("training", total=None)
        chosen: dict[str, Any] = {} if epochs is None else {"epochs": epochs}
        if hidden is not None:
            chosen["hidden_layer_sizes"] = _widths(hidden)
        notes = (
            [f"the types of columns {', '.join(loaded.inferred)} were inferred from their values"]
            if loaded.inferred
            else []
        )
        notes += ["delta was set from the number of records, which counts as public"] if delta is None else []
        plan = Plan(
            epsilon, _defaults.delta(n) if delta is None else delta, how, chosen, accountant,
            Streams.secure() if seed is None else Streams.seeded(seed),
            progress=lambda done, total: bar.update(steps, completed=done, total=total),
            not_covered=tuple(notes),
        )  # fmt: skip
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if n * epsilon < 200:
                warnings.warn(
                    f"{n} records at epsilon {epsilon:g} teach a model next to nothing: expect chance.",
                    stacklevel=1,
                )
            if regression:
                model, report, _ = fit_regressor(loaded.table, loaded.target, known.target_range, target, plan)
            else:
                if len(loaded.classes) < 2:
                    raise WeightclipError(
                        f"column {target!r} holds {len(loaded.classes)} class: at least two are needed."
                    )
                if len(loaded.classes) > 100:
                    warnings.warn(
                        f"{len(loaded.classes)} classes share one budget: expect little accuracy.", stacklevel=1
                    )
                codes = _codes(loaded.target, len(loaded.classes))
                model, report, _ = fit_classifier(loaded.table, codes, loaded.classes, target, plan)
        _folder.save(out, model.tensors(), model.pipeline(), report, overwrite=overwrite)
    for warning in caught:
        console.print(f"[yellow]warning:[/yellow] {warning.message}", highlight=False)
    if as_json:
        print(json.dumps(report))
    else:
        print(f"{out}: {report['statement']}")


def _task(task: str) -> bool:
    if task not in ("classification", "regression"):
        raise WeightclipError(f"--task must be classification or regression, got {task!r}.")
    return task == "regression"


def _schema(path, classes, target_range, ignore, categorical, target: str):
    from dataclasses import replace

    from weightclip._tabular import Column, Schema

    known = Schema() if path is None else Schema.read(path)
    if target in known.ignore or known.column(target) is not None:
        raise WeightclipError(f"the schema describes {target!r} as a feature, but it is the target.")
    if classes is not None:
        known = replace(known, classes=tuple(c.strip() for c in classes.split(",")))
        if len(set(known.classes or ())) != len(known.classes or ()):
            raise WeightclipError("--classes lists a label twice.")
    if target_range is not None:
        try:
            low, high = (float(v) for v in target_range.split(","))
        except ValueError:
            raise WeightclipError(f"--target-range must be LOW,HIGH, got {target_range!r}.") from None
        known = replace(known, target_range=(low, high))
    if known.target_range is not None and not known.target_range[0] < known.target_range[1]:
        raise WeightclipError(f"--target-range must be LOW,HIGH with LOW < HIGH, got {known.target_range}.")
    extra = tuple(Column(name, "categorical") for name in categorical or () if known.column(name) is None)
    return replace(known, columns=known.columns + extra, ignore=known.ignore + tuple(ignore or ()))


def _check_folder(out: Path, overwrite: bool) -> None:
    """Refuse early what could not be written after minutes of training."""
    from weightclip._tabular._folder import CHECKSUMS

    if out.exists() and not (overwrite and (out / CHECKSUMS).is_file()):
        hint = "it is no model folder" if overwrite else "choose another, or add --overwrite"
        raise WeightclipError(f"--out {out} exists already: {hint}.")
    parent = out.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise WeightclipError(f"--out {out}: no permission to write into {parent}.")


def _widths(text: str) -> tuple[int, ...]:
    if text.lower() in ("none", ""):
        return ()
    try:
        widths = tuple(int(v) for v in text.split(","))
    except ValueError:
        widths = (0,)
    if min(widths) < 1:
        raise WeightclipError(f"--hidden must be widths like 16 or 32,16, or none; got {text!r}.")
    return widths


def _codes(target, classes: int):
    import numpy as np

    missing = 2 if classes == 2 else -1  # contributes nothing
    return np.where(np.isnan(target), missing, target).astype(np.int64)


def _types(loaded) -> Grid:
    grid = Grid(title="columns", title_justify="left")
    for head in ("name", "type", "public", "type from"):
        grid.add_column(head)
    for c in loaded.table.columns:
        public = f"[{c.low:g}, {c.high:g}]" if c.bounded else f"{len(c.categories)} categories" if c.categories else "-"
        grid.add_row(c.name, c.kind, public.replace("[", r"\["), "values" if c.name in loaded.inferred else "declared")
    return grid
