"""One Poisson draw: its law, how many records it can hold, its pieces, and which of them a process runs.

SOUNDNESS Theorems 26 and 27 (the law), Theorem 32 (several processes).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

TAIL = 1e-25  # chance that one draw holds more than b_max records, charged to delta


def poisson_indices(rng: np.random.Generator, q: float, n: int) -> np.ndarray:
    """Indices below `n`, each included independently with probability `q`, in increasing order.

    A gap is built as 1 + j + B·m with B a power of two near 1/q (SOUNDNESS Theorem 26): read off one double, a gap of
    10⁹ would be resolved to seven digits only. Time and memory are O(q·n); the stream is consumed in a way that depends
    on `q` alone, so the indices below m are the same for every n ≥ m.

    Formal guarantees: for an ideal `rng` the inclusion indicators are i.i.d. Bernoulli(q), up to about 10⁻¹⁵ in total
    variation per gap; removing the last record changes no other indicator. `q` is public; `n` only cuts the sequence.

    Args:
        rng: source of randomness, used for this draw only.
        q: inclusion probability in (0, 1).
        n: number of records, below 2⁴⁶.
    """
    lam = -math.log1p(-q)  # P(gap > k) = exp(-lam * k), without cancellation for small q
    block = 1 << min(max(math.floor(-math.log2(lam)), 0), 52)
    found: list[np.ndarray] = []
    position, size = -1, 512
    while position < n:
        if block > 1:
            j = rng.integers(block, size=size)
            j = j[rng.random(size) < np.exp(-lam * j)]
        else:
            j = np.zeros(size, dtype=np.int64)
        with np.errstate(over="ignore"):  # a subnormal q may send m to infinity, which the next line cuts
            m = np.floor(rng.standard_exponential(j.size) / (lam * block))
        # Gaps beyond n all mean "past the end": cutting them there keeps the sums inside 64 bits.
        gap = np.minimum(1 + j + block * np.minimum(m, n // block + 1).astype(np.int64), n + 1)
        positions = position + np.cumsum(gap)
        found.append(positions)
        position = int(positions[-1]) if positions.size else position
        size = min(2 * size, 1 << 16)
    found[-1] = found[-1][: np.searchsorted(found[-1], n)]
    return np.concatenate(found)


def largest_batch(batch: float, q: float, n: int) -> int:
    """b_max: a draw holds more records with probability below 1e-25; a function of public constants.

    Args:
        batch: b, the declared size of a draw (public).
        q: inclusion probability (public).
        n: number of records (private); read only to see whether the declared size is believable.

    The quantile is that of a Poisson variable of mean m = b + 1, whose tail above k is below
    pmf(k + 1)/(1 - m/(k + 2)), a geometric series. Where q n exceeds b + 1 by declaration (b was chosen far too small),
    the least power of four takes the place of b and is thereby declared public; a data set of the declared size and its
    neighbours never get there. Proof: SOUNDNESS Theorem 27.

    Formal guarantees:
        Let V be the records of a draw other than the one in question. |V| < b_max but for a probability of 1e-25, and
        V is drawn alike for both neighbours. Restricted to |V| < b_max, with or without the record in question, no
        draw exceeds b_max: rounding slack and number of pieces are then as accounted, and the restricted mixtures are
        dominated by the same pair of distributions as the whole ones. So T draws cost T 1e-25 of delta and no e^eps of
        it: the part that is left out is left out on one side only.
    """
    mean = batch + 1.0
    if q * n > mean:
        mean = 4.0 ** max(0, math.ceil(math.log(max(q * n - 1.0, 1.0), 4) - 1e-12)) + 1.0

    def rare(k: int) -> bool:
        return (k + 1) * math.log(mean) - mean - math.lgamma(k + 2) - math.log1p(-mean / (k + 2)) <= math.log(TAIL)

    low = math.ceil(mean)  # bisection: the bound falls from here on
    high = low + math.ceil(12 * math.sqrt(mean) + 80)  # by Bernstein's inequality
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if rare(middle) else (middle + 1, high)
    return low + 1  # of the others at most `low`, and one


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

    Formal guarantees:
        A draw of at most ``size * count`` records yields ``count`` pieces, whatever it holds: what a loop does once per
        iteration says nothing about the draw (SOUNDNESS section 9). With ``shuffled`` each piece has ``size`` rows, and
        the rows of the other records have the same law with or without one record (SOUNDNESS section 8, place).
    """

    #: rows of a piece at most, and exactly where ``shuffled``; None: a draw is dealt out to ``hands`` pieces
    size: int | None
    count: int  #: pieces of every draw; one that does not fit gets more and is never truncated
    shuffled: bool = False  #: whether records take rows by a uniform random injection into all rows of the draw
    #: pieces of a draw without a ``size``, as equal as can be: one for each process; no setting of the run, which may
    #: change on resume
    hands: int = field(default=1, repr=False)

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

    def _scattered(self, draw: int, drawn: np.ndarray, count: int, rng: np.random.Generator | None) -> Iterator[Piece]:
        assert self.size is not None and rng is not None
        slots = rng.permutation(count * self.size)[: drawn.size]
        order = np.argsort(slots)  # within a piece by row
        slots, drawn = slots[order], drawn[order]
        ends = np.searchsorted(slots, self.size * np.arange(count + 1))
        for number in range(count):
            part = slice(ends[number], ends[number + 1])
            yield Piece(draw, number, number == count - 1, drawn[part], slots[part] - number * self.size)


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
