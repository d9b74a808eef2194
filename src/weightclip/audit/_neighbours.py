"""Neighbouring data sets built to hurt: each differs from its neighbour by one added record."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from weightclip.audit._subject import Records, Subject, joined, repeated


@dataclass(frozen=True)
class Neighbours:
    """A data set and the record that is added to it (at the end, or at the front)."""

    name: str  #: what is tried
    base: Records  #: the data set D
    extra: Records  #: the record of D' that D lacks
    front: bool = False  #: whether it comes first, which only matters for rounding
    rate: float = 1.0  #: sampling rate at which the pair is run
    steps: int = 1  #: draws that are compared; several where draws are random

    @property
    def larger(self) -> Records:
        """D'."""
        return joined(self.extra, self.base) if self.front else joined(self.base, self.extra)


def hostile_neighbours(subject: Subject, loudest: Records, seed: int = 0) -> list[Neighbours]:
    """Pairs for one trainer; ``loudest`` is the record with the largest gradient, as the falsifier found it."""
    ordinary = subject.ordinary(8, seed)
    x, y = loudest
    other = (x, _other_label(subject, y))
    pairs = [
        Neighbours("loudest record", ordinary, loudest),
        Neighbours("duplicates and a flipped label", repeated(loudest, 8), other),
        Neighbours("one record more of the same", repeated(loudest, 8), loudest),
        Neighbours("near-empty batch", _first(ordinary), loudest),
        # no draw is ever truncated, repeated or drawn again, and an empty one is pure noise
        Neighbours("random draws, many of them empty", _first(ordinary), loudest, rate=0.25, steps=24),
    ]
    if not x.is_floating_point():
        return pairs
    radius = subject.bounds.projections().get("", math.inf)
    length = float(x.norm()) or 1.0
    edge = radius if math.isfinite(radius) else length
    pairs += [
        Neighbours("huge record", repeated(_first(ordinary), 8), (x * 1e6, y)),
        Neighbours("zero record", ordinary, (torch.zeros_like(x), y)),
        Neighbours("denormal record", ordinary, (x * (1e-40 / length), y)),
        Neighbours("inside the projection", ordinary, (x * (0.5 * edge / length), y)),
        Neighbours("on the projection's edge", ordinary, (x * (edge / length), y)),
        Neighbours("outside the projection", ordinary, (x * (2 * edge / length), y)),
    ]
    for name, value in (("not a number", math.nan), ("infinite", math.inf), ("overflowing", 3e38)):
        bad = x.clone()
        bad.view(-1)[0] = value
        pairs.append(Neighbours(f"{name} entry", ordinary, (bad, y)))
    return pairs


def rounding_neighbours(subject: Subject, loudest: Records, size: int) -> list[Neighbours]:
    """Large batches where one record more makes float32 or bfloat16 sums round the other way (SOUNDNESS section 6).

    Copies of the loudest record push its largest coordinate just below a power of two, where numbers lie half as far
    apart as above; the rest of the records pull back by steps that count below it and vanish above it, so that the
    one added record decides over each of them. For bfloat16 a single rounding at a midpoint suffices.
    """
    x, y = loudest
    step = float(subject.start(loudest, 0.0, rate=1.0).raw_step().abs().max())  # the loudest coordinate
    power = 2.0 ** math.floor(math.log2(step * size / 2))
    below = max(1, math.ceil(power / step) - 1)
    spacing = power * 2.0**-23
    pairs = []
    for part in (0.3, 0.7):
        small = (x * (part * spacing / step), _other_label(subject, y))
        base = joined(repeated(loudest, below), repeated(small, size - below))
        pairs.append(Neighbours(f"float32 rounding, {size} records, steps of {part:g} ulp", base, loudest, front=True))
    midpoint = max(1, math.ceil(power * (1 + 2.0**-8) / step) - 1)
    pairs.append(Neighbours(f"bfloat16 rounding, {midpoint} records", repeated(loudest, midpoint), loudest))
    return pairs


def _first(records: Records) -> Records:
    return records[0][:1], records[1][:1]


def _other_label(subject: Subject, y: torch.Tensor) -> torch.Tensor:
    if y.is_floating_point():
        return 1 - y
    kinds = subject.ordinary(64)[1].unique()
    others = kinds[kinds != y.flatten()[0]]
    return torch.full_like(y, int(others[0])) if len(others) else y
