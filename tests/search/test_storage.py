"""The board that several processes share: kills (three in `make test`, fifty with WEIGHTCLIP_FULL=1), and refusals."""

from __future__ import annotations

import os
import random

import pytest
from tests import search_kit as kit

from weightclip.errors import ContractError, NotFinite, WeightclipError
from weightclip.noise import Streams
from weightclip.search import _storage
from weightclip.search._place import Place
from weightclip.search._storage import SearchOver
from weightclip.tabular import OneProcess, take_part

pytest.importorskip("optuna", reason="needs the extra 'search'")
FULL = os.environ.get("WEIGHTCLIP_FULL") == "1"
KILLS = 50 if FULL else 3
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
quiet_fork = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@needs_fork
@quiet_fork
def test_whoever_is_killed_no_run_is_lost_or_added(tmp_path):
    """Kills of one or both of two workers at random moments, until there were enough of them."""
    rng, kills, searches = random.Random(0), 0, 0
    while kills < KILLS:
        folder = tmp_path / str(searches)
        folder.mkdir()
        log, runs = folder / "log", rng.randint(1, 8)
        place, what = kit.begun(folder, runs)
        for _ in range(min(rng.randint(1, 4), KILLS - kills)):
            pids = [kit.worker(place, log, 0.2) for _ in range(2)]
            victims = pids[: rng.randint(1, 2)]
            kit.killed(victims, rng.uniform(0.0, 1.2))
            for pid in set(pids) - set(victims):
                os.waitpid(pid, 0)
            kills += len(victims)
        kit.is_whole(kit.finish(place, log, what), log, what)
        searches += 1


def test_a_search_is_begun_once_and_resumed_with_the_same_options(tmp_path):
    place, what = kit.begun(tmp_path, 1)
    with pytest.raises(WeightclipError, match="go on with --resume"):
        kit.board_at(place).begin(what)
    with pytest.raises(WeightclipError, match="go on with --resume"):
        place.refuse_begun()
    with pytest.raises(WeightclipError, match="other options or on another table"):
        kit.board_at(place).join("something else")
    assert place.file is not None
    place.file.chmod(0o644)
    with pytest.raises(WeightclipError, match="others may read it"):
        kit.board_at(place).join(kit.SETTINGS)


def test_there_must_be_something_to_resume(tmp_path):
    with pytest.raises(WeightclipError, match="there is no search"):
        kit.board_at(Place.of(None, tmp_path / "model")).join(kit.SETTINGS)


def test_a_search_that_was_killed_before_it_was_drawn_can_be_started_again(tmp_path):
    place, what = Place.of(None, tmp_path / "model"), kit.agreed(1)
    board = kit.board_at(place)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_storage.Agreed, "to_json", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            board.begin(what)
    board.close()
    again = kit.board_at(place)
    with pytest.raises(WeightclipError, match="without --resume"):
        again.join(kit.SETTINGS, wait=0.0)
    again.begin(what)
    again.erase()


def test_a_list_of_runs_that_was_cut_short_is_completed(tmp_path):
    place, what, log = Place.of(None, tmp_path / "model"), kit.agreed(3), tmp_path / "log"
    board = kit.board_at(place)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_storage.SharedBoard, "_list_runs", lambda self: None)
        board.begin(what)
    board.close()
    kit.is_whole(kit.finish(place, log, what), log, what)


def test_who_comes_late_hears_that_the_search_is_over(tmp_path):
    place, _ = kit.begun(tmp_path, 1)
    late, last = kit.board_at(place), kit.board_at(place)
    for board in (late, last):
        board.join(kit.SETTINGS)
    last.erase()
    with pytest.raises(SearchOver, match="is over"):
        next(late.runs())
    late.close()


@pytest.mark.parametrize(
    ("url", "said"),
    [("nonsense://x", "the database refuses"), ("postgresql://user:hush@127.0.0.1:1/none", "--storage postgresql")],
    ids=["an unknown kind", "nobody there"],
)
def test_a_database_that_cannot_be_reached_is_one_line_without_its_password(url, said, tmp_path):
    with pytest.raises(WeightclipError, match=said) as caught:
        kit.board_at(Place.of(url, tmp_path / "model")).begin(kit.agreed(1))
    assert "hush" not in str(caught.value) and "\n" not in str(caught.value)


@needs_fork
@quiet_fork
@pytest.mark.skipif("WEIGHTCLIP_POSTGRES" not in os.environ, reason="WEIGHTCLIP_POSTGRES names no server")
def test_two_workers_and_a_kill_on_a_server(tmp_path):
    """On a server of one's own: WEIGHTCLIP_POSTGRES=postgresql+psycopg2://user:password@host/database."""
    place, what, log = Place.of(os.environ["WEIGHTCLIP_POSTGRES"], tmp_path / "model"), kit.agreed(6), tmp_path / "l"
    board = kit.board_at(place)
    board.begin(what)
    with pytest.raises(WeightclipError, match="go on with --resume"):
        kit.board_at(place).begin(what)
    board.close()
    pids = [kit.worker(place, log, 0.3) for _ in range(2)]
    kit.killed(pids[:1], 1.0)
    kit.ended(pids[1:])
    kit.is_whole(kit.finish(place, log, what), log, what)
    board = kit.board_at(place)
    board.join(kit.SETTINGS)
    board.erase()
    with pytest.raises(WeightclipError, match="there is no search"):
        kit.board_at(place).join(kit.SETTINGS)


def faulty(done: list[int], bad: set[int], error: Exception):
    """Runs that note themselves; some of them fail."""

    def run(streams, generator):
        done.append(len(done))
        if done[-1] in bad:
            raise error
        return 0.1 * done[-1], {"number": done[-1]}

    return run


@pytest.mark.parametrize("error", [NotFinite("weights"), RuntimeError("of the user's"), ZeroDivisionError()])
def test_a_run_that_fails_is_done_and_never_repeated(error, tmp_path):
    place, what = kit.begun(tmp_path, 4)
    boards = [OneProcess(what.drawn), kit.board_at(place)]
    boards[1].join(kit.SETTINGS)
    for board in boards:
        done: list[int] = []
        take_part(faulty(done, {0, 3}, error), Streams.secure(), board)
        assert done == [0, 1, 2, 3] and list(board.runs()) in ([], [0, 1, 2, 3])
        assert board.best() == (0.2, {"number": 2})


def test_a_search_whose_runs_all_fail_says_so(tmp_path):
    place, what = kit.begun(tmp_path, 2)
    boards = [OneProcess(what.drawn), kit.board_at(place)]
    boards[1].join(kit.SETTINGS)
    for board in boards:
        take_part(faulty([], {0, 1}, NotFinite("secret 17")), Streams.secure(), board)
        with pytest.raises(WeightclipError, match="every run") as said:
            board.best()
        assert "17" not in str(said.value)


def test_a_call_that_is_wrong_whatever_the_records_is_said_at_once(tmp_path):
    done: list[int] = []
    with pytest.raises(ContractError, match="wrong"):
        take_part(faulty(done, {0}, ContractError("wrong")), Streams.secure(), OneProcess(kit.agreed(3).drawn))
    assert done == [0]


def test_an_sqlite_url_with_a_driver_is_refused(tmp_path):
    with pytest.raises(WeightclipError, match="sqlite:///"):
        Place.of(f"sqlite+pysqlite:///{tmp_path}/x.db", tmp_path / "model")
