"""A training process killed at random moments and resumed on its ledger: nothing that was applied is ever missing."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import weightclip as wc
from weightclip.accounting._ledger_format import read

KILLS = 50 if os.environ.get("WEIGHTCLIP_FULL") == "1" else 5
MOMENTS = ("before", "half", "written", "synced")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Iterator[tuple[Path, Callable[[int, str], tuple[int, Callable[[], int]]]]]:
    """A folder, and a function that starts or resumes the run in it: (pid, wait for its end)."""
    folder = tmp_path_factory.mktemp("run")
    child = Path(__file__).with_name("ledger_child.py")
    source = str(Path(wc.__file__).parents[1])  # the code under test, wherever it was imported from
    process = subprocess.Popen(
        [sys.executable, str(child), str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    write, answer = process.stdin, process.stdout

    def start(block: int, moment: str) -> tuple[int, Callable[[], int]]:
        print(block, moment, file=write, flush=True)
        return int(answer.readline()), lambda: int(answer.readline())

    yield folder, start
    write.close()
    process.wait()
    answer.close()


def applied(folder: Path) -> int:
    """Releases that reached the weights."""
    place = folder / "applied"
    return place.stat().st_size if place.exists() else 0


def whole(folder: Path) -> None:
    failure = folder / "failed"
    assert not failure.exists(), failure.read_text()


def test_killed_at_random_moments(runs) -> None:
    """Between charges and releases: charges are never fewer than releases, and at most a block a kill more."""
    folder, start = runs
    rng, surplus, lively = random.Random(2), 0, 0
    for kill in range(KILLS):
        block, before = rng.choice((1, 1, 3, 8)), applied(folder)
        pid, wait = start(block, "never")
        if kill % 2 == 0:  # in the midst of training, otherwise at any moment from the start of the process on
            deadline = time.monotonic() + 30
            while applied(folder) < before + 2 and time.monotonic() < deadline:
                time.sleep(0.001)
        time.sleep(rng.uniform(0.0, 0.2))
        os.kill(pid, signal.SIGKILL)
        assert wait() == signal.SIGKILL, (folder / "failed").read_text()
        surplus += block
        lively += applied(folder) > before
        ledger = folder / "run.ledger"
        counted = read(ledger).charges if ledger.exists() and ledger.stat().st_size else 0
        assert applied(folder) <= counted <= applied(folder) + surplus
    whole(folder)
    assert lively >= (KILLS + 1) // 2
    engine = wc.PrivacyEngine("rdp", ledger=folder / "run.ledger")
    assert applied(folder) <= engine.steps <= applied(folder) + surplus
    engine.ledger.close()


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_while_a_charge_is_written(runs, moment: str) -> None:
    folder, start = runs
    ledger = folder / "run.ledger"
    before = read(ledger).charges if ledger.exists() and ledger.stat().st_size else 0
    had, block = applied(folder), 4
    _, wait = start(block, moment)
    assert wait() == signal.SIGKILL
    whole(folder)
    released, counted = applied(folder) - had, read(ledger).charges - before
    assert released in (4, 8) and counted == released + (0 if moment == "before" else block)
    engine = wc.PrivacyEngine("rdp", ledger=ledger)
    assert engine.steps == before + counted
    engine.ledger.close()
