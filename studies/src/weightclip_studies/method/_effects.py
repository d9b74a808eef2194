"""Effect of τ, X_0 and C (one for all layers, or one per layer) on accuracy and on tightness, at the tables' ε.

The method is `lip-weights`: both factors bounded from weight norms and the input radius, so that these three are all it
has. Two starting points: the settings chosen for the tables, and plain ones in the paper's form (no cap on the loss
gradient). One thing is changed at a time; the learning rate is chosen again within each cell on validation records.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weightclip import losses
from weightclip.errors import WeightclipError
from weightclip_studies.fast_mlp import Logistic, Objective, Run, Settings, Softmax
from weightclip_studies.fast_mlp._bounds import gain, sensitivities
from weightclip_studies.tables._runs import Prepared, cost_of, prepare, settings_of
from weightclip_studies.tables._settings import load_chosen
from weightclip_studies.tables._stacked import stacked_logits, train_stacked
from weightclip_studies.tables._store import Store

from ._files import write_csv

VERSION = 1
SEARCH_SEED = 3000
"""First seed on validation records; the test part has 0, 1, 2, ..., as in the tables."""
RATES = (1 / 9, 1 / 3, 1.0, 3.0, 9.0)
VALUES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
LAYERS = ((2.0, 1.0), (1.0, 2.0), (0.5, 1.0), (1.0, 0.5), (2.0, 0.5), (0.5, 2.0))
"""Factors on C of (first, last)."""
Config = dict[str, Any]


@dataclass(frozen=True)
class Divided(Objective):
    """A loss divided by τ from outside: slope and bound are divided, the temperature inside is untouched."""

    inner: Objective
    by: float
    outputs: int = 1

    def labels(self, y: object) -> Tensor:
        return self.inner.labels(y)

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return self.inner.slope(z, y) / self.by

    def natural_bound(self) -> float:
        return self.inner.natural_bound() / self.by

    def loss(self, temperature: float, cap: float | None) -> losses.Loss:
        raise WeightclipError("a loss divided by τ is trained here only.")


@dataclass(frozen=True)
class Cell:
    """One row of the study: what was changed from which starting point, and the settings but for the learning rate."""

    base: str
    factor: str
    value: str
    config: Config


def bases(dataset: str) -> dict[str, Config]:
    """Starting points of a data set."""
    chosen = dict(load_chosen()[dataset]["lip-weights"].config)
    C = chosen["weight_norm"]
    plain = {k: v for k, v in chosen.items() if k not in ("cap", "temperature", "input_radius", "bias_scale")}
    return {
        "table": {**chosen, "weight_norm": [C, C], "divisor": 1.0},
        "plain": {**plain, "temperature": 1.0, "input_radius": 1.0, "weight_norm": [2.0, 2.0], "divisor": 1.0},
    }


def cells(dataset: str, values: Sequence[float] = VALUES, layers: Sequence[tuple[float, float]] = LAYERS,
          only: Sequence[str] = ("table", "plain")) -> Iterator[Cell]:  # fmt: skip
    """Every cell of a data set, starting points first."""
    for name in only:
        base = bases(dataset)[name]
        c1, c2 = base["weight_norm"]
        yield Cell(name, "none", "", base)
        for v in values:
            yield Cell(name, "tau", f"{v:g}", {**base, "temperature": v})
            yield Cell(name, "X0", f"{v:g}", {**base, "input_radius": v})
            yield Cell(name, "C", f"{4 * v:g}", {**base, "weight_norm": [4 * v, 4 * v]})
        for v in (values[0], values[-1]):
            yield Cell(name, "loss / tau", f"{v:g}", {**base, "divisor": v})
        for a, b in layers:
            yield Cell(name, "C per layer", f"{a:g}, {b:g}", {**base, "weight_norm": [a * c1, b * c2]})


def settings_for(config: Config, prepared: Prepared) -> Settings:
    """A cell's settings: C per layer, cap and bound divided with the loss."""
    s = settings_of({**config, "weight_norm": config["weight_norm"][0]}, "lip-weights", prepared)
    cap = None if s.cap is None else s.cap / config["divisor"]
    return replace(s, weight_norm=tuple(config["weight_norm"]), cap=cap)


def slack(run: Run, objective: Objective, X: np.ndarray, y: np.ndarray) -> list[tuple[float, float]]:
    """For each layer, certified Δ over the largest and over the mean gradient of any record, at a run's weights.

    Formal guarantees: none, it reads raw records; a figure, not a release. The first number is at least 1.
    """
    s = run.settings
    weights = [(w.double(), b.double()) for w, b in run.weights]
    (w1, b1), (w2, b2) = weights

    def one(value: float | None) -> Tensor:
        return torch.tensor([np.inf if value is None else value], dtype=torch.float64)

    x = torch.as_tensor(X, dtype=torch.float64)
    radius = np.inf if s.input_radius is None else s.input_radius
    x = x * (radius / torch.linalg.vector_norm(x, dim=1, keepdim=True).clamp(min=1e-12)).clamp(max=1.0)
    h = (x @ w1.T + b1).relu()
    labels = objective.labels(y)[None, None]
    d2 = objective.gradient((h @ w2.T + b2)[None, None], labels, one(s.temperature), one(s.cap))[0, 0]
    d1 = (d2 @ w2) * (h > 0)
    norms = [d.norm(dim=1) * (a.square().sum(1) + s.bias_scale**2).sqrt() for a, d in ((x, d1), (h, d2))]
    free = torch.full((1, 2), np.inf, dtype=torch.float64)
    delta = sensitivities([gain(w)[None, None] for w, _ in weights], [b[None, None] for _, b in weights],
                          one(objective.bound(s.cap)), one(s.input_radius), one(s.bias_scale), free,
                          free)[0, 0]  # fmt: skip
    return [(float(d / n.max()), float(d / n.mean())) for d, n in zip(delta, norms, strict=True)]


def compute(keys: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Train and judge all keys; those with one data set, part and divisor in one call."""
    groups: dict[tuple, list[int]] = defaultdict(list)
    for i, key in enumerate(keys):
        groups[key["dataset"], key["part"], key["config"]["divisor"], tuple(key["seeds"])].append(i)
    results: list[dict[str, Any]] = [{} for _ in keys]
    for (dataset, part, divisor, seeds), members in groups.items():
        prepared = prepare(dataset)
        train, rows = prepared.parts.train, getattr(prepared.parts, part)
        inner: Objective = Logistic() if prepared.classes == 2 else Softmax(prepared.classes)
        objective = Divided(inner, divisor, inner.outputs)
        settings = [settings_for(keys[i]["config"], prepared) for i in members]
        n = len(train)
        costs = [cost_of(keys[i]["config"], prepared, "lip-weights", "rdp", s.steps(n), s.sample_rate(n))
                 for i, s in zip(members, settings, strict=True)]  # fmt: skip
        runs = train_stacked(
            prepared.X[train], prepared.y[train], settings, [None] * len(settings), seeds, objective=objective,
            noise=[c["sigma"] for c in costs], dtype=torch.float64 if part == "test" else torch.float32,
        )  # fmt: skip
        for i, cost, own in zip(members, costs, runs, strict=True):
            results[i] = {"sigma": cost["sigma"], "epsilon": cost["epsilon"],
                          "accuracy": [_accuracy(run, prepared, rows) for run in own]}  # fmt: skip
            if part == "test":
                results[i]["slack"] = [slack(run, objective, prepared.X[train], prepared.y[train]) for run in own]
    return results


def _accuracy(run: Run, prepared: Prepared, rows: np.ndarray) -> float:
    z = stacked_logits(run, None, prepared.X[rows])
    guess = (z[:, 0] > 0).long() if z.shape[1] == 1 else z.argmax(1)
    return float((guess.numpy() == prepared.y[rows]).mean())


def measure(store: Store, dataset: str, chosen: Sequence[Cell], *, seeds: int, search_seeds: int,
            rates: Sequence[float] = RATES, say: Callable[[str], None] = lambda line: None,
            at_once: int = 12) -> list[dict[str, Any]]:  # fmt: skip
    """A row per cell: its learning rate by validation accuracy, then test accuracy and tightness.

    Resumable: every group of cells is kept in the store once it is done.
    """

    def ask(configs: Sequence[Config], part: str, first: int, count: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for start in range(0, len(configs), at_once):
            keys = [{"study": "effects", "version": VERSION, "dataset": dataset, "config": c, "part": part,
                     "seeds": list(range(first, first + count))} for c in configs[start : start + at_once]]  # fmt: skip
            store.compute(keys, compute)
            found += [v for v in store.get_many(keys) if v is not None]
            say(f"{dataset}, {part}: {len(found)}/{len(configs)} settings")
        return found

    tried = [{**cell.config, "lr": cell.config["lr"] * r} for cell in chosen for r in rates]
    valid = [statistics.fmean(v["accuracy"]) for v in ask(tried, "valid", SEARCH_SEED, search_seeds)]
    places = [max(range(i, i + len(rates)), key=valid.__getitem__) for i in range(0, len(tried), len(rates))]
    final = ask([tried[p] for p in places], "test", 0, seeds)
    base: dict[str, list[float]] = {}
    rows = []
    for cell, place, value in zip(chosen, places, final, strict=True):
        scores = value["accuracy"]
        base.setdefault(cell.base, scores)  # the starting point comes first
        moved = [a - b for a, b in zip(scores, base[cell.base], strict=True)]
        loose = np.array(value["slack"]).mean(0)  # layers x (largest, mean)
        rows.append({
            "data": dataset, "base": cell.base, "factor": cell.factor, "value": cell.value,
            "tau": cell.config["temperature"], "X0": cell.config["input_radius"],
            "C_first": float(cell.config["weight_norm"][0]), "C_last": float(cell.config["weight_norm"][1]),
            "lr": tried[place]["lr"], "at_edge": int(place % len(rates) in (0, len(rates) - 1)),
            "epsilon": value["epsilon"], "sigma": value["sigma"], "seeds": seeds, "valid": valid[place],
            "test": statistics.fmean(scores), "test_sd": _sd(scores), "moved": statistics.fmean(moved),
            "moved_sd": _sd(moved), "first_bound/largest": loose[0, 0], "last_bound/largest": loose[1, 0],
            "first_bound/mean": loose[0, 1], "last_bound/mean": loose[1, 1],
        })  # fmt: skip
    return rows


def _sd(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def effects_study(out: Path, store: Path, *, datasets: tuple[str, ...] = ("adult", "nursery"), seeds: int = 5,
                  search_seeds: int = 2, rates: Sequence[float] = RATES, values: Sequence[float] = VALUES,
                  layers: Sequence[tuple[float, float]] = LAYERS, only: Sequence[str] = ("table", "plain"),
                  say: Callable[[str], None] = lambda line: None) -> list[Path]:  # fmt: skip
    """results/method/effects.csv and .png."""
    from ._effects_plot import plot_effects

    rows: list[dict[str, Any]] = []
    for name in datasets:
        chosen = list(cells(name, values, layers, only))
        rows += measure(Store(store), name, chosen, seeds=seeds, search_seeds=search_seeds, rates=rates, say=say)
    return [write_csv(out / "effects.csv", rows), plot_effects(out / "effects.png", rows)]
