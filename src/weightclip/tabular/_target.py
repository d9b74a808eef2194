"""Numeric targets: their private range and scale before training, and a last look at the predictions after it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from scipy import stats

from weightclip.accounting import Mechanism
from weightclip.tabular import _private as private
from weightclip.tabular._columns import Column
from weightclip.tabular._encoder import FEW_LEVELS, LEVELS, Codes, Encoder
from weightclip.tabular._private import Door, Forest, mixed_grid, ranges
from weightclip.tabular._table import Table

_UNIT = 1.0  # of a target that the network learns, in standard deviations: Huber's loss bounds what lies far out
_ONE = 2.0**30  # sums are kept in whole units of 1/_ONE
_REACH = (1.0, 2.5)  # targets are cut between so many units from their middle where their mean is taken,
_BLUR = 0.04  # so that the mean's noise is at most this many units if that can be
_NEAR = 0.5  # predictions and targets are cut at this many units where it is asked whether they go together
_ASIDE = 1 / 3  # weight of the sums that only correct others
_SURE = 2.75  # deviations of its noise that are taken off before the last look is believed
_FITTED = 2.1  # times √features: what predictions owe to the noise of the very records they are compared with
_FOLLOW = 0.6  # where targets follow predictions by this much, nothing is taken back
Blocks = Callable[[], Iterator[tuple[np.ndarray, np.ndarray, np.ndarray | None]]]


@dataclass(frozen=True)
class Target:
    """How a numeric target is scaled."""

    low: float  # of the interval that holds nearly all of it; predictions stay inside
    high: float
    middle: float  # what the network learns is (y − middle)/unit
    unit: float

    @classmethod
    def public(cls, low: float, high: float) -> Target:
        """From a public range."""
        return cls(low, high, (low + high) / 2, max((high - low) / 2, 1e-12 * max(1.0, abs(low), abs(high))))


def fit_target(
    y: np.ndarray, span: tuple[float, float] | None, sigma: float, door: Door, n: int
) -> tuple[Target, tuple[Mechanism, ...]]:
    """Range, middle and spread of a target, and what they cost.

    Quantiles are read where the noise still leaves them (a fifth from the ends, with little data) and carried on to the
    ends as a normal law would, each side by its own spread: a range that is cut short costs more than one a bit wide.

    Formal guarantees:
        At most two Gaussian mechanisms, listed, that together have multiplier `sigma` (0 is not private); all else is
        post-processing. A public range `span` saves the first.
    """
    blocks = Table((Column("target", "numeric"),), y[:, None]).blocks
    coarse, fine = (sigma * math.sqrt(3), sigma * math.sqrt(1.5)) if span is None else (0.0, sigma)
    whole = span or ranges(blocks, (0,), coarse, door, "target/range")[0]
    levels = LEVELS if fine * LEVELS / 2 / n < 0.03 else FEW_LEVELS
    forest = Forest([mixed_grid(*whole, levels)], blocks, (0,), fine, door, "target/quantiles")
    tail = min(0.2, max(0.005, 1.5 * forest.error() / max(forest.totals[0], 1.0)))
    inner = max(tail, 0.1)
    low, left, middle, right, high = forest.quantiles(0, np.array([tail, inner, 0.5, 1 - inner, 1 - tail])).tolist()
    reach = max(1.0, 2.6 / float(stats.norm.isf(tail)))  # as far as a two-hundredth of a normal law
    grid = forest.boundaries[0]
    least = max(float(np.min(np.diff(np.unique(grid)))), 1e-9 * max(1.0, abs(low), abs(high)))
    unit = max(_UNIT * (right - left) / (2 * float(stats.norm.isf(inner))), least)
    low = max(float(grid[0]), middle - reach * (middle - low), middle - 8 * unit)
    high = min(float(grid[-1]), middle + reach * (high - middle), middle + 8 * unit)
    if span is not None:
        low, high = span
    elif high - low < least:
        low, high = (low + high - least) / 2, (low + high + least) / 2
    labels = (("range of the target", coarse), ("quantiles of the target", fine))
    paid = tuple(Mechanism("gaussian", s, 1.0, 1, label=label) for label, s in labels if s > 0)
    return Target(low, high, middle, unit), paid


def pretended(encoder: Encoder, rng: np.random.Generator | None = None, rows: int = 2000) -> np.ndarray:
    """Rows that a table could hold, from the released encoder alone: where numbers lie, and frequent categories.

    Columns are drawn independently, numbers evenly between the released quantiles; without `rng` always the same.
    """
    rng, columns = np.random.default_rng(0) if rng is None else rng, []
    for part in encoder.parts:
        if isinstance(part, Codes):
            columns.append(rng.choice(np.array(part.codes or (math.nan,), dtype=np.float64), rows))
        else:
            edges = np.array(part.edges)
            place = rng.integers(len(edges) - 1, size=rows)
            columns.append(edges[place] + rng.random(rows) * np.diff(edges)[place])
    return np.column_stack(columns)


def agreement(
    blocks: Blocks, reference: np.ndarray, features: int, n: int, sigma: float, door: Door
) -> tuple[float, float]:  # fmt: skip
    """(factor, mean): predictions should be factor·prediction + (1 − factor)·mean, the factor from 0 to 1.

    With little data the noise of training can move predictions further from the targets than the targets' mean is. A
    sum over the records tells whether the targets go with the predictions; where that is not sure, the mean takes their
    place. Sure means: by nearly three deviations of the noise that is added and of chance (what so many records of a
    target show that no column explains), beyond what predictions follow the very targets they were fitted to. Values
    are cut near the mean, which is released first: signs tell most of whether two things go together, for the least
    noise.

    Args:
        blocks: Makes a pass over (predictions, targets, sample weights or None), the first two in the units that the
            network learnt.
        reference: Predictions for pretended records, which tell how far predictions swing at no cost.
        features: Number of features, as released.
        n: Public number of records.
        sigma: Noise multiplier; 0 is not private.

    Formal guarantees:
        Two Gaussian mechanisms under adding or removing one record, which together have multiplier `sigma`, as their
        1/σ² add up (SOUNDNESS Theorem 2). The first releases Σwt (with sample weights also Σw/3), the second, around
        the mean that this gives, Σwuv, Σwu/3 and Σwv/3. u is the prediction, t and v are the target, each in public
        units and cut to [−1, 1], w is the weight, cut to [0, 1]: one record moves the first by at most 1 (√(1 + 1/9))
        and the second by at most √(1 + 2/9) in l2 norm, and all sums get the same noise. Terms are whole multiples of
        2^-30 and their sums are exact; a record whose target or prediction is not finite, or whose weight is no number,
        counts zero. Factor and mean are post-processing.
    """
    weighted = next(iter(blocks()))[2] is not None
    first, second = 1 + weighted * _ASIDE**2, 1 + 2 * _ASIDE**2  # squared sensitivities
    noise = sigma * math.sqrt(first + second)

    def released(terms: Callable[..., list[np.ndarray]], touched: float, label: str) -> list[float]:
        parts = []
        for f, y, weights in blocks():
            w = np.ones_like(y) if weights is None else np.clip(np.nan_to_num(weights, nan=0.0), 0.0, 1.0)
            w = np.where(np.isfinite(f) & np.isfinite(y), w, 0.0)
            parts.append(np.rint(np.stack(terms(f, y, w)) * _ONE).astype(np.int64).sum(axis=1))
        total = np.stack(parts).sum(axis=0)
        # the multiplier of this part alone
        return private.release(
            np.asarray(total / _ONE), touched * (1 + 1e-5), noise / math.sqrt(touched), door, label
        ).tolist()

    reach = min(max(_BLUR * n / max(noise, 1e-9), _REACH[0]), _REACH[1])  # from public numbers
    mean, *many = released(
        lambda f, y, w: [w * _cut(y, 0.0, reach), *([_ASIDE * w] if weighted else [])], first, "target/mean"
    )
    # With weights nobody knows in public how many records there are in effect; without, there are n.
    count = max(many[0] / _ASIDE, 2 * noise, 1.0) if many else float(n)
    mean = reach * min(1.0, max(-1.0, mean / count))
    middle, spread = float(np.mean(reference)), max(float(np.std(reference)), 1e-6)

    def terms(f: np.ndarray, y: np.ndarray, w: np.ndarray) -> list[np.ndarray]:
        # records lie where the targets do, whatever the level of pretended ones
        u, v = _cut(f, mean, _NEAR * spread), _cut(y, mean, _NEAR)
        return [w * u * v, _ASIDE * w * u, _ASIDE * w * v]

    both, *sides = released(terms, second, "target/agreement")
    u, v = (min(1.0, max(-1.0, side / _ASIDE / count)) for side in sides)
    swings = _cut(reference, middle, _NEAR * spread)
    # uv on average if targets equal predictions: v moves about as much as the target, whose unit is wide
    whole = max(float(np.mean(swings * (reference - middle))), 1e-9)
    chance = count * float(np.mean(swings**2)) ** 2  # variance of Σuv if u and v have nothing to do with each other
    deviation = math.sqrt(noise**2 * (1 + (u * u + v * v) / _ASIDE**2) + chance)
    together = both - count * u * v - _FITTED * math.sqrt(features) * whole / spread**2
    slope = (together - _SURE * deviation) / (count * whole)
    return min(1.0, max(0.0, slope / _FOLLOW)), mean


def _cut(x: np.ndarray, center: float, unit: float) -> np.ndarray:
    return np.nan_to_num(np.clip((x - center) / unit, -1.0, 1.0))
