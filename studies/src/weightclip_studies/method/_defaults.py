"""Which defaults: input strategy, allocation, cap on the loss gradient, compared on tabular sets at equal epsilon."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weightclip.noise import AdamAware, Allocation, Equal, LeastVariance
from weightclip_studies.fast_mlp import Budget, Logistic, Objective, Settings, Softmax, logits, train_many

from ._files import markdown, write_csv
from ._networks import prepare

ALLOCATIONS: dict[str, Allocation] = {"equal": Equal(), "least-variance": LeastVariance(), "adam-aware": AdamAware()}
CAPS: tuple[float | None, ...] = (None, 0.4, 0.15)
INPUTS = ("projection", "projection, hidden in-product", "in-product")
RADII = (0.5, 1.0)  # of the norm of a typical row
COTANGENTS = ("weights", "radius")


@dataclass(frozen=True)
class Choice:
    """One cell of the comparison; the learning rate is chosen within it, on validation records."""

    inputs: str
    radius: float
    allocation: str
    cap: float | None
    cotangent: str

    def settings(self, lr: float, batch: int, epochs: float, bound: float) -> Settings:
        """As settings of a run on rows of norm about 1; ``bound`` is the loss's own."""
        top = bound if self.cap is None else min(self.cap, bound)
        return Settings(
            hidden=(16,), batch=batch, epochs=epochs, lr=lr, cap=self.cap, bias_scale=1.0,
            input_radius=None if self.inputs == "in-product" else self.radius,
            layer_radius=None if self.inputs == "projection" else (math.hypot(self.radius, 1.0), math.sqrt(2)),
            cotangent_radius=None if self.cotangent == "weights" else (0.5 * top, top),
            allocation=ALLOCATIONS[self.allocation],
        )  # fmt: skip


def score_all(dataset: str, epsilon: float, *, seeds: int, lrs: tuple[float, ...], batch: int, epochs: float,
              limit: int | None, say: Callable[[str], None]) -> list[dict[str, Any]]:  # fmt: skip
    """Test accuracy of every choice, its learning rate chosen on validation records."""
    data = prepare(dataset)
    objective: Objective = Logistic() if data.classes == 2 else Softmax(data.classes)
    train, valid, test = data.parts.train[:limit], data.parts.valid, data.parts.test
    bound = objective.natural_bound()
    X = data.X / max(1e-12, data.radius)  # a typical row has norm 1
    choices = [Choice(*c) for c in itertools.product(INPUTS, RADII, ALLOCATIONS, CAPS, COTANGENTS)]
    pairs = [(c, lr) for c in choices for lr in lrs]
    settings = [c.settings(lr, batch, epochs, bound) for c, lr in pairs]
    say(f"{dataset}: {len(settings)} settings x {seeds} seeds")
    runs = train_many(X[train], data.y[train], settings, range(seeds), objective=objective,
                      noise=Budget(epsilon, 1e-5))  # fmt: skip

    def accuracy(run: Any, rows: Any) -> float:
        z = logits([run], X[rows])[0]
        predicted = (z[:, 0] > 0).long() if data.classes == 2 else z.argmax(1)
        return float((predicted == torch.tensor(data.y[rows])).double().mean())

    best: dict[Choice, tuple[float, int]] = {}
    for i, (choice, _) in enumerate(pairs):
        value = statistics.fmean(accuracy(run, valid) for run in runs[i])
        if choice not in best or value > best[choice][0]:
            best[choice] = (value, i)
    rows = []
    for choice, (value, i) in best.items():
        scores = [accuracy(run, test) for run in runs[i]]
        rows.append({
            "data": dataset, "epsilon": epsilon, "inputs": choice.inputs, "radius": choice.radius,
            "allocation": choice.allocation,
            "cap": "none" if choice.cap is None else choice.cap, "cotangent": choice.cotangent, "lr": pairs[i][1],
            "valid": value, "test": statistics.fmean(scores),
            "test_sd": statistics.stdev(scores) if len(scores) > 1 else 0.0,
        })  # fmt: skip
    return rows


def marginals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For every value of every factor: mean test accuracy over all else, and that of the best cell by validation."""
    found = []
    for factor in ("inputs", "radius", "allocation", "cap", "cotangent"):
        for value in dict.fromkeys(r[factor] for r in rows):
            row: dict[str, Any] = {"factor": factor, "value": str(value)}
            for name in dict.fromkeys(r["data"] for r in rows):
                mine = [r for r in rows if r["data"] == name and r[factor] == value]
                row[f"{name} mean"] = statistics.fmean(r["test"] for r in mine)
                row[f"{name} best"] = max(mine, key=lambda r: r["valid"])["test"]
            found.append(row)
    return found


def defaults_study(out: Path, *, datasets: tuple[str, ...] = ("adult", "dropout", "nursery"), epsilon: float = 1.0,
                   seeds: int = 3, lrs: tuple[float, ...] = (0.02, 0.06), batch: int = 256, epochs: float = 8,
                   limit: int | None = 6000, say: Callable[[str], None] = lambda line: None) -> list[Path]:  # fmt: skip
    """results/method/defaults.csv and .md."""
    rows: list[dict[str, Any]] = []
    for name in datasets:
        rows += score_all(name, epsilon, seeds=seeds, lrs=lrs, batch=batch, epochs=epochs, limit=limit, say=say)
    table = marginals(rows)
    best = [max((r for r in rows if r["data"] == name), key=lambda r: r["valid"]) for name in datasets]
    text = (
        f"# Defaults, compared at ε = {epsilon:g}, δ = 1e-5\n\n"
        f"MLP with 16 hidden units, batch {batch}, {epochs:g} epochs, at most {limit} training records, {seeds} seeds; "
        f"learning rates {lrs} chosen on validation records within each cell; test accuracy.\n\n"
        "`mean` averages over every other choice, `best` is the cell with the best validation accuracy.\n\n"
        f"{markdown(table)}\nBest cell of each data set:\n\n{markdown(best)}"
    )
    path = out / "defaults.md"
    files = [write_csv(out / "defaults.csv", rows), path]
    path.write_text(text)
    return files
