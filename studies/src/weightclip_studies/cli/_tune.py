"""`weightclip-study tune`: accuracy against ε by Bayesian optimisation, or a search that pays for itself."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Annotated

import typer

from weightclip_studies.cli._reproduce import _names, _progress, _workers


def tune(
    dataset: Annotated[str, typer.Argument(help="One of the seven tabular sets.")],
    methods: Annotated[str, typer.Option(help="Comma-separated methods; the same number of trials for each.")] = (
        "dp-sgd,lip-factors"
    ),
    space: Annotated[str, typer.Option(help="'ours' or 'paper'.")] = "ours",
    trials: Annotated[int, typer.Option(help="Configurations tried for each method.", min=4)] = 40,
    seeds: Annotated[int, typer.Option(help="Seeds of a configuration.", min=1)] = 2,
    group_norm: Annotated[bool, typer.Option(help="With group normalisation.")] = False,
    accounted: Annotated[
        bool, typer.Option(help="Pay for the search: random number of runs, total ε printed.")
    ] = False,
    epsilon: Annotated[
        float | None, typer.Option(help="Total ε of an accounted search; the paper's by default.")
    ] = None,
    mean_runs: Annotated[float, typer.Option(help="Mean number of runs of an accounted search.")] = 10.0,
    seed: Annotated[int | None, typer.Option(help="Seed of an accounted search, for experiments.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the Pareto front (CSV, PNG) or the accounted result.")] = Path(
        "runs/tune"
    ),
    store: Annotated[Path, typer.Option(help="Results store (SQLite); a killed search continues from it.")] = Path(
        "runs/tune.sqlite"
    ),
    workers: Annotated[int, typer.Option(help="Processes: methods are searched side by side.", min=1)] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Search settings for a tabular set: the front of accuracy against ε (qLogNEHVI), or one accounted search.

    Example: weightclip-study tune adult
    """
    import numpy as np
    from safetensors.numpy import save_file

    from weightclip_studies import data
    from weightclip_studies.tables._space import PRINTED_METHODS, PRIVATE
    from weightclip_studies.tables._store import Store
    from weightclip_studies.tables._tune import accounted_search, plot_pareto
    from weightclip_studies.tables._tune import tune as run_tune

    _names(dataset, data.names(), "dataset")
    allowed = tuple(m for m in PRIVATE if not (accounted and m in PRINTED_METHODS))
    names = _names(methods, allowed, "methods")
    if space not in ("ours", "paper"):
        raise typer.BadParameter(f"{space!r} is neither 'ours' nor 'paper'", param_hint="--space")
    say = _progress(as_json)
    out.mkdir(parents=True, exist_ok=True)
    if accounted:
        results = {}
        for method in names:
            found = accounted_search(
                dataset, method, group_norm=group_norm, total_epsilon=epsilon, mean_runs=mean_runs, seed=seed
            )
            model = out / f"accounted_{dataset}_{method}.safetensors"
            save_file({k: np.ascontiguousarray(v) for k, v in found.tensors().items()}, model)
            results[method] = {**found.to_json(), "model": str(model)}
            if not as_json:
                typer.echo(
                    f"{method}: total ε = {found.epsilon:.4g} at δ = {found.delta:.3g} for the whole search "
                    f"({found.mean_runs:g} runs on average; one run alone {found.run_epsilon:.4g}), noisy validation "
                    f"accuracy {found.score:.4f}; its model: {model}"
                )
        (out / f"accounted_{dataset}.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        if as_json:
            typer.echo(json.dumps(results))
        return
    if workers > 1:
        _workers(workers, _one, [(str(store), dataset, m, group_norm, space, trials, seeds) for m in names])
    fronts = {
        method: run_tune(
            Store(store), dataset, method, group_norm=group_norm, space=space, trials=trials, seeds=seeds, progress=say
        )
        for method in names
    }
    picture = plot_pareto(out / f"pareto_{dataset}_{space}.png", fronts, f"{dataset}: accuracy against ε")
    table = out / f"pareto_{dataset}_{space}.csv"
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("method", "epsilon", "accuracy", "pareto", "config"))
        for method, found in fronts.items():
            for t in found:
                row = (method, f"{t.epsilon:.5g}", f"{t.accuracy:.5g}", t.pareto, json.dumps(t.config, sort_keys=True))
                writer.writerow(row)
    note = "ε is that of one run; choosing among runs is not charged (use --accounted)"
    if as_json:
        front = {m: [{"epsilon": t.epsilon, "accuracy": t.accuracy} for t in f if t.pareto] for m, f in fronts.items()}
        typer.echo(json.dumps({"fronts": front, "files": [str(picture), str(table)], "note": note}))
        return
    for method, found in fronts.items():
        for t in sorted((t for t in found if t.pareto), key=lambda t: t.epsilon):
            typer.echo(f"{method:14s} ε {t.epsilon:8.3f}  validation accuracy {t.accuracy:.4f}")
    typer.echo(f"{note}; written to {picture} and {table}")


def _one(store: str, dataset: str, method: str, group_norm: bool, space: str, trials: int, seeds: int) -> None:
    """Worker: one method's search; its runs land in the store."""
    import torch

    from weightclip_studies.tables._store import Store
    from weightclip_studies.tables._tune import tune as run_tune

    torch.set_num_threads(1)
    run_tune(Store(store), dataset, method, group_norm=group_norm, space=space, trials=trials, seeds=seeds)
