"""`weightclip-study reproduce pareto`: the paper's multi-objective search, with its front on file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

_OUT, _STORE = Path("results/tabular"), Path("runs/pareto.sqlite")


def pareto(
    datasets: Annotated[str, typer.Option(help="Comma-separated data sets.")] = "adult,nursery",
    trials: Annotated[int, typer.Option(help="Configurations of each method in each space.", min=4)] = 60,
    seeds: Annotated[int, typer.Option(help="Seeds of a configuration, on the validation part.", min=1)] = 3,
    test_seeds: Annotated[
        int, typer.Option(help="Other seeds, on the test part, for points of the front only; 0: leave it alone.", min=0)
    ] = 5,
    out: Annotated[Path, typer.Option(help="Folder the results are written to.")] = _OUT,
    store: Annotated[Path, typer.Option(help="Results store (SQLite); a killed search continues from it.")] = _STORE,
    quick: Annotated[
        bool, typer.Option("--quick", help="8 trials, 1 seed, test part not read; written beside, not over.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON summary instead of text.")] = False,
) -> None:
    """Search accuracy against ε by Bayesian optimisation (qLogNEHVI), in our space and the paper's; keep every trial.

    The front is chosen on validation accuracy; only its points are then run on the test part. ε is that of ONE run:
    the search is not paid for. pareto_cost.csv says what it would cost; `weightclip-study tune --accounted` pays.
    About 15 minutes (adult) and 6 minutes (nursery) on one core.

    Example: weightclip-study reproduce pareto --datasets adult
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from weightclip_studies import data
    from weightclip_studies.cli._reproduce import _names
    from weightclip_studies.tables._pareto import PLAN, plot_front, search_front, summary, write_points, write_summary
    from weightclip_studies.tables._store import Store

    names = _names(datasets, data.names(), "datasets")
    effort = {"trials": trials, "seeds": seeds, "test_seeds": test_seeds}
    if quick:
        effort = {"trials": 8, "initial": 6, "batch": 2, "seeds": 1, "test_seeds": 0}
        out = Path("runs/quick/tabular") if out == _OUT else out
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    rows, files = [], []
    with Progress(*columns, console=console, transient=True, disable=as_json or not console.is_terminal) as bar:
        task = bar.add_task("trials", total=len(names) * len(PLAN) * effort["trials"])
        for name in names:
            bar.update(task, description=name)
            say = None if as_json else lambda line: bar.console.print(line)
            points = search_front(
                Store(store), name, PLAN, **effort, progress=say, advance=lambda count: bar.advance(task, count)
            )
            files.append(write_points(points, name, effort["seeds"], out / f"pareto_{name}.csv"))
            files.append(plot_front(points, name, out / f"pareto_{name}.png"))
            rows += summary(points, name, effort["seeds"])
    files.append(write_summary(rows, out / "pareto_cost.csv"))
    if as_json:
        typer.echo(json.dumps({"files": [str(f) for f in files], "summary": rows}))
        return
    for row in rows:
        typer.echo(
            f"{row['dataset']:14s} {row['space']:6s} {row['method']:12s} front of {row['front']} in {row['trials']}; "
            f"within the paper's ε = {row['paper_epsilon']:g}: ε {row['epsilon'] or '-'}, "
            f"validation {row['valid_accuracy'] or '-'}, test {row['test_accuracy'] or '-'}; "
            f"if paid for: random search of as many runs ε {row['epsilon_random_search'] or '-'}, "
            f"every run released ε {row['epsilon_all_released']}"
        )
    typer.echo(f"ε is that of one run, the search is not paid for; written to {out}")


def register(app: typer.Typer) -> None:
    """Add the command to the `reproduce` application."""
    app.command()(pareto)
