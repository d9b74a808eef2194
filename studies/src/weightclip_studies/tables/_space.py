"""The spaces that are searched: one for each method, with a common part that is the same for all.

A trial is a plain dictionary (a *configuration*), so that it can be hashed, stored and committed. Its *structure* (what
decides the shape of the arrays and the number of steps) is drawn from short lists, so that several trials share one
stack of matrix products.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from weightclip.errors import WeightclipError

Config = dict[str, Any]

SOUND = ("lip-weights", "lip-factors", "joint-cap", "fix-lip")
PRINTED_METHODS = ("dp-sgd-published", "lip-published", "fix-lip-published")
PRIVATE = ("dp-sgd", *PRINTED_METHODS, *SOUND)
METHODS = (*PRIVATE, "non-private", "majority")
"""In the order of the tables."""


@dataclass(frozen=True)
class Range:
    """A continuous parameter, drawn evenly or evenly in its logarithm."""

    low: float
    high: float
    log: bool = True

    def at(self, u: float) -> float:
        """The value at place ``u`` in [0, 1]; four digits are enough to write down."""
        if self.log:
            return float(f"{math.exp(math.log(self.low) + u * math.log(self.high / self.low)):.4g}")
        return float(f"{self.low + u * (self.high - self.low):.4g}")

    def place(self, value: float) -> float:
        """The inverse of :meth:`at`."""
        if self.log:
            return min(1.0, max(0.0, math.log(value / self.low) / math.log(self.high / self.low)))
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))


@dataclass(frozen=True)
class Choice:
    """A parameter with a short list of values."""

    values: tuple[Any, ...]

    def at(self, u: float) -> Any:
        """The value at place ``u`` in [0, 1)."""
        return self.values[min(len(self.values) - 1, int(u * len(self.values)))]

    def place(self, value: Any) -> float:
        """The middle of the value's cell."""
        return (self.values.index(value) + 0.5) / len(self.values)


@dataclass(frozen=True)
class Space:
    """What is searched for one method.

    Attributes:
        structure: Parameters that decide shapes and steps; shared by the trials of one stack.
        fine: The others.
        designs: Structures that are tried first, the same for every method; random ones follow.
    """

    structure: Mapping[str, Choice]
    fine: Mapping[str, Range | Choice]
    designs: tuple[Mapping[str, Any], ...] = ()

    @property
    def names(self) -> list[str]:
        """All parameters, structure first."""
        return [*self.structure, *self.fine]

    def config(self, u: np.ndarray) -> Config:
        """The configuration at a point of the unit cube."""
        parts = {**self.structure, **self.fine}
        return {name: part.at(float(x)) for (name, part), x in zip(parts.items(), u, strict=True)}

    def point(self, config: Config) -> np.ndarray:
        """The point of a configuration in the unit cube."""
        parts = {**self.structure, **self.fine}
        return np.array([part.place(config[name]) for name, part in parts.items()])

    def sample(self, rng: np.random.Generator, structures: int, each: int) -> list[Config]:
        """``each`` random trials for each of ``structures`` structures: the designed ones, then random ones."""
        trials = []
        for i in range(structures):
            head = rng.uniform(size=len(self.structure))
            design = self.designs[i] if i < len(self.designs) else {}
            for _ in range(each):
                trial = self.config(np.concatenate([head, rng.uniform(size=len(self.fine))]))
                trials.append({**trial, **design})
        return trials

    def nearby(self, rng: np.random.Generator, parent: Config, count: int, spread: float = 0.12) -> list[Config]:
        """``count`` trials around a good one; every other stack also moves one structural parameter."""
        head = dict(parent)
        known = [name for name in self.structure if name in parent]
        if rng.uniform() < 0.5:
            name = known[int(rng.integers(len(known)))]
            values = self.structure[name].values
            place = values.index(parent[name]) + int(rng.choice([-1, 1]))
            head[name] = values[min(len(values) - 1, max(0, place))]
        trials = []
        for _ in range(count):
            trial = dict(head)
            for name, part in self.fine.items():
                if name not in parent:
                    continue
                if isinstance(part, Choice):
                    if rng.uniform() < 0.2:
                        trial[name] = part.at(rng.uniform())
                else:
                    trial[name] = part.at(float(np.clip(part.place(parent[name]) + rng.normal(0, spread), 0, 1)))
            trials.append(trial)
        return trials


# (width, batches, epochs) that between them cover few and many steps, narrow and wide
_LARGE = ((16, 32, 10), (32, 16, 15), (8, 16, 15), (32, 32, 15), (16, 8, 15), (8, 32, 7))
_SMALL = ((16, 8, 30), (32, 4, 30), (8, 12, 20), (8, 4, 20), (32, 12, 30), (16, 2, 20))


def our_space(method: str, records: int, group_norm: bool = False) -> Space:
    """The space of the tables: the same structure, optimiser and averaging for every method, then its own bounds.

    Args:
        method: One of the trained methods.
        records: Number of training records; small tables get more epochs, which cost nothing there.
        group_norm: Whether the size of groups and α are searched as well.
    """
    small = records < 5000
    structure: dict[str, Choice] = {
        "width": Choice((8, 16, 32)),
        "batches": Choice((2, 4, 8, 12) if small else (4, 8, 16, 32)),  # per epoch: b = n/batches
        "epochs": Choice((8, 12, 20, 30) if small else (4, 7, 10, 15, 20)),
    }
    fine: dict[str, Range | Choice] = {
        "lr": Range(0.003, 0.2),
        "final_lr": Choice((1.0, 0.1)),
        "averaging": Choice((0.0, 0.9, 0.95)),
    }
    loss: dict[str, Range | Choice] = {"cap": Range(0.05, 0.6), "temperature": Range(0.15, 1.2)}
    radius: dict[str, Range | Choice] = {"input_radius": Range(0.4, 1.6), "bias_scale": Range(0.15, 1.0)}
    if method in SOUND and method != "joint-cap":
        structure["allocation"] = Choice(("equal", "adam"))
    if group_norm:
        structure["group_size"] = Choice((4, 8))  # a group of one unit would be constant
        fine["alpha"] = Range(0.05, 1.0)
    if method in ("dp-sgd", "dp-sgd-published"):
        fine["clip"] = Range(0.03, 5.0)
    elif method in PRINTED_METHODS:
        fine["weight_norm"] = Range(0.3, 15.0)
    elif method in ("lip-weights", "fix-lip"):
        fine |= loss | radius | {"weight_norm": Range(0.5, 8.0)}
    elif method == "lip-factors":
        fine |= loss | radius | {"hidden_radius": Range(0.4, 4.0), "cotangent": Range(0.2, 2.0)}
    elif method == "joint-cap":
        fine |= loss | radius | {"clip": Range(0.05, 2.0), "ratio": Range(0.4, 2.5)}
    elif method != "non-private":
        raise WeightclipError(f"no search space for {method!r}: choose one of {', '.join(PRIVATE)}, non-private")
    designs = tuple(
        {
            **dict(zip(("width", "batches", "epochs"), shape, strict=True)),
            **({"allocation": ("adam", "equal")[i % 2]} if "allocation" in structure else {}),
            **({"group_size": (4, 8)[i % 2]} if group_norm else {}),
        }
        for i, shape in enumerate(_SMALL if small else _LARGE)
    )
    return Space(structure, fine, designs)


def paper_space(method: str, group_norm: bool = False) -> Space:
    """The paper's space (its table of hyper-parameters); σ is a parameter here, and ε a second objective."""
    structure: dict[str, Choice] = {
        "width": Choice((8, 16, 32)),
        "batch": Choice((32, 64, 128, 256, 512)),
        "epochs": Choice((5, 10, 20)),
    }
    fine: dict[str, Range | Choice] = {"sigma": Range(0.4, 5.0), "lr": Range(1e-4, 1e-2)}
    if group_norm:
        structure["group_size"] = Choice((4, 8))
        fine["relative_alpha"] = Range(0.1, 1.0)  # times 1/|group|
    if method in ("dp-sgd", "dp-sgd-published"):
        fine["clip"] = Range(1.0, 15.0)
    elif method in (*PRINTED_METHODS, "lip-weights", "fix-lip", "lip-factors"):
        fine["weight_norm"] = Range(1.0, 15.0)
    else:
        raise WeightclipError(f"the paper has no {method!r}: use --space ours")
    return Space(structure, fine)
