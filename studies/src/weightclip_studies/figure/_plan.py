"""Which runs the figure is made of, in the order of importance, and where each search starts."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weightclip_studies.figure._recipe import BY_OPACUS, METHODS, Recipe

Place = tuple[int, int]

NETWORK = {"mnist": "convnet", "fashion_mnist": "convnet", "cifar10": "wrn-16-4"}
EPSILONS: dict[str, tuple[float, ...]] = {
    "mnist": (3.0, 1.0, 2.0), "fashion_mnist": (3.0, 1.0, 2.0), "cifar10": (8.0, 3.0, 1.0),
}  # fmt: skip
"""The paper's figure was published without its axis as numbers: these are the budgets of the literature beside it."""

_CONVNET = Recipe("convnet", "joint", batch=1024, steps=300, learning_rate=2e-3)
# De et al. 2022 for WRN-16-4: batch 4096, group normalisation, weight standardisation, averaging, no momentum, learning
# rate 4 in units of the threshold 1. Their multiplicity is 16; 4 is what a few minutes of one GPU allow.
_WIDE = Recipe("wrn-16-4", "joint", batch=4096, steps=1000, learning_rate=4.0, adam=False, decay=False, average=0.999,
               group_norm=True, standardise=True, views=4, fast=True)  # fmt: skip
# Plain training takes most of its accuracy from few steps of single views; that is what a row beside it may cost.
_WIDE_PLAIN = {"views": 1, "steps": 600}
_STEPS = {"convnet": {1.0: 200, 2.0: 250, 3.0: 300}, "wrn-16-4": {1.0: 400, 3.0: 700, 8.0: 1000}}
# Where trials of the ConvNet ended on validation (results/figure/figure.jsonl), as places of the lattice. Its base
# stays, so that places of rows that are there mean what they meant.
_STARTS: dict[str, Place] = {"plain": (1, 0), "weights": (1, 0), "fix": (0, 0)}
_CONVNET_START: Place = (2, 0)  # of the other methods: learning rate 8e-3
ABLATIONS: dict[str, tuple[tuple[tuple[str, Any], ...], ...]] = {
    "convnet": (
        (("group_norm", True),), (("standardise", True),), (("group_norm", True), ("standardise", True)),
        (("views", 1),), (("average", 0.0),), (("views", 4),), (("views", 16),),
    ),
    "wrn-16-4": (
        (("views", 1),), (("views", 16),), (("average", 0.0),), (("standardise", False),), (("group_norm", False),),
        (("group_norm", False), ("standardise", False)),
    ),
}  # fmt: skip
"""Network -> what is changed, one cell each; the cell without changes has the rest."""


@dataclass(frozen=True)
class Cell:
    """One point of the figure: a method on a data set at one epsilon (None: not private), perhaps with a change."""

    dataset: str
    method: str
    epsilon: float | None
    changes: tuple[tuple[str, Any], ...] = ()

    @property
    def network(self) -> str:
        """The paper's network for this data set."""
        return NETWORK[self.dataset]

    @property
    def key(self) -> str:
        """For files and rows."""
        changed = "".join(f" {k}={v}" for k, v in self.changes)
        return f"{self.dataset} {self.method} {'inf' if self.epsilon is None else f'{self.epsilon:g}'}{changed}"

    def base(self) -> Recipe:
        """The settings at the place (0, 0)."""
        recipe = _CONVNET if self.network == "convnet" else _WIDE
        table = _STEPS[self.network]
        nearest = min(table, key=lambda e: abs(e - (self.epsilon or max(table))))
        changes = dict(self.changes)
        if self.method in BY_OPACUS:  # which takes one view of a record
            changes["views"] = min(changes.get("views", recipe.views), 1)
        known = {"steps": table[nearest]} | (_WIDE_PLAIN if recipe.fast and self.method == "plain" else {})
        recipe = replace(recipe, method=self.method, **(known | changes))
        # a threshold over the whole gradient gives SGD its unit; elsewhere Adam finds one
        if recipe.adam or self.method not in ("joint", *BY_OPACUS):
            recipe = replace(recipe, adam=True, learning_rate=1e-3 if self.method == "plain" else 2e-3)
        return recipe

    @property
    def start(self) -> Place:
        """Where the search begins when nothing like it has been searched yet."""
        return _STARTS.get(self.method, _CONVNET_START) if self.network == "convnet" else (0, 0)

    def recipe(self, place: Place) -> Recipe:
        """The settings at a place of the lattice: powers of two of the learning rate and of the method's own knob."""
        base, (i, j) = self.base(), place
        moved = replace(base, learning_rate=base.learning_rate * 2.0**i)
        if self.method == "plain" or j == 0:
            return moved
        if self.method == "opacus-adaptive":
            odds = base.quantile / (1 - base.quantile) * 2.0**j
            return replace(moved, quantile=odds / (1 + odds))
        return replace(moved, clip=base.clip * 2.0**j)


def cells(datasets: Sequence[str], methods: Sequence[str], epsilons: Sequence[float] | None = None) -> list[Cell]:
    """The points of the figure, the most important first: by epsilon, then method, then data set."""
    levels = {d: tuple(epsilons or EPSILONS[d]) for d in datasets}
    found = []
    for n in range(max(map(len, levels.values()), default=0)):
        for method in [m for m in METHODS if m in methods]:
            for dataset in datasets:
                if method == "plain":
                    found += [Cell(dataset, method, None)] if n == 0 else []
                elif n < len(levels[dataset]):
                    found.append(Cell(dataset, method, levels[dataset][n]))
    return found


def ablations(datasets: Sequence[str], methods: Sequence[str]) -> list[Cell]:
    """Normalisation, standardisation, views and averaging on and off, at each data set's first epsilon.

    Of the methods that bound weights alone, normalisation and standardisation: the others change little there.
    """
    found = []
    for dataset in datasets:
        for method in [m for m in ("joint", "weights") if m in methods]:
            for changes in ABLATIONS[NETWORK[dataset]]:
                if method == "joint" or {k for k, _ in changes} & {"group_norm", "standardise"}:
                    found.append(Cell(dataset, method, EPSILONS[dataset][0], changes))
    return found


def axes(cell: Cell) -> tuple[str, ...]:
    """What a search moves."""
    knob = "quantile" if cell.method == "opacus-adaptive" else "clip"
    return ("learning_rate",) if cell.method == "plain" else ("learning_rate", knob)


def next_place(cell: Cell, tried: Mapping[Place, float], trials: int, start: Place = (0, 0)) -> Place | None:
    """Where to try next; None when ``trials`` places are known.

    From the best place so far to its neighbours, one power of two at a time, so that grids have no edge of their own.
    """
    if len(tried) >= trials:
        return None
    if not tried:
        return start
    for best in sorted(tried, key=lambda p: -tried[p]):
        for place in _beside(cell, best):
            if place not in tried:
                return place
    raise AssertionError("a lattice has no end")


def open_sides(cell: Cell, tried: Mapping[Place, float], place: Place) -> list[str]:
    """Axes on which the chosen place has no tried neighbour on one side: there a better value may lie beyond."""
    names = [name for name in axes(cell) for _ in range(2)]
    return list(dict.fromkeys(n for n, p in zip(names, _beside(cell, place), strict=True) if p not in tried))


def _beside(cell: Cell, place: Place) -> list[Place]:
    i, j = place
    return [(i + 1, j), (i - 1, j), (i, j + 1), (i, j - 1)][: 2 * len(axes(cell))]


def settle(looked: Sequence[Mapping[str, Any]], seconds: float, bench: Path | None = None) -> dict[str, Any]:
    """Changes for one run of WRN-16-4 of about so many seconds, fixed before its noise is calibrated.

    The pace is that of short trials in ``looked``, or else that of the committed times of steps in ``bench``. The most
    views of 4, 2 and 1 with which 500 steps fit, and as many steps, at most the 2,400 of De et al. Trials also give
    the learning rate of the better validation accuracy. Without either: as fits into the slowest guess.
    """
    trials = [r for r in looked if r["stage"] == "trial"]
    fitting, found = dict[int, int](), dict[str, Any]()
    if trials:
        row_ms = min(r["step_ms"] / (r["recipe"]["batch"] * max(1, r["recipe"]["views"])) for r in trials)
        recipe = max(trials, key=lambda r: r["accuracy"])["recipe"]
        fitting = {k: math.floor(1e3 * seconds / (row_ms * recipe["batch"] * k)) for k in (4, 2, 1)}
        found["learning_rate"] = recipe["learning_rate"]
    elif bench is not None and bench.exists():
        fitting = {k: steps_within(replace(_WIDE, views=k), seconds, bench) or 0 for k in (4, 2, 1)}
    if not any(fitting.values()):
        return {"steps": 500, "views": 2}
    views = next((k for k, steps in fitting.items() if steps >= 500), 1)
    return {"steps": min(max(fitting[views] // 50 * 50, 100), 2400), "views": views, **found}


def steps_within(recipe: Recipe, seconds: float, bench: Path) -> int | None:
    """Steps of a recipe in so many seconds of one H200, from the committed times of steps; None: not measured there.

    Rows of the network in the recipe's precision, largest batch, scaled to batch times views.
    """
    mode = {"joint": "exact-joint-cap", "caps": "exact-joint-cap", "opacus": "opacus-hooks", "fix": "weights",
            "opacus-adaptive": "opacus-hooks"}.get(recipe.method, recipe.method)  # fmt: skip
    precision = "bf16" if recipe.fast and recipe.method not in BY_OPACUS else "tf32"
    with Path(bench).open(newline="") as file:
        rows = [r for r in csv.DictReader(file) if r["model"] == recipe.network and r["device"] == "NVIDIA H200"]
    found = [r for r in rows if r["mode"] == mode and r["precision"] == precision]
    if not found:  # the same mode in another precision is slower: an upper bound
        found = [r for r in rows if r["mode"] in (mode, "joint-cap" if mode == "exact-joint-cap" else mode)]
    if not found:
        return None
    row = max(found, key=lambda r: int(r["batch"]))
    each = float(row["ms"]) / 1e3 * recipe.batch * max(1, recipe.views) / int(row["batch"])
    return math.floor(seconds / each)
