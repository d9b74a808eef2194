"""The paper's multi-objective search with its front: chosen on validation, the front alone read on the test part.

The search itself is `_tune.tune`. Here it is run for several methods in our space and in the paper's, every trial is
written down, and what a paid search would have cost stands beside what one run costs.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weightclip import accounting
from weightclip.tabular import searched_epsilon

from ._paper import printed
from ._runs import compute_runs, prepare, run_key, settings_of
from ._store import Store
from ._tune import Trial, tune

PLAN = (("ours", "dp-sgd"), ("ours", "lip-weights"), ("ours", "joint-cap"), ("paper", "dp-sgd"),
        ("paper", "lip-weights"))  # fmt: skip
"""(space, method); the paper's space has no joint cap."""

SCORE_SIGMA = 10.0
"""Noise of a paid search on its count of right validation answers, as in `_tune.accounted_search`."""

COLUMNS = (
    "dataset", "space", "method", "trial", "epsilon", "delta", "valid_accuracy", "valid_seeds", "on_front",
    "test_accuracy", "test_sd", "test_seeds", "epsilon_random_search", "sigma", "q", "steps", "settings",
)  # fmt: skip


@dataclass(frozen=True)
class Point:
    """One trial of one search.

    Attributes:
        space: "ours" or "paper".
        method: Method.
        trial: Its number in the order of the search.
        found: Settings, ε, mean validation accuracy, whether on the front.
        sigma: Noise multiplier.
        q: Sampling rate.
        steps: Number of steps.
        test: Test accuracies by seed; empty off the front.
        random_search: ε of a paid random search of as many runs on average, each like this one; of the front only.
    """

    space: str
    method: str
    trial: int
    found: Trial
    sigma: float
    q: float
    steps: int
    test: tuple[float, ...] = ()
    random_search: float | None = None


def search_front(
    store: Store,
    dataset: str,
    plan: Sequence[tuple[str, str]] = PLAN,
    *,
    trials: int = 60,
    initial: int = 16,
    batch: int = 4,
    seeds: int = 3,
    test_seeds: int = 5,
    progress: Callable[[str], None] | None = None,
    advance: Callable[[int], None] | None = None,
) -> list[Point]:
    """Every trial of every search of the plan; points of a front, decided on validation, also have test accuracies.

    Formal guarantees: none. ε is that of one run; the search reads validation records without noise and its trials are
    not charged (as in the paper). Test seeds are 0, 1, ..., which no search uses.

    Args:
        store: Where runs are kept; a killed search continues from it.
        dataset: Data set.
        plan: (space, method) pairs, the same number of trials for each.
        trials: Configurations.
        initial: Of them drawn before the model takes over.
        batch: Configurations proposed at once.
        seeds: Seeds of a trial on the validation part.
        test_seeds: Seeds of a point of the front on the test part; 0 leaves the test part alone.
        progress: Called with a line per batch.
        advance: Called with the number of trials of each batch.
    """
    prepared = prepare(dataset)
    n, points = len(prepared.parts.train), []
    for space, method in plan:
        found = tune(
            store, dataset, method, space=space, trials=trials, initial=initial, batch=batch, seeds=seeds,
            progress=progress, advance=advance,
        )  # fmt: skip
        front = [t for t in found if t.pareto]
        keys = [run_key(dataset, method, False, t.config, s, "test") for t in front for s in range(test_seeds)]
        store.compute(keys, compute_runs)
        for i, t in enumerate(found):
            settings, sigma = settings_of(t.config, method, prepared), float(t.config["sigma"])
            q, steps = settings.sample_rate(n), settings.steps(n)
            test, cost = (), None
            if t.pareto:
                own = [run_key(dataset, method, False, t.config, s, "test") for s in range(test_seeds)]
                test = tuple(float(v["accuracy"]) for v in store.get_many(own) if v is not None)
                cost = _random_search(sigma, q, steps, prepared.delta, trials)
            points.append(Point(space, method, i, t, sigma, q, steps, test, cost))
    return points


def _random_search(sigma: float, q: float, steps: int, delta: float, runs: int) -> float:
    one = [accounting.Mechanism("gaussian", sigma, q, steps), accounting.Mechanism("gaussian", SCORE_SIGMA, 1.0, 1)]
    return searched_epsilon(one, delta, runs, 30.0)


def released_all(points: Sequence[Point], delta: float, seeds: int) -> float:
    """ε for the training records if every run of these trials were released (adaptive composition, fresh noise)."""
    spent = [accounting.Mechanism("gaussian", p.sigma, p.q, p.steps * seeds) for p in points]
    return accounting.epsilon(spent, delta, "rdp")


def write_points(points: Sequence[Point], dataset: str, seeds: int, path: Path) -> Path:
    """pareto_<dataset>.csv: every trial."""
    delta = prepare(dataset).delta
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for p in points:
            read = p.test and (f"{np.mean(p.test):.5f}", f"{np.std(p.test, ddof=len(p.test) > 1):.5f}", len(p.test))
            writer.writerow(
                (dataset, p.space, p.method, p.trial, f"{p.found.epsilon:.5g}", f"{delta:.5g}",
                 f"{p.found.accuracy:.5f}", seeds, int(p.found.pareto), *(read or ("", "", "")),
                 "" if p.random_search is None else f"{p.random_search:.5g}", f"{p.sigma:.5g}", f"{p.q:.5g}", p.steps,
                 json.dumps(p.found.config, sort_keys=True))
            )  # fmt: skip
    return path


def summary(points: Sequence[Point], dataset: str, seeds: int) -> list[dict[str, Any]]:
    """One row per search: the best point of the front within the paper's ε, and what the search would have cost."""
    target, delta = printed(dataset).epsilon, prepare(dataset).delta
    rows = []
    for space, method in dict.fromkeys((p.space, p.method) for p in points):
        mine = [p for p in points if (p.space, p.method) == (space, method)]
        front = [p for p in mine if p.found.pareto]
        within = [p for p in front if p.found.epsilon <= target]
        best = max(within, key=lambda p: p.found.accuracy) if within else None
        rows.append({
            "dataset": dataset, "space": space, "method": method, "trials": len(mine), "runs": len(mine) * seeds,
            "front": len(front), "lowest_epsilon": f"{min(p.found.epsilon for p in mine):.4g}",
            "paper_epsilon": target, "epsilon": f"{best.found.epsilon:.4g}" if best else "",
            "valid_accuracy": f"{best.found.accuracy:.4f}" if best else "",
            "test_accuracy": f"{np.mean(best.test):.4f}" if best and best.test else "",
            "epsilon_random_search": f"{best.random_search:.4g}" if best and best.random_search else "",
            "epsilon_all_released": f"{released_all(mine, delta, seeds):.4g}",
        })  # fmt: skip
    return rows


def write_summary(rows: Sequence[dict[str, Any]], path: Path) -> Path:
    """pareto_cost.csv."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


def plot_front(points: Sequence[Point], dataset: str, path: Path) -> Path:
    """A panel per space: trials on validation, the front as a staircase, its test accuracies with their spread."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from ._output import COLOURS, LABELS

    titles = {"ours": "our space", "paper": "the paper's space"}
    spaces = list(dict.fromkeys(p.space for p in points))
    figure = Figure(figsize=(0.6 + 5.9 * len(spaces), 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(spaces), sharex=True, sharey=True, squeeze=False)[0]
    paper = printed(dataset)
    marks = (("dp-sgd", max(paper.plain[0], paper.grouped[0])), ("lip-weights", max(paper.plain[1], paper.grouped[1])))
    for axis, space in zip(axes, spaces, strict=True):
        for method in dict.fromkeys(p.method for p in points if p.space == space):
            mine = [p for p in points if (p.space, p.method) == (space, method)]
            front = sorted((p for p in mine if p.found.pareto), key=lambda p: p.found.epsilon)
            colour = COLOURS[method]
            axis.scatter([p.found.epsilon for p in mine], [p.found.accuracy for p in mine], s=9, color=colour,
                         alpha=0.3, linewidths=0)  # fmt: skip
            axis.step([p.found.epsilon for p in front], [p.found.accuracy for p in front], where="post", color=colour,
                      linewidth=1.6, label=f"{LABELS[method]}: front on validation")  # fmt: skip
            read = [p for p in front if p.test]
            if read:
                axis.errorbar([p.found.epsilon for p in read], [float(np.mean(p.test)) for p in read],
                              yerr=[float(np.std(p.test)) for p in read], fmt="o", color=colour, markersize=4.5,
                              markerfacecolor="white", linewidth=0.9,
                              label=f"{LABELS[method]}: its points on the test part")  # fmt: skip
        for method, accuracy in marks:
            axis.plot([paper.epsilon], [accuracy], "*", color=COLOURS[method], markersize=12, markeredgecolor="black",
                      markeredgewidth=0.6,
                      label=f"printed {'DP-SGD' if method == 'dp-sgd' else 'Lip-DP-SGD'}")  # fmt: skip
        axis.set_xscale("log")
        axis.set(xlabel="ε of one run at δ = 1/n (search not paid for)", title=f"{dataset}, {titles[space]}")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#eceef1", linewidth=0.7)
        axis.legend(frameon=False, loc="lower right", fontsize=7.5)
    axes[0].set_ylabel("accuracy")
    shown = sorted([a for _, a in marks] + [p.found.accuracy for p in points if p.found.pareto])
    low, high = float(np.quantile(shown, 0.04)), max([*shown, *(a for p in points for a in p.test)])
    axes[0].set_ylim(low - 0.25 * (high - low), high + 0.05 * (high - low) + 1e-3)
    axes[0].set_xlim(0.7 * min(p.found.epsilon for p in points), 30)
    figure.savefig(path, dpi=130)
    return path
