"""Sums of physical batches as integers on a public grid: the same bits in any order, on any number of processes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from weightclip.errors import WeightclipError

_BITS = 36  # of a sensitivity, below its power of two
_MOST = 2**24  # records (times views) in a draw, so that no sum of theirs leaves 62 bits


class GridSums:
    """Adds up the sums of physical batches in int64, in units of about 2^-36 of each layer's sensitivity.

    Args:
        records: Largest number of records of a draw, times views.
        pieces: Physical batches of a draw, on all processes together.

    Formal guarantees:
        Let S_j and S_j' be the sums of the j-th physical batch with and without one record (which may move other
        records from batch to batch), so that sum_j S_j and sum_j S_j' differ by at most Delta_k in norm. T takes every
        entry to a multiple of the unit u, towards zero: T(S_j) = S_j - e_j with entries of e_j below u in size; u is a
        power of two, so that nothing else rounds. Integers add exactly, hence sum_j T(S_j) and sum_j T(S_j') differ by
        at most Delta_k + 2 pieces u sqrt(d_k). A bias, whose noise is scaled for beta times its gradient, has a unit of
        its own, at most u/beta. With u <= 2^-36 Delta_k all layers together, under one limit or many, need the factor
        1 + 2^-35 pieces sqrt(sum_k d_k) of :meth:`slack` (SOUNDNESS Theorem 21, rounding before the noise). Units are
        functions of sensitivities, which are public.
    """

    def __init__(self, records: int, pieces: int) -> None:
        if records > _MOST:
            raise WeightclipError(
                f"exact_sums takes draws of at most {_MOST} records (times views), this run allows {records}: leave it "
                "out, or make the draws smaller."
            )
        self.pieces = pieces
        self.units: list[float] = []
        self.totals: list[Tensor | None] = []

    def slack(self, dimension: int) -> float:
        """The factor by which the grid enlarges sensitivities, for so many trained numbers."""
        return 1 + 2.0 ** (1 - _BITS) * self.pieces * math.sqrt(dimension)

    def begin(self, sensitivities: Sequence[float]) -> None:
        """A new draw, in which one record's gradient of each parameter has a norm of at most these."""
        self.units = [2.0 ** (math.floor(math.log2(value)) - _BITS) for value in sensitivities]
        self.clear()

    def add(self, sums: Sequence[Tensor | None]) -> None:
        """The sums of one physical batch."""
        for i, value in enumerate(sums):
            if value is not None:
                whole = self.whole(i, value)
                before = self.totals[i]
                self.totals[i] = whole if before is None else before + whole

    def whole(self, i: int, value: Tensor) -> Tensor:
        """The sum of a physical batch for the i-th parameter in its units."""
        return (value.double() / self.units[i]).trunc_().to(torch.int64)

    def values(self) -> list[Tensor | None]:
        """The totals as numbers."""
        return [None if t is None else t.double().mul_(u) for t, u in zip(self.totals, self.units, strict=True)]

    def clear(self) -> None:
        """Forget a draw."""
        self.totals = [None] * len(self.units)
