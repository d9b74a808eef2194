"""Private statistics of a table: one Gaussian release each for where values lie, for their quantiles, for categories.

All columns are counted together: a record adds one to one node per level of every column's tree (or to one bucket of
every categorical column), so it moves all counts at once by the root of the number of counts it touches, and the whole
release is one Gaussian mechanism.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Number
from pathlib import Path
from typing import Any

import numpy as np

from weightclip.accounting import Adjacency, Ledger, Mechanism
from weightclip.noise import Streams
from weightclip.tabular._columns import BUCKETS, KINDS, canonical


@dataclass(frozen=True)
class Door:
    """Randomness of a fit's statistics, and the ledger in which they are counted first."""

    streams: Streams  # randomness
    # file in which every release is counted before it happens; None: the report alone counts
    ledger: Path | None = None

    def charge(self, mechanism: Mechanism) -> int:
        """Count one release; with a ledger it is on the disk when this returns."""
        if self.ledger is None:
            return 0
        with contextlib.closing(Ledger(self.ledger)) as book:
            return self._count(book, mechanism)

    def charge_next(self, mechanism: Mechanism, charges: int, begin: Callable[[Ledger], None]) -> bool:
        """Count one release if the ledger holds so many charges, and no others; whether it was counted."""
        if self.ledger is None:
            return True
        with contextlib.closing(Ledger(self.ledger)) as book:
            if book.charges != charges:
                return False
            begin(book)
            self._count(book, mechanism)
            return True

    def _count(self, book: Ledger, mechanism: Mechanism) -> int:
        book.begin(mechanism, Adjacency.ADD_OR_REMOVE_ONE, 0.0, {"secure_noise": self.streams.is_secure})
        return book.charge()

    def noise(self, values: np.ndarray, sigma: float, label: str) -> np.ndarray:
        """Standard normals for the one release of these sums under this label, which is charged first.

        Formal guarantees:
            With a ledger a Gaussian mechanism of multiplier `sigma` is counted, durably, before a number is drawn. The
            noise never meets two different sums: it has fresh bits of the operating system, or in a seeded fit it is a
            function of the seed, the label and the sums.
        """
        number = self.charge(Mechanism("gaussian", sigma, 1.0, 1, label=label))

        def content() -> bytes:
            digest = hashlib.blake2b(np.ascontiguousarray(values, dtype=np.float64).tobytes(), digest_size=32)
            digest.update(repr((values.shape, sigma, label)).encode())
            return digest.digest()

        return self.streams.for_release(number, content).numpy(label).standard_normal(values.shape)


def charged(ledger: Path) -> tuple[Mechanism, ...]:
    """Everything that a ledger holds."""
    with contextlib.closing(Ledger(ledger)) as book:
        return tuple(book.mechanisms())


Chunks = Callable[[], Iterable[np.ndarray]]  # makes a fresh pass over the raw values, in blocks  # rows x columns

# Two empty buckets a column pass the threshold by chance: features that are always zero, and do no harm.
THRESHOLD = 3.5
_MOST = 256  # features of a column whose categories are not declared
_DECADES = (-6.0, 12.0)  # magnitudes that are told apart when nothing is known of a column
_SIDE = 37  # boundaries on each side of zero: two to a decade
_DRIFT, _EVIDENCE, _WINDOW = 1.75, 3.5, 4  # in deviations a bin, deviations, bins


def release(counts: np.ndarray, touched: float, sigma: float, door: Door, label: str) -> np.ndarray:
    """Sums over records with Gaussian noise: the only door through which statistics of records leave.

    Formal guarantees:
        If one record moves the sums by at most √touched in l2 norm (as when it changes `touched` counts, each by one),
        the release is a Gaussian mechanism with multiplier `sigma` under adding or removing one record. With a ledger
        it is counted there before it happens.
    """
    return counts + sigma * math.sqrt(touched) * door.noise(counts, sigma, label)


def column_kinds(columns: Sequence[Sequence[Any]], sigma: float, door: Door, label: str) -> list[str]:
    """Kinds of columns whose type says nothing (Python objects): by a private vote of their values.

    Formal guarantees:
        A record votes once in every column, by the type of its own value alone, and not at all where that is missing:
        it moves all votes together by at most √columns in l2 norm. One Gaussian mechanism with multiplier `sigma`.
    """
    votes = np.zeros((len(columns), len(KINDS)))
    for j, values in enumerate(columns):
        for value in values:
            if canonical(value) is not None:
                flag, number = type(value).__name__ in ("bool", "bool_"), isinstance(value, Number)
                votes[j, KINDS.index("flag" if flag else "numeric" if number else "categorical")] += 1
    return [KINDS[int(k)] for k in release(votes, len(columns), sigma, door, label).argmax(axis=1)]


def _counts(
    chunks: Chunks, columns: Sequence[int], bins: int, place: Callable[[int, np.ndarray], np.ndarray]
) -> np.ndarray:  # fmt: skip
    """How many values of each column lie in each bin: a record counts once in a column, a missing value nowhere."""
    counts = np.zeros((len(columns), bins))
    for block in chunks():
        for j, column in enumerate(columns):
            x = block[:, column]
            counts[j] += np.bincount(place(j, x[np.isfinite(x)]), minlength=bins)
    return counts


def _bins(boundaries: np.ndarray, x: np.ndarray) -> np.ndarray:
    return np.searchsorted(boundaries[1:-1], x, side="right")


class Forest:
    """Noisy counts of binary trees, one for each column, over public leaf boundaries.

    Formal guarantees:
        Under adding or removing one record, the vector of all counts moves by at most √(levels·columns) in l2 norm:
        a record is counted at most once per level and column, missing values nowhere. With noise of standard deviation
        sigma·√(levels·columns) on every count the release is one Gaussian mechanism with multiplier `sigma`; all else
        here is post-processing. Boundaries, levels and `sigma` must be public.

    Args:
        boundaries: Leaf boundaries of each column, 2^levels + 1 ascending numbers; values beyond fall into the ends.
        chunks: Passes over the private values.
        columns: Which raw columns are counted.
        sigma: Noise multiplier; 0 counts without noise (not private).
        label: Names the stream; every release needs its own.
    """

    def __init__(
        self, boundaries: Sequence[np.ndarray], chunks: Chunks, columns: Sequence[int], sigma: float, door: Door,
        label: str,
    ) -> None:  # fmt: skip
        self.boundaries = [np.asarray(b, dtype=np.float64) for b in boundaries]
        leaves = len(self.boundaries[0]) - 1
        self.levels = leaves.bit_length() - 1
        tree = [_counts(chunks, columns, leaves, lambda j, x: _bins(self.boundaries[j], x))]
        while tree[0].shape[1] > 2:
            tree.insert(0, tree[0].reshape(len(columns), -1, 2).sum(2))
        touched = self.levels * len(columns)
        self.noise = sigma * math.sqrt(touched)
        noisy = release(np.concatenate(tree, axis=1), touched, sigma, door, label)
        self.leaves = consistent(np.split(noisy, np.cumsum([level.shape[1] for level in tree])[:-1], axis=1))
        steps = np.concatenate([np.zeros((len(columns), 1)), np.cumsum(self.leaves, axis=1)], axis=1)
        # The best increasing sequence up to a factor: the mean of the running maximum and the reversed running minimum.
        up = np.maximum.accumulate(steps, axis=1)
        down = np.minimum.accumulate(steps[:, ::-1], axis=1)[:, ::-1]
        self.cumulated = (up + down) / 2
        self.totals = np.maximum(self.cumulated[:, -1] - self.cumulated[:, 0], 0.0)

    def error(self) -> float:
        """Standard deviation of a count of values below a boundary, roughly."""
        return self.noise * math.sqrt(self.levels) / 2

    def quantiles(self, column: int, p: np.ndarray) -> np.ndarray:
        """Estimates of the p-quantiles of a column, interpolated within leaves."""
        f, x = self.cumulated[column], self.boundaries[column]
        if self.totals[column] <= 0:
            return np.interp(p, [0.0, 1.0], [x[0], x[-1]])
        rising = np.concatenate([[True], np.diff(f) > 0])
        return np.interp(f[0] + np.asarray(p) * self.totals[column], f[rising], x[rising])


def consistent(tree: list[np.ndarray]) -> np.ndarray:
    """Least-squares leaf counts of a noisy binary tree whose root is not counted (Hay et al. 2010).

    `tree` holds counts by level, 2, 4, 8, ... nodes, all with noise of one size.  # columns x nodes
    """
    up = [tree[-1]]
    for depth, level in enumerate(reversed(tree[:-1]), start=1):
        children = up[0].reshape(len(level), -1, 2).sum(2)
        # A node of height h averages its own count and its children's sum with weights 2^h and 2^h − 1.
        own = 2.0**depth / (2.0 ** (depth + 1) - 1)
        up.insert(0, own * level + (1 - own) * children)
    down = up[0]
    for level in up[1:]:
        pairs = level.reshape(len(level), -1, 2)
        down = (pairs + (down - pairs.sum(2))[:, :, None] / 2).reshape(len(level), -1)
    return down


def ranges(chunks: Chunks, columns: Sequence[int], sigma: float, door: Door, label: str) -> list[tuple[float, float]]:
    """A range that holds most values of each column, when nothing is known of it.

    Formal guarantees:
        A record adds one to at most one bin of every column; with noise sigma·√columns on every bin this is one
        Gaussian mechanism with multiplier `sigma` under adding or removing one record.
    """
    boundaries = symmetric_grid()
    counts = _counts(chunks, columns, len(boundaries) - 1, lambda _, x: _bins(boundaries, x))
    noise = sigma * math.sqrt(len(columns))
    noisy = release(counts, len(columns), sigma, door, label)
    # By magnitude, smallest first: the bin around zero stands before both sides.
    negative, zero, positive = noisy[:, :_SIDE][:, ::-1], noisy[:, _SIDE : _SIDE + 1], noisy[:, _SIDE + 1 :]
    folded = np.concatenate([zero, negative + positive], axis=1)
    common = folded.mean(axis=0).clip(0)  # where columns lie in general speaks where one of them is hard to make out
    return [_span(*sides, noise, common) for sides in zip(zero[:, 0], negative, positive, strict=True)]


def _span(
    zero: float, negative: np.ndarray, positive: np.ndarray, noise: float, common: np.ndarray
) -> tuple[float, float]:
    """The range of one column from its noisy counts by magnitude: post-processing.

    Counts stand out together or not at all: a run of neighbouring bins is believed when it holds `_EVIDENCE` deviations
    more than `_DRIFT` a bin, which noise does in about one column of a thousand, however many bins there are.
    """
    first, last = _extent(zero, negative, positive, noise, common)
    high = 10.0 ** (_DECADES[0] + (_DECADES[1] - _DECADES[0]) * min(last, _SIDE - 1) / (_SIDE - 1))
    if last == 0:
        return -high, high
    top = slice(max(first - 1, last - _WINDOW, 0), last)  # the magnitudes that decide how wide the range is
    minus, plus = float(negative[top].sum()), float(positive[top].sum())
    doubt = 2 * noise * math.sqrt(top.stop - top.start)
    total = max(minus + plus + (zero if first == 0 else 0.0), doubt)
    low = 10.0 ** (_DECADES[0] + (_DECADES[1] - _DECADES[0]) * (first - 1) / (_SIDE - 1)) if first else 0.0
    low = low if low * 15 > high else 0.0  # a gap next to zero that is small beside the range is no gap
    # A side is left out when it is certain to be nearly empty: cutting records off costs more than a wide range.
    if minus + doubt < 0.2 * total:
        return low, high
    if plus + doubt < 0.2 * total:
        return -high, -low
    return -high, high


def _extent(
    zero: float, negative: np.ndarray, positive: np.ndarray, noise: float, common: np.ndarray
) -> tuple[int, int]:
    """First and last magnitude of what stands out of the noise, on either side or on both together."""
    noise = max(noise, 0.1)
    sides = [np.concatenate([[zero], side]) for side in (negative, positive, negative + positive)]
    found = [
        stretch for side, scale in zip(sides, (noise, noise, noise * math.sqrt(2)), strict=True)
        for stretch in _stretches(side - _DRIFT * scale, _EVIDENCE * scale)
    ]  # fmt: skip
    if found:
        return min(first for first, _ in found), max(last for _, last in found)
    # Nothing does: the two decades that hold most, with the help of the other columns.
    sums = np.convolve(sides[2] + common, np.ones(_WINDOW), "valid")
    return int(sums.argmax()), int(sums.argmax()) + _WINDOW - 1


def _stretches(steps: np.ndarray, least: float, offset: int = 0) -> list[tuple[int, int]]:
    """First and last place of the stretch with the largest sum, then of those left and right of it, above `least`."""
    if not len(steps):
        return []
    sums = np.concatenate([[0.0], np.cumsum(steps)])
    gains = sums[1:] - np.minimum.accumulate(sums)[:-1]
    last = int(gains.argmax())
    if gains[last] <= least:
        return []
    first = int(sums[: last + 1].argmin())
    left = _stretches(steps[:first], least, offset)
    return [*left, (offset + first, offset + last), *_stretches(steps[last + 1 :], least, offset + last + 1)]


def symmetric_grid() -> np.ndarray:
    """Bin boundaries for a column of which nothing is known: zero in the middle, powers of ten on both sides."""
    magnitudes = np.logspace(*_DECADES, _SIDE)
    return np.concatenate([[-np.inf], -magnitudes[::-1], magnitudes, [np.inf]])


def mixed_grid(low: float, high: float, levels: int) -> np.ndarray:
    """Leaf boundaries in a public range: half evenly spaced, half crowded towards zero for skewed columns."""
    leaves = 1 << levels
    if not high > low:
        low, high = low - 0.5, high + 0.5
    even = np.linspace(low, high, leaves // 2 + 1)
    scale = (high - low) / 1e4
    skewed = scale * np.sinh(np.linspace(np.arcsinh(low / scale), np.arcsinh(high / scale), leaves // 2 + 1)[1:-1])
    grid = np.unique(np.concatenate([even, np.clip(skewed, low, high)]))
    # Fewer boundaries than leaves where the two halves meet: the largest gaps are halved until there are enough.
    while len(grid) < leaves + 1:
        widest = np.argsort(np.diff(grid))[::-1][: leaves + 1 - len(grid)]
        grid = np.sort(np.concatenate([grid, (grid[widest] + grid[widest + 1]) / 2]))
    return grid


def frequent_buckets(chunks: Chunks, columns: Sequence[int], sigma: float, door: Door, label: str) -> list[np.ndarray]:
    """Buckets of a public hash that many records of a column fall into, for each column.

    Formal guarantees:
        A record adds one to at most one of the BUCKETS counts of every column; with noise sigma·√columns on each count,
        empty buckets included, this is one Gaussian mechanism with multiplier `sigma` under adding or removing one
        record. The values themselves are never released, only which buckets are frequent.
    """
    counts = _counts(chunks, columns, BUCKETS, lambda _, x: x.astype(np.int64))
    noise = sigma * math.sqrt(len(columns))
    threshold = 0.5 + THRESHOLD * noise
    result = []
    for row in release(counts, len(columns), sigma, door, label):
        passed = np.flatnonzero(row >= threshold)
        best = passed[np.argsort(row[passed])[::-1][:_MOST]]
        result.append(np.sort(best))
    return result
