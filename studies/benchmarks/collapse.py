r"""Do fits without declared ranges collapse? Many seeds on synthetic tables, with ranges declared and not.

    python studies/benchmarks/collapse.py --runs 50 --records 600 --epsilons 1 --tables plain,mixed --declared no
    python studies/benchmarks/collapse.py --runs 100 --records 600 --epsilons 1 --tables noise --tasks regression \
        --declared no --append

On generators that took no part in choosing defaults, 200 runs:

    python studies/benchmarks/collapse.py --runs 25 --records 600,2000 --columns 6 --tables fresh,tailed --declared no \
        --tasks classification --out results/estimators/collapse_fresh.csv

A run has collapsed when its score (accuracy, R²) lies more than 0.1 below the median of its setting. For regression the
last columns say how far the constant that a fit would fall back on (the mean of its own predictions) lies below the
best constant, on average, and how many runs lie further than that below their constant.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

from weightclip.tabular import LipDPClassifier, LipDPRegressor

TEST = 4000
FIELDS: tuple[str, ...] = (
    "task", "table", "records", "columns", "epsilon", "ranges", "runs", "median",
    "worst", "collapsed", "error_of_mean", "below_mean",
)  # fmt: skip


def plain(rng: np.random.Generator, n: int, columns: int) -> np.ndarray:
    """Standard normal columns."""
    return rng.normal(size=(n, columns))


def mixed(rng: np.random.Generator, n: int, columns: int) -> np.ndarray:
    """Columns as tables have them: ages, incomes, ratios, counts, tiny measurements."""
    kinds: list[Callable[[], np.ndarray]] = [
        lambda: rng.normal(40, 12, n), lambda: rng.lognormal(10, 1, n), lambda: rng.uniform(0, 1, n),
        lambda: rng.poisson(3, n).astype(float), lambda: rng.normal(0, 1e-3, n), lambda: rng.normal(-200, 30, n),
    ]  # fmt: skip
    return np.column_stack([kinds[j % len(kinds)]() for j in range(columns)])


def fresh(rng: np.random.Generator, n: int, columns: int) -> np.ndarray:
    """Columns of shapes that no default was chosen on: heavy tails, two humps, many zeros, far offsets, few levels."""
    kinds: list[Callable[[], np.ndarray]] = [
        lambda: rng.standard_t(3, n), lambda: rng.choice([-10.0, 10.0], n) + rng.normal(size=n),
        lambda: np.where(rng.random(n) < 0.6, 0.0, rng.lognormal(3, 1.5, n)), lambda: 1e6 + rng.normal(size=n),
        lambda: rng.integers(1, 6, n).astype(float), lambda: 1e-4 * rng.beta(0.5, 0.5, n),
    ]  # fmt: skip
    return np.column_stack([kinds[j % len(kinds)]() for j in range(columns)])


def tailed(rng: np.random.Generator, n: int, columns: int) -> np.ndarray:
    """Correlated columns with tails on one side, on scales from 1e-3 to 1e5."""
    common = rng.gamma(2.0, 1.0, n)
    return np.column_stack([10.0 ** (j % 9 - 3) * (common + rng.pareto(2.5, n)) for j in range(columns)])


def standard(X: np.ndarray) -> np.ndarray:
    """Ranks as normal scores, so that the rule behind the labels does not care for scales."""
    ranks = X.argsort(0).argsort(0)
    return 3.4 * ((ranks + 0.5) / len(X) - 0.5)


TABLES = {
    "plain": plain,
    "mixed": mixed,
    "noise": mixed,
    "fresh": fresh,
    "tailed": tailed,
    "noise_fresh": fresh,
}  # noise: labels that no column tells of


def one(task: str, table: str, n: int, columns: int, epsilon: float, seed: int, declared: bool) -> tuple[float, float]:
    """(score, score of the private mean) of one fit."""
    rng = np.random.default_rng(seed)
    X = TABLES[table](rng, n + TEST, columns)
    weights = np.random.default_rng(columns).normal(size=columns) / np.sqrt(columns)
    z = standard(X) @ weights if not table.startswith("noise") else rng.normal(size=len(X))
    bounds = (X.min(0), X.max(0)) if declared else None
    if task == "classification":
        y = (z + 0.1 * rng.normal(size=len(z)) > 0).astype(int)
        model = LipDPClassifier(epsilon, feature_bounds=bounds, classes=[0, 1], random_state=seed).fit(X[:n], y[:n])
        return float(model.score(X[n:], y[n:])), 0.5
    y = 250 + 80 * z + 8 * rng.normal(size=len(z))
    span = (float(y.min()), float(y.max())) if declared else None
    model = LipDPRegressor(epsilon, feature_bounds=bounds, target_bounds=span, random_state=seed).fit(X[:n], y[:n])
    mean = float(np.mean(model.predict(X[:n])))
    base = 1 - np.mean((y[n:] - mean) ** 2) / np.var(y[n:])
    return float(model.score(X[n:], y[n:])), float(base)


def below_mean(scores: np.ndarray, base: np.ndarray, task: str) -> dict[str, object]:
    """How many regressors are worse than their constant by more than its own error, which is R² below zero."""
    if task != "regression":
        return {"error_of_mean": "", "below_mean": ""}
    own = float(np.mean(np.maximum(-base, 0.0)))
    return {"error_of_mean": f"{own:.4f}", "below_mean": int((scores < base - own).sum())}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=60, help="seeds of each setting")
    parser.add_argument("--out", type=Path, default=Path("results/estimators/collapse.csv"))
    parser.add_argument("--tasks", default="classification,regression")
    parser.add_argument("--tables", default="plain,mixed,noise")
    parser.add_argument("--records", default="600,2000,20000")
    parser.add_argument("--columns", default="4,12")
    parser.add_argument("--epsilons", default="1,2")
    parser.add_argument("--declared", default="no,yes")
    parser.add_argument("--append", action="store_true", help="add to the file instead of writing it anew")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    settings = [
        (task, table, int(n), int(columns), float(e), declared == "yes")
        for task in arguments.tasks.split(",") for table in arguments.tables.split(",")
        for n in arguments.records.split(",") for columns in arguments.columns.split(",")
        for e in arguments.epsilons.split(",") for declared in arguments.declared.split(",")
    ]  # fmt: skip
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    add = arguments.append and arguments.out.exists()
    with arguments.out.open("a" if add else "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        if not add:
            writer.writeheader()
        for i, setting in enumerate(settings):
            started = time.process_time()
            scores, base = np.array([one(*setting[:5], seed, setting[5]) for seed in range(arguments.runs)]).T
            median = float(np.median(scores))
            task, table, n, columns, epsilon, declared = setting
            row = {
                "task": task, "table": table, "records": n, "columns": columns, "epsilon": epsilon,
                "ranges": "declared" if declared else "private", "runs": arguments.runs, "median": f"{median:.4f}",
                "worst": f"{scores.min():.4g}", "collapsed": int((scores < median - 0.1).sum()),
                **below_mean(scores, base, task),
            }  # fmt: skip
            writer.writerow(row)
            file.flush()
            line = ", ".join(f"{k} {v}" for k, v in row.items())
            took = time.process_time() - started
            print(f"[{i + 1}/{len(settings)}] {line} ({took:.0f} s)", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
