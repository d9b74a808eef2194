"""Searches of made-up runs: what a board must keep, whoever is killed."""

from __future__ import annotations

import os
import random
import secrets
import signal
import time
from pathlib import Path
from typing import Any

from weightclip.search._place import Place
from weightclip.search._storage import Agreed, SharedBoard
from weightclip.tabular import Drawn

SETTINGS = "made-up runs"


def agreed(runs: int) -> Agreed:
    """A search of so many runs."""
    return Agreed(SETTINGS, Drawn(secrets.token_bytes(32), tuple(secrets.token_bytes(32) for _ in range(runs))), 1.0)


def board_at(place: Place) -> SharedBoard:
    """A board whose results are JSON as they are."""
    return SharedBoard(place, lambda result: result, lambda stored: stored)


def begun(folder: Path, runs: int) -> tuple[Place, Agreed]:
    """A search that is begun, and that nobody works at yet."""
    place, what = Place.of(None, folder / "model"), agreed(runs)
    board = board_at(place)
    board.begin(what)
    board.close()
    return place, what


def do_runs(board: SharedBoard, log: Path, pause: float, patient: bool = True) -> None:
    """Each attempt has a score of its own, and its result repeats it."""
    board.patient = patient
    for number in board.runs():
        _note(log, number)
        time.sleep(pause)
        score = random.SystemRandom().random()
        board.put(number, score, {"number": number, "score": score})


def worker(place: Place, log: Path, pause: float = 0.0, patient: bool = False) -> int:
    """Another process that takes part; its number."""
    pid = os.fork()
    if pid:
        return pid
    try:
        board = board_at(place)
        board.join(SETTINGS)
        do_runs(board, log, pause, patient)
        os._exit(0)
    finally:
        os._exit(1)


def killed(pids: list[int], after: float) -> None:
    """Workers that are killed after some time, if they live so long."""
    time.sleep(after)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)  # not waited for: the number is still theirs
    for pid in pids:
        os.waitpid(pid, 0)


def ended(pids: list[int]) -> None:
    """Workers that end by themselves, without an error."""
    for pid in pids:
        assert os.waitpid(pid, 0)[1] == 0


def attempts(log: Path) -> list[int]:
    """Runs that were begun, in order."""
    return [int(line) for line in log.read_text().split()] if log.exists() else []


def finish(place: Place, log: Path, what: Agreed) -> tuple[float, Any, list[Any]]:
    """What the process that ends the search finds: score and result of the winner, and all trials there are."""
    board = board_at(place)
    board.join(SETTINGS)
    assert board.agreed == what, "what was drawn before the first run has changed"
    do_runs(board, log, 0.0)
    score, result = board.best()
    trials = board._storage.get_all_trials(board._study)
    board.close()
    return score, result, trials


def is_whole(found: tuple[float, Any, list[Any]], log: Path, what: Agreed) -> None:
    """Every run that was drawn is done, no other was, and the best of all won, with the score it was given."""
    score, result, trials = found
    count = len(what.drawn.candidates)
    assert set(attempts(log)) == set(range(count)), "runs that were not drawn, or some that were never begun"
    assert [t.number for t in trials] == list(range(count)) and all(t.state.is_finished() for t in trials)
    assert score == max(t.values[0] for t in trials), "the winner is not the best of all runs"
    assert result["score"] == score and trials[result["number"]].values[0] == score, "another attempt's result"


def _note(log: Path, number: int) -> None:
    handle = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
    os.write(handle, f"{number}\n".encode())
    os.close(handle)
