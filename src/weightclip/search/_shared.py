"""One search in several processes: the first begins or joins it, the others help, the first takes the winner."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightclip.errors import WeightclipError
from weightclip.noise import Streams
from weightclip.search._place import Place
from weightclip.search._storage import Agreed, SharedBoard
from weightclip.tabular import Drawn, take_part

if TYPE_CHECKING:
    from weightclip.search._function import FunctionSearch
    from weightclip.search._table import TableSearch

    Work = FunctionSearch | TableSearch  # it is sent to other processes, and reads the records there by itself


@dataclass(frozen=True)
class Shared:
    """How a search is shared."""

    place: Place  #: where it is kept
    workers: int = 1  #: processes of this machine that take part
    resume: bool = False  #: whether to go on with (or help in) a search that was begun; else one is begun

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= 1024:
            raise WeightclipError(f"--workers must lie between 1 and 1024, got {self.workers}.")
        if not self.resume:
            self.place.refuse_begun()


@contextlib.contextmanager
def shared_search(work: Work, how: Shared) -> Iterator[SharedBoard]:
    """A board for ``work.search(board)``, with helpers at it; deleted when the block, which keeps the winner, ends.

    Formal guarantees:
        Those of `SharedBoard`. Noise of a run comes from streams of the process that does it, whose root is written
        nowhere; of a seeded search, from the seed and the run's number.
    """
    board = SharedBoard(how.place, work.encode, work.decode)
    if how.resume:
        board.join(work.settings())
    else:
        board.begin(Agreed(work.settings(), Drawn.draw(streams(work.seed), work.mean_runs), work.cost()))
    context = multiprocessing.get_context("spawn")  # forked processes would share torch's threads and generators
    helpers = [context.Process(target=_help, args=(work, how), daemon=True) for _ in range(how.workers - 1)]
    try:
        for helper in helpers:
            helper.start()
        yield board
    except BaseException:
        board.close()
        raise
    finally:
        for helper in helpers:
            if helper.pid is not None:
                helper.terminate()
                helper.join()
    board.erase()


def streams(seed: int | None) -> Streams:
    """Randomness of one process."""
    return Streams.secure() if seed is None else Streams.seeded(seed)


def _help(work: Work, how: Shared) -> None:
    """Runs in a process of its own, until no run is left; what it would print is nobody's business."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the first process ends the others
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // how.workers))
    board = SharedBoard(how.place, work.encode, work.decode)
    board.patient = False  # what others have begun and left is the first process's to do again
    board.join(work.settings())
    try:
        take_part(work.run(board.agreed), streams(work.seed), board)
    finally:
        board.close()
