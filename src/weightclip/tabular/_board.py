"""A search that pays for itself: a random number of runs, of which the best alone is released.

Choosing the best of several runs tells of the records, too. Papernot and Steinke (2022) bound what that costs if the
number of runs is drawn from a law fixed beforehand, every run tries a candidate drawn at random, and nothing of a run
that did not win is shown (SOUNDNESS Theorem 4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from weightclip.errors import NotFinite, WeightclipError
from weightclip.noise import Streams

T = TypeVar("T")
FAILED = -1e300  # the score of a run that failed
ALL_FAILED = (
    "every run of the search failed: do one by itself (weightclip train, or a call of your function) on records that "
    "you may look at, to see why."
)

PrivateRun = Callable[[Streams, np.random.Generator], tuple[float, T]]
"""One private run: from its own streams, and a generator for its candidate, to a noisy score and what it releases."""


@dataclass(frozen=True)
class Drawn:
    """What a search draws once, before its first run; all who take part in it have the same.

    Attributes:
        split: Key of the coins that send records to training or validation.
        candidates: Key of each run's candidate; there are as many runs as keys.

    Formal guarantees:
        A function of the streams and the public mean alone, independent of the records. The number of runs is
        geometric, and must be shown to nobody. Coins protect nothing: the search is private given all of them.
    """

    split: bytes
    candidates: tuple[bytes, ...]

    @classmethod
    def draw(cls, root: Streams, mean_runs: float) -> Drawn:
        """Draw it; the number of runs has mean `mean_runs`, and is at least one."""
        runs = int(root.numpy("tune/search").geometric(1 / mean_runs))
        return cls(root.key("tune/split"), tuple(root.key("tune/candidate", i) for i in range(runs)))

    def coins(self, n: int) -> np.ndarray:
        """A number in [0, 1) for each of n records."""
        return Streams(self.split).numpy("tune/split").uniform(size=n)

    def candidate(self, number: int) -> np.random.Generator:
        """The generator with which a run draws its candidate."""
        return Streams(self.candidates[number]).numpy("tune/candidate")


class Board(Protocol):
    """Who does which run of a search, and what came of it."""

    @property
    def drawn(self) -> Drawn:
        """What was drawn before the first run."""
        ...

    def runs(self) -> Iterator[int]:
        """Numbers of the runs that this process is to do."""
        ...

    def put(self, number: int, score: float, result: Any) -> None:
        """Keep what came of a run."""
        ...

    def best(self) -> tuple[float, Any]:
        """Score and result of the run that won, once all are done."""
        ...


class OneProcess:
    """A board in memory: one process does all runs, and keeps the best alone."""

    def __init__(self, drawn: Drawn) -> None:
        self._drawn = drawn
        self._best: tuple[float, Any] | None = None

    @property
    def drawn(self) -> Drawn:
        """What was drawn before the first run."""
        return self._drawn

    def runs(self) -> Iterator[int]:
        """All of them."""
        return iter(range(len(self._drawn.candidates)))

    def put(self, number: int, score: float, result: Any) -> None:
        """Keep it if it is better than all before."""
        if self._best is None or score > self._best[0]:
            self._best = score, result

    def best(self) -> tuple[float, Any]:
        """Score and result of the run that won."""
        assert self._best is not None
        if self._best[0] == FAILED:
            raise WeightclipError(ALL_FAILED)
        return self._best


def take_part(run: PrivateRun[T], root: Streams, board: Board) -> None:
    """Do the runs that fall to this process.

    Args:
        run: One private run; it draws its candidate with the generator, independently of the records.
        root: Randomness of this process; each run gets streams of its own.
        board: Where runs are given out, and results kept.

    Formal guarantees:
        A run that fails is a run that is done, with the lowest of all scores: whether it fails may depend on records
        and noise (weights that diverge), and to do it again would choose among attempts that nobody has paid for.
    """
    for number in board.runs():
        try:
            score, result = run(root.child("tune/run", number), board.drawn.candidate(number))
        except Exception as error:
            if isinstance(error, WeightclipError) and not isinstance(error, NotFinite):
                raise  # says what is wrong with the call, whatever the records
            score, result = FAILED, None
        board.put(number, score, result)


def best_of_random_runs(run: PrivateRun[T], mean_runs: float, root: Streams) -> tuple[float, T]:
    """Run a geometric number of times and return the run of the highest (private) score; the others are forgotten.

    Args:
        run: One private run, as in `take_part`.
        mean_runs: Mean number of runs, at least one of which happens.
        root: Randomness of all runs.

    Formal guarantees:
        The result costs `accounting.search_cost` of one run's mechanisms with ``NegativeBinomialRuns(mean_runs, 1)``,
        as long as nobody learns the number of runs or anything of a run that did not win.
    """
    board = OneProcess(Drawn.draw(root, mean_runs))
    take_part(run, root, board)
    return board.best()
