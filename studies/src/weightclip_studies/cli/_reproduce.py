"""`weightclip-study reproduce`: the paper's experiments, each run kept in a results store and never computed twice."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from weightclip.errors import WeightclipError
from weightclip_studies.cli import _figure, _images, _method, _pareto

app = typer.Typer(no_args_is_help=True, help="Reproduce the paper's tables and figures, with the sound method beside.")

OutOption = Annotated[Path, typer.Option(help="Folder the results are written to.")]
StoreOption = Annotated[Path, typer.Option(help="Results store (SQLite); finished runs in it are not computed again.")]
QuickOption = Annotated[bool, typer.Option("--quick", help="A short run for a first look; written beside, not over.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print a JSON summary instead of text.")]
DatasetsOption = Annotated[str, typer.Option(help="Comma-separated data sets; all seven by default.")]

_OUT, _STORE = Path("results/tabular"), Path("runs/tabular.sqlite")
_FOUND = Path("runs/tabular/chosen.json")


def _folder(out: Path, quick: bool) -> Path:
    return Path("runs/quick/tabular") if quick and out == _OUT else out


def _names(text: str, allowed: tuple[str, ...], option: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()] if text else list(allowed)
    for name in names:
        if name not in allowed:
            raise typer.BadParameter(f"unknown {name!r}: choose from {', '.join(allowed)}", param_hint=f"--{option}")
    return names


def _progress(quiet: bool) -> Callable[[str], None]:
    console, started = Console(stderr=True, highlight=False), time.perf_counter()
    return (
        (lambda line: None) if quiet else lambda line: console.print(f"{time.perf_counter() - started:7.1f} s  {line}")
    )


def _workers(count: int, task: Callable[..., object], arguments: list[tuple]) -> None:
    """Run a task over its arguments in processes that share the store."""
    if count <= 1 or len(arguments) <= 1:
        for args in arguments:
            task(*args)
        return
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        for future in [pool.submit(task, *args) for args in arguments]:
            future.result()


def _one_table(store: str, dataset: str, pairs: list[tuple[str, bool]], seeds: int, encoding: str, accountant: str,
               settings: str | None) -> None:  # fmt: skip
    """Worker: all runs of one data set land in the store."""
    import torch

    from weightclip_studies.tables._settings import load_chosen
    from weightclip_studies.tables._store import Store
    from weightclip_studies.tables._tables import table_rows

    torch.set_num_threads(1)
    chosen = load_chosen(Path(settings) if settings else None)
    table_rows(Store(store), chosen, [dataset], pairs, seeds=seeds, encoding=encoding, accountant=accountant)


def _record_wall(folder: Path, name: str, seconds: float, workers: int = 1, runs: float | None = None) -> None:
    """Wall times of the commands, for the report; ``runs``: of all runs behind them, also those found in the store."""
    path = folder / "wall.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    known[name] = {"seconds": round(seconds, 1), "workers": workers, "cores": os.cpu_count()}
    if runs is not None:
        known[name]["runs_seconds"] = round(runs, 1)
    path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")


@app.command()
def tables(
    out: OutOption = _OUT,
    store: StoreOption = _STORE,
    datasets: DatasetsOption = "",
    seeds: Annotated[int, typer.Option(help="Seeds of every method.", min=1)] = 10,
    settings: Annotated[Path | None, typer.Option(help="Chosen settings; those of the package by default.")] = None,
    workers: Annotated[int, typer.Option(help="Processes.", min=1)] = 2,
    beside: Annotated[bool, typer.Option(help="Also the tables by PLD and with public feature ranges.")] = True,
    again: Annotated[
        bool,
        typer.Option(
            "--again", help="Keep the rows of table1.json: train only methods that it lacks, and write the files anew."
        ),
    ] = False,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Table 1 and the detailed table: every method on seven data sets, ten seeds, the paper's numbers beside them.

    Example: weightclip-study reproduce tables --datasets adult,nursery --workers 2
    """
    from weightclip_studies import data
    from weightclip_studies.tables._output import read_json, write_all, write_csv
    from weightclip_studies.tables._settings import combinations, load_chosen
    from weightclip_studies.tables._store import Store
    from weightclip_studies.tables._tables import judged_again, table_rows, verdicts

    started, say = time.perf_counter(), _progress(as_json)
    names = _names(datasets, data.names(), "datasets")
    folder = _folder(out, quick)
    command = "weightclip-study reproduce tables" + (" --quick" if quick else "")
    if again:
        if not (folder / "table1.json").exists():
            raise WeightclipError(f"--again: there is no table1.json in {folder}: run without it first.")
        known, made = read_json(folder / "table1.json")
        chosen, have = load_chosen(settings), {(row.method, row.group_norm) for row in known}
        new = [pair for pair in combinations() if pair not in have]
        more = table_rows(Store(store), chosen, names, new, seeds=seeds, progress=say) if new else []
        rows = judged_again([*known, *(row for row in more if (row.method, row.group_norm) in new)])
        written = write_all(rows, verdicts(rows, chosen), folder, command, made)
        typer.echo(json.dumps({"files": [str(p) for p in written]}) if as_json else f"written to {folder}")
        return
    seeds = min(seeds, 3) if quick else seeds
    pairs = [pair for pair in combinations() if not (quick and pair[1])]
    chosen = load_chosen(settings)
    source = None if settings is None else str(settings)
    # the long ones first, so that no worker is left alone at the end
    order = sorted(names, key=lambda name: -data.describe(name).rows)
    jobs = [(str(store), name, pairs, seeds, "from-data", "rdp", source) for name in order]
    main = [(method, False) for method in ("dp-sgd", "lip-weights", "lip-factors", "joint-cap", "fix-lip")]
    extra = [] if quick or not beside else [("public", "rdp"), ("from-data", "pld")]
    jobs += [(str(store), name, main, seeds, *kind, source) for kind in extra for name in order]
    _workers(workers, _one_table, jobs)

    results = Store(store)
    rows = table_rows(results, chosen, names, pairs, seeds=seeds, progress=say)
    judged = verdicts(rows, chosen)
    written = write_all(rows, judged, folder, command)
    spent = sum(row.wall_s * row.seeds for row in rows)
    for encoding, accountant in extra:
        more = table_rows(results, chosen, names, main, seeds=seeds, encoding=encoding, accountant=accountant)
        spent += sum(row.wall_s * row.seeds for row in more)
        suffix = "public" if encoding == "public" else accountant
        written.append(write_csv(more, folder / f"table1_{suffix}.csv"))
    _record_wall(folder, "tables", time.perf_counter() - started, workers, spent)
    above = sum(v.above_paper for v in judged)
    better, worse = (sum(v.verdict == word for v in judged) for word in ("above", "below"))
    if as_json:
        summary = {"files": [str(p) for p in written], "above_paper": above, "above_dp_sgd": better,
                   "below_dp_sgd": worse, "data_sets": len(judged)}  # fmt: skip
        typer.echo(json.dumps(summary))
        return
    for v in judged:
        typer.echo(
            f"{v.dataset:15s} {v.variant:16s} median {v.median:.4f}  paper {v.paper:.3f}  "
            f"DP-SGD {v.baseline_median:.4f}  p = {v.p:.3g} (Holm {v.p_holm:.3g})  {v.verdict}"
        )
    typer.echo(
        f"above the paper's Lip-DP-SGD on {above} of {len(judged)}; significantly above equally tuned DP-SGD on "
        f"{better}, below it on {worse}; written to {folder}"
    )


@app.command()
def search(
    store: StoreOption = _STORE,
    datasets: DatasetsOption = "",
    methods: Annotated[str, typer.Option(help="Comma-separated methods; all by default. '+gn': group norm.")] = "",
    settings: Annotated[Path, typer.Option(help="File the chosen settings are written to.")] = _FOUND,
    adopt: Annotated[bool, typer.Option("--adopt", help="At the end, make them the settings of the package.")] = False,
    workers: Annotated[int, typer.Option(help="Processes.", min=1)] = 2,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """The search behind the tables: the same number of trials for every method, chosen on validation; resumable.

    Example: weightclip-study reproduce search --datasets dropout --methods lip-factors,dp-sgd
    """
    from weightclip_studies import data
    from weightclip_studies.tables._search import QUICK, Effort
    from weightclip_studies.tables._settings import adopt as take_over
    from weightclip_studies.tables._settings import combinations, name_of, search_all
    from weightclip_studies.tables._store import Store

    say = _progress(as_json)
    known = {name_of(*pair): pair for pair in combinations()}
    pairs = [known[name] for name in _names(methods, tuple(known), "methods")]
    names = _names(datasets, data.names(), "datasets")
    if quick and adopt:
        raise WeightclipError("--adopt: settings of a quick search are not worth keeping.")
    if quick and settings == _FOUND:
        settings = Path("runs/quick/chosen.json")
    budget = QUICK if quick else Effort()
    order = sorted(names, key=lambda name: -data.describe(name).rows)
    chosen = {}
    for group_norm in (False, True):  # with it, a search starts from what was chosen without
        part = [pair for pair in pairs if pair[1] == group_norm]
        if workers > 1:
            jobs = [(str(store), str(settings), name, *pair, quick) for pair in part for name in order]
            _workers(workers, _one_search, jobs)  # every run lands in the store; choosing from it then takes no time
        chosen = search_all(Store(store), settings, names, part, budget, say) if part else chosen
    if as_json:
        typer.echo(json.dumps({d: {n: c.accuracy for n, c in by.items()} for d, by in chosen.items()}))
    else:
        typer.echo(f"chosen settings of {len(names)} data sets and {len(pairs)} methods written to {settings}")
    if adopt:
        typer.echo(f"now those of the package: {take_over(settings)}", err=True)


def _one_search(store: str, settings: str, dataset: str, method: str, group_norm: bool, quick: bool) -> None:
    """Worker: the search of one method on one data set."""
    import torch

    from weightclip_studies.tables._search import QUICK, Effort
    from weightclip_studies.tables._settings import load_chosen, search_one
    from weightclip_studies.tables._store import Store

    torch.set_num_threads(1)
    path = Path(settings)
    known = load_chosen(path).get(dataset, {}) if path.exists() else {}
    search_one(Store(store), known, dataset, method, group_norm, QUICK if quick else Effort())


@app.command()
def bias(out: OutOption = _OUT, quick: QuickOption = False, as_json: JsonOption = False) -> None:
    """Figures: clipping bias by quadrature and by training, clipping error, theorem check, tightness of every bound.

    Example: weightclip-study reproduce bias --quick
    """
    from weightclip_studies.tables._figures import bias_figures

    started, folder = time.perf_counter(), _folder(out, quick)
    written = bias_figures(folder, quick=quick, progress=_progress(as_json))
    _record_wall(folder, "bias", time.perf_counter() - started)
    if as_json:
        typer.echo(json.dumps({"files": [str(p) for p in written]}))
    else:
        typer.echo(f"{len(written)} files written to {folder}")


@app.command()
def report(
    out: OutOption = _OUT,
    page: Annotated[Path | None, typer.Option(help="File to write; report.html in the folder by default.")] = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """One self-contained HTML page: tables, figures, settings, versions and wall times.

    Example: weightclip-study reproduce report
    """
    from weightclip_studies.tables._report import write_report

    folder = _folder(out, quick)
    try:
        written = write_report(folder, page)
    except FileNotFoundError as error:
        raise WeightclipError(
            f"report: {error.filename} is missing: run `weightclip-study reproduce tables` and `reproduce bias` first"
        ) from error
    typer.echo(json.dumps({"file": str(written)}) if as_json else f"report written to {written}")


_images.register(app)  # images, runtime
_figure.register(app)
_method.register(app)
_pareto.register(app)
