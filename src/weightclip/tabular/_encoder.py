"""From raw values to the features of a network: quantile pieces for numbers, one place per category."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from weightclip.accounting import Mechanism
from weightclip.errors import WeightclipError
from weightclip.noise import Streams
from weightclip.tabular import _private as private
from weightclip.tabular._columns import BUCKETS, Column
from weightclip.tabular._private import THRESHOLD, Door, Forest, frequent_buckets, mixed_grid, ranges
from weightclip.tabular._table import BLOCK, Table

_RADIUS = 1.5  # of centered features, in units of their typical norm
_ONE = 2.0**30  # sums of features are kept in whole units of 1/_ONE
_FEW = 12.0  # records, in deviations of a count of the range histogram, below which ranges get twice as much
_EXPECTED_CODES = 10  # of a column whose categories are not declared
LEVELS, FEW_LEVELS = 8, 5  # trees that find quantiles have 2^8 leaves, or 2^5 where the noise is large


@dataclass(frozen=True)
class Pieces:
    """A numeric column: how far the value has come through each of K consecutive intervals, each in [−1, 1]/√K.

    With one interval this is ordinary scaling; with more, a linear model on top is piecewise linear in the column. A
    missing value gives zeros, and 1 in a feature of its own where `missing` is set.
    """

    edges: tuple[float, ...]
    missing: bool = False

    @property
    def width(self) -> int:
        """Number of features."""
        return len(self.edges) - 1 + self.missing

    def write(self, x: np.ndarray, out: np.ndarray) -> None:
        """Features of some raw values.  # rows -> rows x width"""
        pieces = len(self.edges) - 1
        present = np.isfinite(x)
        gaps = not present.all()
        clean = np.where(present, x, self.edges[0]) if gaps else x
        clean = np.clip(clean, self.edges[0], self.edges[-1])
        for k, (left, right) in enumerate(itertools.pairwise(self.edges)):
            step = clean - left
            step /= right - left
            np.clip(step, 0.0, 1.0, out=step)
            step *= 2 / math.sqrt(pieces)
            step -= 1 / math.sqrt(pieces)
            out[:, k] = np.where(present, step, 0.0) if gaps else step
        if self.missing:
            out[:, pieces] = ~present


@dataclass(frozen=True)
class Codes:
    """A categorical column: one feature for each code, 1 where it is the record's; anything else gives zeros."""

    codes: tuple[int, ...]

    @property
    def width(self) -> int:
        """Number of features."""
        return len(self.codes)

    def write(self, x: np.ndarray, out: np.ndarray) -> None:
        """Features of some raw codes.  # rows -> rows x width"""
        out[:] = 0.0
        if not self.codes:
            return
        codes = np.array(self.codes, dtype=np.float64)
        place = np.minimum(np.searchsorted(codes, x), len(codes) - 1)  # NaN sorts last and equals nothing
        hit = codes[place] == x
        out[np.flatnonzero(hit), place[hit]] = 1.0


@dataclass(frozen=True)
class Encoder:
    """A fitted encoder: one part for each column, then a shift and a gain for all features together.

    Formal guarantees:
        Each row of `transform` depends on its own record and on public values alone (parts, center, gain), and has l2
        norm at most `radius`. Without a center that needs no projection: each part contributes at most 1/columns to the
        squared norm.
    """

    columns: tuple[Column, ...]
    parts: tuple[Pieces | Codes, ...]
    center: tuple[float, ...] = ()
    gain: float = 1.0
    radius: float = 1.0

    @property
    def width(self) -> int:
        """Number of features."""
        return sum(part.width for part in self.parts)

    def transform(self, values: np.ndarray) -> np.ndarray:
        """Features of raw values.  # records x columns -> records x features, float32"""
        out = np.zeros((len(values), self.width), dtype=np.float32)
        scale = 1 / math.sqrt(max(1, len(self.parts)))
        for start in range(0, len(values), BLOCK):
            rows, place = np.asarray(values[start : start + BLOCK]), 0
            for j, part in enumerate(self.parts):
                part.write(rows[:, j], out[start : start + BLOCK, place : place + part.width])
                place += part.width
            features = out[start : start + BLOCK]
            features *= scale
            if self.center:
                features -= np.array(self.center, dtype=np.float32)
                features *= np.float32(self.gain)
                norm = np.linalg.norm(features, axis=1, keepdims=True)
                features *= np.float32(self.radius) / np.maximum(norm, np.float32(self.radius))
        return out

    def unknown(self, values: np.ndarray) -> dict[str, int]:
        """How many values of each categorical column have no feature: missing, or of a category that is not kept."""
        counts = {
            column.name: int((~np.isin(values[:, j], np.array(part.codes, dtype=np.float64))).sum())
            for j, (column, part) in enumerate(zip(self.columns, self.parts, strict=True)) if isinstance(part, Codes)
        }  # fmt: skip
        return {name: count for name, count in counts.items() if count}

    def shift_json(self) -> dict[str, Any]:
        """What `to_json` leaves out: center, gain and radius."""
        return {"center": list(self.center), "gain": self.gain, "radius": self.radius}

    def to_json(self) -> list[dict[str, Any]]:
        """A JSON-ready list, one entry for each column."""
        entries = []
        for column, part in zip(self.columns, self.parts, strict=True):
            entry = column.to_json()
            if isinstance(part, Pieces):
                entry.update(edges=list(part.edges), missing=part.missing)
            else:
                entry["codes"] = list(part.codes)
            entries.append(entry)
        return entries

    @classmethod
    def from_json(cls, entries: Sequence[Mapping[str, Any]], shift: Mapping[str, Any]) -> Encoder:
        """The inverse of `to_json` and `shift_json`; refuses anything that is not a plain encoder."""
        columns, parts = [], []
        for entry in entries:
            extra = {"edges", "missing", "codes"}
            columns.append(Column.from_json({k: v for k, v in entry.items() if k not in extra}))
            if columns[-1].kind != "categorical":
                edges = tuple(float(e) for e in entry["edges"])
                if len(edges) < 2 or not all(math.isfinite(e) for e in edges) or np.any(np.diff(edges) <= 0):
                    raise WeightclipError(f"pipeline: edges of column {columns[-1].name!r} must be finite and rising.")
                parts.append(Pieces(edges, bool(entry["missing"])))
            else:
                codes = tuple(int(c) for c in entry["codes"])
                listed = columns[-1].categories
                most = BUCKETS if listed is None else max(1, len(listed))
                if any(not 0 <= c < most for c in codes) or list(codes) != sorted(set(codes)):
                    raise WeightclipError(
                        f"pipeline: codes of column {columns[-1].name!r} must be distinct and sorted."
                    )
                parts.append(Codes(codes))
        center, gain, radius = tuple(map(float, shift["center"])), float(shift["gain"]), float(shift["radius"])
        encoder = cls(tuple(columns), tuple(parts), center, gain, radius)
        if center and len(center) != encoder.width:
            raise WeightclipError(f"pipeline: {len(center)} centers for {encoder.width} features.")
        if not all(map(math.isfinite, (*center, gain, radius))) or gain <= 0 or radius <= 0:
            raise WeightclipError("pipeline: center, gain and radius must be finite, the last two positive.")
        return encoder


@dataclass(frozen=True)
class Fitted:
    """What fitting an encoder gives: the encoder, what it cost, and what a report must say."""

    encoder: Encoder  # the encoder
    mechanisms: tuple[Mechanism, ...] = ()  # what was released of the private records
    statements: tuple[str, ...] = ()  # sentences for the privacy report
    uncovered: tuple[str, ...] = ()  # what was read from the records without paying


def fit_private(table: Table, sigma: float, pieces: int, door: Door, n: int) -> Fitted:
    """Fit an encoder with Gaussian releases that together have noise multiplier `sigma`.

    Without noise (`sigma` = 0) statistics are exact, and not private. `pieces` is the largest number of intervals of a
    numeric column, `n` the public number of records.

    Formal guarantees:
        The encoder is a function of the releases listed in `mechanisms` and of public values, under adding or removing
        one record.
    """
    columns = table.columns
    unknown = [j for j, c in enumerate(columns) if c.kind == "numeric" and not c.bounded]
    hashed = [j for j, c in enumerate(columns) if c.kind == "categorical" and c.categories is None]
    numeric = [j for j, c in enumerate(columns) if c.kind == "numeric"]
    wants = dict(zip(("ranges", "categories", "quantiles"), _wants(columns), strict=True))
    if unknown and n < _FEW * sigma * math.sqrt(2 * sum(wants.values()) * len(unknown) / wants["ranges"]):
        wants["ranges"] *= 2  # few records: a range that is missed costs more than a rough quantile
    total = sum(wants.values())
    sigmas = {name: sigma * math.sqrt(total / want) for name, want in wants.items() if want > 0}
    mechanisms = [
        Mechanism("gaussian", s, 1.0, 1, label=f"{name} of {count} columns")
        for name, count in (("ranges", len(unknown)), ("categories", len(hashed)), ("quantiles", len(numeric)))
        if (s := sigmas.get(name, 0.0)) > 0
    ]
    spans = {j: (float(c.low or 0), float(c.high or 0)) for j, c in enumerate(columns) if c.bounded}
    if unknown:
        found = ranges(table.blocks, unknown, sigmas["ranges"], door, "table/ranges")
        spans |= dict(zip(unknown, found, strict=True))
    codes: dict[int, np.ndarray] = {}
    if hashed:
        found = frequent_buckets(table.blocks, hashed, sigmas["categories"], door, "table/categories")
        codes = dict(zip(hashed, found, strict=True))
    forest = None
    if numeric:
        levels = LEVELS if encoder_error(columns, sigmas["quantiles"], n) < 0.1 else FEW_LEVELS
        grids = [mixed_grid(*spans[j], levels) for j in numeric]
        forest = Forest(grids, table.blocks, numeric, sigmas["quantiles"], door, "table/quantiles")
    parts: list[Pieces | Codes] = []
    for j, column in enumerate(columns):
        if column.kind == "categorical":
            declared = range(len(column.categories or ()))
            parts.append(Codes(tuple(int(c) for c in codes.get(j, np.array(declared)))))
        elif forest is None or column.kind == "flag":
            parts.append(Pieces((0.0, 1.0)))
        else:
            parts.append(_pieces(forest, numeric.index(j), pieces, n))
    paid = "were estimated privately and are paid for" if sigma > 0 else "were read from private rows"
    statements = [f"quantiles of {len(numeric)} numeric columns {paid}"] if numeric else []
    statements += [f"ranges of {len(unknown)} numeric columns {paid}"] if unknown else []
    statements += [f"frequent categories of {len(hashed)} columns (by hash) {paid}"] if hashed else []
    return Fitted(Encoder(columns, at_least_one_feature(parts)), tuple(mechanisms), tuple(statements))


def center(fitted: Fitted, table: Table, sigma: float, door: Door, n: int) -> Fitted:
    """Move the features' mean to zero and their typical norm to one, by private sums of the features.

    What is common to all records says nothing about any, and wastes the norm that a gradient may have.

    Formal guarantees:
        Releases the sum over records of (features, squared norm), which one record moves by at most √2 in l2 norm
        because its features have norm at most 1: one Gaussian mechanism with multiplier `sigma` (0 is not private).
        Terms are whole multiples of 2^-30 and sums of them are exact, so a record moves the stored sum by its own term
        and nothing else; the multiplier covers the rounding of that term. A record with a feature that is not finite
        counts zero.
    """
    encoder = fitted.encoder
    total = np.zeros(encoder.width + 1, dtype=np.int64)
    for block in table.blocks():
        features = encoder.transform(block)
        wide = features.astype(np.float64)
        squares = np.einsum("ij,ij->i", wide, wide)
        if not (good := np.isfinite(squares)).all():
            features[~good], squares[~good] = 0.0, 0.0
        # a product with a power of two is exact, also in float32
        total[:-1] += np.rint(features * np.float32(_ONE)).astype(np.int32).sum(axis=0, dtype=np.int64)
        total[-1] += np.rint(squares * _ONE).astype(np.int64).sum()
    noisy = private.release(total / _ONE, 2 * (1 + 1e-5), sigma, door, "table/means") / n
    mean, square = noisy[:-1], float(noisy[-1])
    noise = 2 * (sigma / n) ** 2 * encoder.width  # of the squared norm of the mean
    length = float(np.square(mean).sum())
    mean = mean * max(0.0, 1 - noise / max(length, 1e-12))  # James and Stein: shrink what is mostly noise
    spread = min(1.0, max(square - float(np.square(mean).sum()), 0.05))
    shift, gain = tuple(mean.astype(np.float32).tolist()), float(np.float32(1 / math.sqrt(spread)))
    shifted = replace(encoder, center=shift, gain=gain, radius=_RADIUS)
    if sigma == 0:
        return replace(fitted, encoder=shifted)
    paid = Mechanism("gaussian", sigma, 1.0, 1, label=f"means of {encoder.width} features")
    return replace(
        fitted, encoder=shifted, mechanisms=(*fitted.mechanisms, paid),
        statements=(*fitted.statements, f"means of {encoder.width} features were estimated privately and are paid for"),
    )  # fmt: skip


def expected_width(columns: Sequence[Column], pieces: int) -> int:
    """Number of features one may expect, from public values: a released number must not decide how much is spent."""
    width = {"numeric": pieces, "flag": 1, "categorical": _EXPECTED_CODES}
    return sum(width[c.kind] if c.categories is None else len(c.categories) for c in columns)


def center_error(width: int, sigma: float, n: int) -> float:
    """Expected norm of the error of the private mean, from public values; the features have norm about 1."""
    return sigma * math.sqrt(2 * width) / n


def fit_public(table: Table, pieces: int) -> Fitted:
    """Fit an encoder from public ranges and categories alone, which every column must have; reads no record."""
    parts: list[Pieces | Codes] = []
    for column in table.columns:
        if column.kind == "categorical":
            if column.categories is None:
                raise WeightclipError(f"column {column.name!r} has no public categories: declare them in the schema.")
            parts.append(Codes(tuple(range(len(column.categories)))))
        elif column.kind == "flag":
            parts.append(Pieces((0.0, 1.0)))
        elif not column.bounded:
            raise WeightclipError(f"column {column.name!r} has no public range: give feature_bounds or a schema.")
        else:
            low, high = float(column.low or 0), float(column.high or 0)
            parts.append(Pieces(_distinct(np.linspace(low, high, pieces + 1))))
    encoder = Encoder(table.columns, at_least_one_feature(parts))
    return Fitted(encoder, statements=("features are scaled by public ranges: free",))


def fit_unprotected(table: Table, pieces: int) -> Fitted:
    """Fit an encoder on the raw rows without any protection: what it learns is not covered by epsilon."""
    fitted = fit_private(table, 0.0, pieces, Door(Streams.secure()), len(table))
    return Fitted(fitted.encoder, uncovered=("feature statistics were read from private rows",))


def encoder_error(columns: Sequence[Column], sigma: float, n: int) -> float:
    """Expected error of the private quantiles as a share of n, from public values: above about 0.1 they are noise."""
    numeric = sum(c.kind == "numeric" for c in columns)
    return sigma * LEVELS * math.sqrt(numeric) / 2 / n


def lack_of_precision(columns: Sequence[Column], sigma: float, n: int) -> float:
    """How far the statistics are from good enough, from public values: 1 is good enough, 2 has twice too much noise.

    Good enough: quantiles off by a twentieth of the records, categories found that hold a thirtieth of them.
    """
    unknown, hashed, numeric = _wants(columns)
    total = unknown + hashed + numeric
    quantiles = encoder_error(columns, sigma * math.sqrt(total / numeric), n) / 0.05 if numeric else 0.0
    smallest = THRESHOLD * sigma * math.sqrt(total) / n if hashed else 0.0
    return max(quantiles, smallest * 30)


def _wants(columns: Sequence[Column]) -> tuple[float, float, float]:
    """Shares of precision asked for: ranges (half as much, a bin is wide), categories, quantiles; one per column."""
    unknown = sum(c.kind == "numeric" and not c.bounded for c in columns)
    hashed = sum(c.kind == "categorical" and c.categories is None for c in columns)
    return 0.5 * unknown, 1.0 * hashed, 1.0 * sum(c.kind == "numeric" for c in columns)


def at_least_one_feature(parts: Sequence[Pieces | Codes]) -> tuple[Pieces | Codes, ...]:
    """A network needs a feature, if only zeros, where no category was declared or found in any column."""
    return tuple(parts) if any(part.width for part in parts) else (Codes((0,)), *parts[1:])


def _pieces(forest: Forest, index: int, pieces: int, n: int) -> Pieces:
    total = forest.totals[index]
    error = forest.error() / max(total, 1.0)
    tail = min(0.25, max(0.005, error))
    inner = np.linspace(0, 1, pieces + 1)
    edges = forest.quantiles(index, np.clip(inner, tail, 1 - tail))
    missing = (n - total) / n
    worth = missing > 0.05 + 4 * forest.noise / n
    leaf = float(np.min(np.diff(np.unique(forest.boundaries[index]))))
    return Pieces(_distinct(edges, leaf), bool(worth))


def _distinct(edges: np.ndarray, least: float = 0.0) -> tuple[float, ...]:
    """Rising edges, at least two of them, no two nearer than `least`."""
    least = max(least, 1e-9 * max(1.0, float(np.max(np.abs(edges)))))
    kept = [float(edges[0])]
    for e in edges[1:]:
        if e - kept[-1] >= least:
            kept.append(float(e))
    if len(kept) == 1:
        kept = [kept[0] - least, kept[0] + least]
    return tuple(kept)
