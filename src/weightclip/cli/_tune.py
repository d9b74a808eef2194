"""``weightclip tune``: settings for a table of your own, by a search that pays for itself."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from weightclip.errors import WeightclipError


def tune(
    data: Annotated[Path, typer.Argument(help="table: .csv, .tsv (also .gz), .parquet, .arrow or .feather")],
    target: Annotated[str, typer.Option(help="column to predict")],
    epsilon: Annotated[float, typer.Option(help="privacy budget of the whole search and the model it releases")],
    out: Annotated[Path, typer.Option(help="model folder to write")],
    delta: Annotated[float | None, typer.Option(help="its delta (default 1/n^2, rounded down)")] = None,
    mean_runs: Annotated[float, typer.Option(help="mean of the random number of runs")] = 10.0,
    score_noise: Annotated[float, typer.Option(help="noise of a run's validation score, in records")] = 10.0,
    schema: Annotated[Path | None, typer.Option(help="JSON file: types, public ranges and categories")] = None,
    task: Annotated[str, typer.Option(help="classification or regression")] = "classification",
    classes: Annotated[str | None, typer.Option(help="public class labels, separated by commas")] = None,
    target_range: Annotated[str | None, typer.Option(help="public range of a numeric target, as LOW,HIGH")] = None,
    ignore: Annotated[list[str] | None, typer.Option(help="column to leave out (repeatable)")] = None,
    categorical: Annotated[list[str] | None, typer.Option(help="column to treat as categorical (repeatable)")] = None,
    epochs: Annotated[float | None, typer.Option(help="passes over the data of every run")] = None,
    n_records: Annotated[
        int | None, typer.Option(help="public number of records, if the true one is private", min=1)
    ] = None,
    delimiter: Annotated[str | None, typer.Option(help="of delimited text (default comma, tab for .tsv)")] = None,
    seed: Annotated[int | None, typer.Option(help="repeatable noise, for experiments only")] = None,
    overwrite: Annotated[bool, typer.Option(help="replace an older model folder")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the privacy report as JSON")] = False,
) -> None:
    """Search settings on a table and write the best model; epsilon covers search, comparison and model together.

    A random number of runs try random settings on four fifths of the records; the rest compares them, with noise.
    Only the best run is released, and nothing is said about the others.

    Example: weightclip tune data.csv --target income --epsilon 1 --out model/
    """
    from weightclip.cli._train import _check_settings, _codes, _schema, _task
    from weightclip.noise import Streams
    from weightclip.tabular import FitPlan, PrivateScaling, SearchPlan, Task, check_budget, search
    from weightclip.tabular import defaults as _defaults
    from weightclip.tabular import files as _files
    from weightclip.tabular import folder as _folder

    regression = _task(task)
    check_budget(epsilon, delta, "--epsilon", "--delta")
    if not 1 < mean_runs <= 1e4:
        raise WeightclipError(f"--mean-runs must be a number above 1 (at most 10,000), got {mean_runs:g}.")
    if not 0 < score_noise < math.inf:
        raise WeightclipError(f"--score-noise must be a positive number, got {score_noise:g}.")
    _check_settings("pld", epochs, seed, None)
    known = _schema(schema, classes, target_range, ignore, categorical, target)
    if regression and known.target_range is None:
        raise WeightclipError("tune --task regression needs --target-range: runs are compared by errors within it.")
    if regression and known.classes is not None:
        raise WeightclipError("--classes belongs to classification; for a numeric target give --target-range.")
    if not regression and known.target_range is not None:
        raise WeightclipError("--target-range belongs to --task regression.")
    _folder.check_place(out, overwrite, "--out ")
    console = Console(stderr=True)
    with console.status("searching"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            loaded = _files.load(_files.File(data, delimiter), target, known, regression)
        except OSError as error:
            raise WeightclipError(f"cannot set up a scratch file ({error.strerror or error}).") from error
        if not regression and len(loaded.classes) < 2:
            raise WeightclipError(f"column {target!r} holds {len(loaded.classes)} class: at least two are needed.")
        n = len(loaded.table) if n_records is None else n_records
        notes = [f"the types of columns {', '.join(loaded.inferred)} were inferred from their values"]
        notes = notes if loaded.inferred else []
        if delta is None and n_records is None:
            notes.append("delta was set from the number of records, which counts as public")
        plan = FitPlan(
            epsilon, _defaults.delta(n) if delta is None else delta, PrivateScaling(),
            {} if epochs is None else {"epochs": epochs}, "pld",
            Streams.secure() if seed is None else Streams.seeded(seed), not_covered=tuple(notes), records=n,
        )  # fmt: skip
        labels = loaded.target if regression else _codes(loaded.target, len(loaded.classes))
        span = known.target_range or (0.0, 1.0)
        work = Task(loaded.table, labels, () if regression else loaded.classes, span, target)
        model, report = search(work, SearchPlan(plan, mean_runs, score_noise))
        _folder.save(out, model.tensors(), model.pipeline(), report, overwrite=overwrite)
    for text in dict.fromkeys(str(warning.message) for warning in caught):  # once, however many runs there were
        console.print(f"[yellow]warning:[/yellow] {escape(text)}", highlight=False)
    if as_json:
        print(json.dumps(report))
    else:
        print(f"{out}: {report['statement']} Noisy validation score {report['search']['score']:.3f}.")
