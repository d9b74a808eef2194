"""``weightclip tune``: settings for a table or a training function of your own, by a search that pays for itself."""

from __future__ import annotations

import contextlib
import json
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from weightclip.errors import WeightclipError

if TYPE_CHECKING:
    from weightclip.search import FunctionSearch, Shared, TableSearch


def tune(
    data: Annotated[
        str, typer.Argument(help="table: .csv, .tsv (also .gz), .parquet, .arrow, .feather; or path.py:function")
    ],
    epsilon: Annotated[float, typer.Option(help="privacy budget of the whole search and the model it releases")],
    out: Annotated[Path, typer.Option(help="model folder to write")],
    target: Annotated[str | None, typer.Option(help="column to predict")] = None,
    delta: Annotated[float | None, typer.Option(help="its delta (default of a table: 1/n^2, rounded down)")] = None,
    mean_runs: Annotated[float, typer.Option(help="mean of the random number of runs")] = 10.0,
    score_noise: Annotated[float, typer.Option(help="noise of a run's validation score, in records")] = 10.0,
    workers: Annotated[int, typer.Option(help="processes that share the runs (needs the extra 'search')")] = 1,
    storage: Annotated[
        str | None,
        typer.Option(help="file or database URL that holds the search while it lasts (private!)",
                     envvar="WEIGHTCLIP_STORAGE"),
    ] = None,
    resume: Annotated[bool, typer.Option(help="go on with an interrupted search, or help in one")] = False,
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
    sample_rate: Annotated[float | None, typer.Option(help="of a function: chance of a record to be drawn")] = None,
    steps: Annotated[int | None, typer.Option(help="of a function: steps of every run")] = None,
    seed: Annotated[int | None, typer.Option(help="repeatable noise, for experiments only")] = None,
    overwrite: Annotated[bool, typer.Option(help="replace an older model folder")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the privacy report as JSON")] = False,
) -> None:  # fmt: skip
    """Search settings on a table and write the best model; epsilon covers search, comparison and model together.

    A random number of runs try random settings on four fifths of the records; the rest compares them, with noise.
    Only the best run is released, and nothing is said about the others, not even how many there are.

    A function train(run) of your own draws its settings from run, trains with run.make_private, and returns its score.

    Example: weightclip tune data.csv --target income --epsilon 1 --out model/
    """
    from weightclip.search import FunctionSearch, Place, SearchOver, Shared, shared_search
    from weightclip.tabular import check_budget
    from weightclip.tabular import folder as _folder

    check_budget(epsilon, delta, "--epsilon", "--delta")
    if not 1 < mean_runs <= 1e4:
        raise WeightclipError(f"--mean-runs must be a number above 1 (at most 10,000), got {mean_runs:g}.")
    if not 0 < score_noise < math.inf:
        raise WeightclipError(f"--score-noise must be a positive number, got {score_noise:g}.")
    given: dict[str, Any] = dict(locals())
    work = _function(given) if ".py:" in data else _table(given)
    _folder.check_place(out, overwrite, "--out ")
    shared: Shared | None = None
    if workers != 1 or storage is not None or resume:
        shared = Shared(Place.of(storage, out), workers, resume)
    console = Console(stderr=True)
    with _searching(console), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with contextlib.nullcontext() if shared is None else shared_search(work, shared) as board:
                if isinstance(work, FunctionSearch):
                    report = _write_network(work, board, out, overwrite)
                else:
                    model, report = work.search(board)
                    _folder.save(out, model.tensors(), model.pipeline(), report, overwrite=overwrite)
        except SearchOver as over:
            print(over)
            return
    for text in dict.fromkeys(str(warning.message) for warning in caught):  # once, however many runs there were
        console.print(f"[yellow]warning:[/yellow] {escape(text)}", highlight=False)
    if as_json:
        print(json.dumps(report))
    elif isinstance(work, FunctionSearch):
        print(f"{out}: {report['statement']} Noisy validation score {report['search']['score']:.1f} records.")
    else:
        print(f"{out}: {report['statement']} Noisy validation score {report['search']['score']:.3f}.")


def _table(given: dict[str, Any]) -> TableSearch:
    """The search that the options of a table describe."""
    from weightclip.cli._train import _check_settings, _schema, _task
    from weightclip.search import TableSearch
    from weightclip.tabular import files as _files

    regression, target = _task(given["task"]), given["target"]
    if target is None:
        raise WeightclipError("--target is needed: the column to predict.")
    _refuse(given, ("sample_rate", "steps"), "belongs to a training function (path.py:function)")
    _check_settings("pld", given["epochs"], given["seed"], None)
    described = ("schema", "classes", "target_range", "ignore", "categorical")
    known = _schema(target, regression, *(given[name] for name in described))
    if regression and known.target_range is None:
        raise WeightclipError("tune --task regression needs --target-range: runs are compared by errors within it.")
    return TableSearch(
        _files.File(Path(given["data"]), given["delimiter"]), target, known, regression, given["epsilon"],
        given["delta"], given["mean_runs"], given["score_noise"], given["epochs"], given["n_records"], given["seed"],
    )  # fmt: skip


def _function(given: dict[str, Any]) -> FunctionSearch:
    """The search that the options of a training function describe."""
    from weightclip.cli._train import _check_settings
    from weightclip.search import FunctionSearch, load_function

    others = ("target", "schema", "classes", "target_range", "ignore", "categorical", "epochs", "n_records",
              "delimiter")  # fmt: skip
    _refuse(given, others, "belongs to a table, not to a training function")
    for name in ("delta", "sample_rate", "steps"):
        if given[name] is None:
            raise WeightclipError(f"a training function needs --{name.replace('_', '-')}: it decides about the cost.")
    if not 0 < given["sample_rate"] < 1:
        raise WeightclipError(f"--sample-rate must lie strictly between 0 and 1, got {given['sample_rate']:g}.")
    if given["steps"] < 1:
        raise WeightclipError(f"--steps must be at least 1, got {given['steps']}.")
    _check_settings("pld", None, given["seed"], None)
    load_function(given["data"])
    names = ("data", "epsilon", "delta", "sample_rate", "steps", "mean_runs", "score_noise", "seed")
    return FunctionSearch(*(given[name] for name in names))


def _refuse(given: dict[str, Any], names: tuple[str, ...], why: str) -> None:
    for name in names:
        if given[name]:
            raise WeightclipError(f"--{name.replace('_', '-')} {why}.")


def _write_network(work: FunctionSearch, board: Any, out: Path, overwrite: bool) -> dict[str, Any]:
    """The weights that a training function's search found, in a folder; their report."""
    import safetensors.torch

    from weightclip.search import network_card
    from weightclip.tabular import folder as _folder

    weights, report = work.search(board)
    _folder.save_network(out, safetensors.torch.save(weights), report, network_card(report), overwrite=overwrite)
    return report


@contextlib.contextmanager
def _searching(console: Console) -> Iterator[None]:
    """A bar that says how long it has taken, not how far it is: that would tell the number of runs, which is secret."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        bar.add_task("searching (how far it is would tell of the records)", total=None)
        yield
