"""Where the scale of a numeric column comes from: a public range, a paid-for estimate, or the private rows."""

from __future__ import annotations

import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from weightclip.errors import WeightclipError

from ._schema import Feature

# Exponential-mechanism weights below e^-30 of the largest are raised to it, then all are cut to integers of 80 bits.
# The raised weight e^-30·max_v exp(c·u(v)) is as stable under one record as the weights themselves, so every ratio
# keeps its bound; cutting moves a weight by less than 1e-11 of itself, which the slack pays for. The draw over
# integers is then ε-DP as it runs, without a clause about floating point.
_FLOOR = math.exp(-30.0)
_SCALE = 2.0**80
_SLACK = 1e-9


@dataclass(frozen=True)
class PaidQuery:
    """One differentially private query that was answered to encode the features.

    Attributes:
        kind: Name of the mechanism.
        column: Column it read.
        query: What was asked.
        epsilon: Pure ε it costs under adding or removing one record.
    """

    kind: str
    column: str
    query: str
    epsilon: float


@dataclass(frozen=True)
class Scaling:
    """An affine map of a column followed by an optional clip: (clip(x, low, high) − center)/scale."""

    center: float
    scale: float
    low: float = -math.inf
    high: float = math.inf

    @classmethod
    def interval(cls, low: float, high: float) -> Scaling:
        """The map that clips to [low, high] and takes it onto [−1, 1]."""
        return cls(center=(low + high) / 2, scale=(high - low) / 2, low=low, high=high)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Scale the values; a value that is not finite becomes 0, because an error would tell of the record."""
        scaled = (np.clip(x, self.low, self.high) - self.center) / self.scale
        return np.where(np.isfinite(x), scaled, 0.0)


class Statistics(ABC):
    """A way to obtain the scaling of numeric columns.

    Attributes:
        covered: Whether what it reads from the data is covered by a stated ε.
    """

    covered: ClassVar[bool]

    @abstractmethod
    def fit(self, columns: Sequence[Feature], rows: np.ndarray) -> tuple[tuple[Scaling, ...], tuple[PaidQuery, ...]]:
        """Scalings of the columns, and the private queries that were paid for them.

        Args:
            columns: The numeric columns.
            rows: Their values on the records that may be read, after the public transform.  # records x columns
        """

    @abstractmethod
    def statement(self) -> str:
        """What an ε of training says, or does not say, about the feature statistics."""


@dataclass(frozen=True)
class PublicRanges(Statistics):
    """Clip each column to its documented public range and map that onto [−1, 1].

    Formal guarantees:
        Reads no record: the encoding of a record depends on that record and on public constants alone, so it is free.
    """

    covered: ClassVar[bool] = True

    def fit(self, columns: Sequence[Feature], rows: np.ndarray) -> tuple[tuple[Scaling, ...], tuple[PaidQuery, ...]]:
        return tuple(Scaling.interval(*public_interval(column)) for column in columns), ()

    def statement(self) -> str:
        return "feature scales are public ranges: nothing was read from the data, nothing to pay"


@dataclass(frozen=True)
class PrivateQuantiles(Statistics):
    """Estimate a low and a high quantile of each column privately, clip to them and map onto [−1, 1].

    Columns that only say yes or no keep their public range, which no estimate could better; ε is split evenly over
    the two quantiles of the others.

    Formal guarantees:
        ε-DP (pure) under adding or removing one record, by basic composition over 2·(number of columns) exponential
        mechanisms, given the public ranges and the grid. The utility of a candidate v for quantile p of n values is
        minus the distance from p·n to [#{x < v}, #{x ≤ v}]; one record moves it by at most max(p, 1 − p).
        With `seed` the draws are reproducible, and then the guarantee holds only while the seed stays secret.

    Attributes:
        epsilon: Total ε of all quantiles together.
        quantiles: The low and the high quantile.
        candidates: Number of evenly spaced candidates in each public range.
        seed: Seed for experiments; randomness of the operating system if None.
    """

    epsilon: float
    quantiles: tuple[float, float] = (0.05, 0.95)
    candidates: int = 1001
    seed: int | None = None
    covered: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (math.isfinite(self.epsilon) and self.epsilon > 0):
            raise WeightclipError(f"PrivateQuantiles: epsilon must be positive and finite, got {self.epsilon}")
        if not 0 <= self.quantiles[0] < self.quantiles[1] <= 1:
            raise WeightclipError(
                f"PrivateQuantiles: quantiles must satisfy 0 <= low < high <= 1, got {self.quantiles}"
            )
        if self.candidates < 2:
            raise WeightclipError(f"PrivateQuantiles: at least 2 candidates are needed, got {self.candidates}")

    def mechanism(self, columns: Sequence[Feature]) -> tuple[PaidQuery, ...]:
        """The queries that `fit` will answer on these columns; their ε sum to `epsilon`. Reads no record."""
        asked = [(column.name, p) for column in columns if not column.flag for p in self.quantiles]
        return tuple(
            PaidQuery(kind="exponential", column=name, query=f"quantile {p:g}", epsilon=self.epsilon / len(asked))
            for name, p in asked
        )

    def fit(self, columns: Sequence[Feature], rows: np.ndarray) -> tuple[tuple[Scaling, ...], tuple[PaidQuery, ...]]:
        queries = self.mechanism(columns)
        random = _Uniform(self.seed)
        scalings = []
        for j, column in enumerate(columns):
            low, high = public_interval(column)
            if not column.flag:
                grid = np.linspace(low, high, self.candidates)
                # A value that is not finite takes part as the middle of the range: a map of each record alone.
                x = np.clip(np.where(np.isfinite(rows[:, j]), rows[:, j], (low + high) / 2), low, high)
                first, second = (private_quantile(x, p, grid, queries[0].epsilon, random.below) for p in self.quantiles)
                low, high = min(first, second), max(first, second)
                if low == high:  # both draws hit one candidate: widen by public grid steps
                    low, high = low - (grid[1] - grid[0]), high + (grid[1] - grid[0])
            scalings.append(Scaling.interval(float(low), float(high)))
        return tuple(scalings), queries

    def statement(self) -> str:
        return f"feature quantiles were estimated privately: add ε = {self.epsilon:g} (pure) to the ε of training"


@dataclass(frozen=True)
class FromData(Statistics):
    """Standardise each column by its mean and standard deviation on the training rows.

    Formal guarantees:
        None for the statistics: they are read from private rows and nothing is paid.
    """

    covered: ClassVar[bool] = False

    def fit(self, columns: Sequence[Feature], rows: np.ndarray) -> tuple[tuple[Scaling, ...], tuple[PaidQuery, ...]]:
        finite = np.isfinite(rows)
        count = np.maximum(finite.sum(axis=0), 1)
        center = np.where(finite, rows, 0.0).sum(axis=0) / count
        scale = np.sqrt((np.where(finite, rows - center, 0.0) ** 2).sum(axis=0) / count)
        scale[scale == 0] = 1.0
        return tuple(Scaling(float(c), float(s)) for c, s in zip(center, scale, strict=True)), ()

    def statement(self) -> str:
        return "feature statistics taken from private data: not covered by ε"


def transform(column: Feature, x: np.ndarray) -> np.ndarray:
    """The public transform of a numeric column: sign(x)·log(1 + |x|) where it spans orders of magnitude."""
    return np.sign(x) * np.log1p(np.abs(x)) if column.log else np.asarray(x, dtype=np.float64)


def public_interval(column: Feature) -> tuple[float, float]:
    """The public range of a numeric column, after the public transform."""
    low, high = transform(column, np.array([column.low, column.high]))
    return float(low), float(high)


def private_quantile(x: np.ndarray, p: float, grid: np.ndarray, epsilon: float, below) -> float:
    """Draw one candidate of the grid by the exponential mechanism for the p-quantile of x.

    Formal guarantees:
        ε-DP (pure) under adding or removing one entry of x, for a public grid; `below(m)` must be uniform on 0..m−1.

    Args:
        x: Private values, already clipped to the range of the grid.
        p: Quantile, 0 to 1.
        grid: Public candidates, ascending.
        epsilon: ε of this draw.
        below: Source of uniform integers.
    """
    weights = quantile_weights(x, p, grid, epsilon)
    ticket = below(sum(weights))
    for candidate, weight in zip(grid, weights, strict=True):
        ticket -= weight
        if ticket < 0:
            return float(candidate)
    raise AssertionError("unreachable: the ticket is below the sum of the weights")


def quantile_weights(x: np.ndarray, p: float, grid: np.ndarray, epsilon: float) -> list[int]:
    """Integer weights of the exponential mechanism for the p-quantile; each candidate is drawn in this proportion.

    Formal guarantees:
        For x and x′ that differ by one entry, the normalised weights differ by a factor of at most e^ε.
    """
    ordered = np.sort(x)
    fewer = np.searchsorted(ordered, grid, side="left")  # #{x < v}
    most = np.searchsorted(ordered, grid, side="right")  # #{x <= v}
    distance = np.maximum(0.0, np.maximum(fewer - p * len(x), p * len(x) - most))
    sensitivity = max(p, 1 - p)
    exponent = -(epsilon - min(_SLACK, epsilon / 2)) / (2 * sensitivity) * (distance - distance.min())
    return [int(w) for w in np.maximum(np.exp(exponent), _FLOOR) * _SCALE]


class _Uniform:
    """Uniform integers: from the operating system, or from a seed for experiments that must repeat."""

    def __init__(self, seed: int | None) -> None:
        self._bits = None if seed is None else np.random.Generator(np.random.Philox(seed))

    def below(self, m: int) -> int:
        if self._bits is None:
            return secrets.randbelow(m)
        while True:  # rejection keeps the draw exactly uniform
            drawn = int.from_bytes(self._bits.bytes((m.bit_length() + 7) // 8), "little")
            drawn &= (1 << m.bit_length()) - 1
            if drawn < m:
                return drawn
