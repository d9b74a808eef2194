"""How a draw is handed out: in how many physical batches, and which row of them each record takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


class Piece(NamedTuple):
    """One physical batch of a draw."""

    draw: int  # the number the draw is keyed by
    number: int
    last: bool
    indices: np.ndarray  # records, empty where the piece has none
    slots: np.ndarray | None  # the row of each record; None: the first rows
    place: int = 0  # its number in the whole draw, where several processes share one


@dataclass(frozen=True)
class Cutter:
    """Cuts draws into pieces; their number is a public constant.

    Attributes:
        size: Rows of a piece at most, and exactly where ``shuffled``; None: a draw is dealt out to ``hands`` pieces.
        count: Pieces of every draw; one that does not fit gets more and is never truncated.
        shuffled: Whether records take rows by a uniform random injection into all rows of the draw.
        hands: Pieces of a draw without a ``size``, as equal as can be: one for each process.

    Formal guarantees:
        A draw of at most ``size * count`` records yields ``count`` pieces, whatever it holds: what a loop does once per
        iteration says nothing about the draw (SOUNDNESS section 9). With ``shuffled`` each piece has ``size`` rows, and
        the rows of the other records have the same law with or without one record (SOUNDNESS section 8, place).
    """

    size: int | None
    count: int
    shuffled: bool = False
    hands: int = field(default=1, repr=False)  # no setting of the run: it may change on resume

    def pieces_of(self, total: int) -> int:
        """The number of pieces of a draw of ``total`` records."""
        return self.hands if self.size is None else max(self.count, -(-total // self.size))

    def cut(self, draw: int, drawn: np.ndarray | None, total: int, rng: np.random.Generator | None) -> Iterator[Piece]:
        """The pieces of a draw; without ``drawn`` it is 0, ..., total - 1, which is never held as a whole."""
        count = self.pieces_of(total)
        if self.shuffled:
            yield from self._scattered(draw, np.arange(total) if drawn is None else drawn, count, rng)
            return
        for number in range(count):
            if self.size is None:
                part = np.arange(number, total, self.hands) if drawn is None else drawn[number :: self.hands]
            else:
                low, high = min(number * self.size, total), min((number + 1) * self.size, total)
                part = np.arange(low, high) if drawn is None else drawn[low:high]
            yield Piece(draw, number, number == count - 1, part, None)

    def _scattered(
        self, draw: int, drawn: np.ndarray, count: int, rng: np.random.Generator | None
    ) -> Iterator[Piece]:  # fmt: skip
        assert self.size is not None and rng is not None
        slots = rng.permutation(count * self.size)[: drawn.size]
        order = np.argsort(slots)  # within a piece by row
        slots, drawn = slots[order], drawn[order]
        ends = np.searchsorted(slots, self.size * np.arange(count + 1))
        for number in range(count):
            part = slice(ends[number], ends[number + 1])
            yield Piece(draw, number, number == count - 1, drawn[part], slots[part] - number * self.size)
