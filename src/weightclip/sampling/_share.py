"""Which pieces of a draw one of several processes runs (SOUNDNESS Theorem 32)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from weightclip.sampling._pieces import Piece


@dataclass(frozen=True)
class Share:
    """The part of process ``rank`` of ``ranks``: of every round of ``ranks`` pieces it runs the one of its number.

    Formal guarantees:
        Every piece of a draw belongs to exactly one rank, so that a record that was drawn is in the sum once. All ranks
        run equally many pieces a draw, a number that is public where that of the whole draw is: a rank without a piece
        in the last round gets one without records.
    """

    rank: int = 0
    ranks: int = 1

    def of(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """This rank's pieces of one draw, numbered from 0; ``place`` keeps their number in the whole draw."""
        mine: Piece | None = None
        for piece in pieces:
            turn, who = divmod(piece.number, self.ranks)
            mine = piece if who == self.rank else mine
            if piece.last or who == self.ranks - 1:
                mine = mine or Piece(piece.draw, 0, False, np.zeros(0, dtype=np.int64), None)
                yield mine._replace(number=turn, last=piece.last, place=turn * self.ranks + self.rank)
                mine = None

    def rounds(self, pieces: int) -> int:
        """How many pieces each rank runs of a draw that has so many."""
        return -(-pieces // self.ranks)
