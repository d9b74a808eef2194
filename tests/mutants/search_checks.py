"""What a search on a storage must keep; each check fails on some mutant."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests import search_kit as kit

from weightclip.errors import NotFinite
from weightclip.noise import Streams
from weightclip.search import _storage
from weightclip.search._place import Place
from weightclip.tabular import _search


@contextlib.contextmanager
def _folder() -> Iterator[tuple[Path, Path]]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name), Path(name) / "log"


def runs_of_all_workers_are_those_that_were_drawn() -> None:
    with _folder() as (folder, log):
        place, what = kit.begun(folder, 5)
        kit.ended([kit.worker(place, log, 0.05), kit.worker(place, log, 0.05)])
        kit.is_whole(kit.finish(place, log, what), log, what)
        assert sorted(kit.attempts(log)) == list(range(5)), "each run is done once, whoever does it"


def who_looks_for_a_run_takes_it_before_others_look() -> None:
    with _folder() as (folder, _):
        place, _ = kit.begun(folder, 1)
        board = kit.board_at(place)
        board.join(kit.SETTINGS)
        assert place.file is not None
        other = sqlite3.connect(place.file, timeout=0.0, isolation_level=None)
        with contextlib.closing(other), board._storage.engine.begin() as looks:
            looks.exec_driver_sql("SELECT state FROM trials").fetchall()
            try:
                other.execute("BEGIN IMMEDIATE")
                raise AssertionError("two processes may find the same run free")
            except sqlite3.OperationalError:
                pass
        board.close()


def a_run_that_another_one_has_done_is_left() -> None:
    with _folder() as (folder, log):
        place, what = kit.begun(folder, 2)
        board = kit.board_at(place)
        board.join(kit.SETTINGS)
        seen = board._trials()  # what this one knows when the other one has done all
        kit.ended([kit.worker(place, log)])
        assert board._claim(seen, None) is None, "a run that is done was given out again"
        board.close()
        kit.is_whole(kit.finish(place, log, what), log, what)


def a_killed_worker_hides_no_run() -> None:
    with _folder() as (folder, log):
        place, what = kit.begun(folder, 3)
        pid = kit.worker(place, log, 60.0)
        while not kit.attempts(log):
            os.sched_yield()
        kit.killed([pid], 0.0)
        kit.is_whole(kit.finish(place, log, what), log, what)
        assert len(kit.attempts(log)) == 4, "the run of the killed worker is done again"


def a_run_that_fails_is_done() -> None:
    """Whether it fails may depend on records and noise: to do it again would be a choice that nobody has paid for."""
    with _folder() as (folder, _):
        place, what = kit.begun(folder, 3)
        board, done = kit.board_at(place), [0]

        def run(streams: object, generator: object) -> tuple[float, dict[str, int]]:
            done[0] += 1
            if done[0] == 1:
                raise NotFinite("weights")
            return 0.5, {}

        board.join(kit.SETTINGS)
        _search.take_part(run, Streams.secure(), board)
        board.close()
        assert done[0] == len(what.drawn.candidates), "a run that failed was done again"


def what_was_drawn_stays_when_a_search_is_resumed() -> None:
    with _folder() as (folder, log):
        place, what = kit.begun(folder, 2)
        for _ in range(2):
            board = kit.board_at(place)
            board.join(kit.SETTINGS)
            assert board.agreed == what
            board.close()
        kit.is_whole(kit.finish(place, log, what), log, what)


def one_attempt_counts_where_two_end() -> None:
    """A worker that was taken for dead comes back: score and result are of the same attempt."""
    with _folder() as (folder, _):
        place, _ = kit.begun(folder, 1)
        slow, fast = kit.board_at(place), kit.board_at(place)
        for board in (slow, fast):
            board.join(kit.SETTINGS)
        taken = next(runs := slow.runs())
        patience, _storage._PATIENCE = _storage._PATIENCE, -1.0
        try:
            again = next(others := fast.runs())
        finally:
            _storage._PATIENCE = patience
        assert taken == again == 0
        fast.put(0, 1.0, {"by": "fast"})
        slow.put(0, 2.0, {"by": "slow"})
        assert fast.best() == (1.0, {"by": "fast"}) == slow.best()
        for board, left in ((slow, runs), (fast, others)):
            left.close()
            board.close()


def nothing_is_shown() -> None:
    """Neither scores nor the number of runs, by print or by log."""
    out, err = io.StringIO(), io.StringIO()
    heard = logging.StreamHandler(err)
    logging.getLogger().addHandler(heard)
    logging.getLogger("optuna").addHandler(heard)
    try:
        with _folder() as (folder, log), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            place, what = kit.begun(folder, 2)
            kit.finish(place, log, what)
    finally:
        logging.getLogger().removeHandler(heard)
        logging.getLogger("optuna").removeHandler(heard)
    assert out.getvalue() == err.getvalue() == ""


def only_the_owner_reads_it_and_nothing_is_left() -> None:
    with _folder() as (folder, log):
        before = os.umask(0)
        try:
            place, what = kit.begun(folder, 1)
            kit.finish(place, log, what)
        finally:
            os.umask(before)
        assert place.file is not None and place.file.stat().st_mode & 0o777 == 0o600
        log.unlink()
        board = kit.board_at(Place(place.url, place.name))
        board.join(kit.SETTINGS)
        board.erase()
        assert not list(folder.iterdir())


CHECKS = (
    runs_of_all_workers_are_those_that_were_drawn,
    who_looks_for_a_run_takes_it_before_others_look,
    a_run_that_another_one_has_done_is_left,
    a_killed_worker_hides_no_run,
    a_run_that_fails_is_done,
    what_was_drawn_stays_when_a_search_is_resumed,
    one_attempt_counts_where_two_end,
    nothing_is_shown,
    only_the_owner_reads_it_and_nothing_is_left,
)
