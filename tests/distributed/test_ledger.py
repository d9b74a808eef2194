"""One ledger for all processes: rank 0 writes it, all of them know it, and it survives the death of any."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tests.distributed import jobs, shard_jobs
from tests.ranks_kit import Failed, finish, results, start

import weightclip as wc
from weightclip.accounting import read

FULL = os.environ.get("WEIGHTCLIP_FULL") == "1"
KILLS = 50 if FULL else 3


def test_runs_of_any_number_of_ranks_share_a_ledger(tmp_path: Path) -> None:
    for world, total in ((2, 3), (1, 6), (3, 9)):
        found = results(world, jobs.charged, str(tmp_path), 3)
        book = read(tmp_path / "run.ledger")
        for charges, steps, epsilon, state, _ in found:
            assert charges == steps == book.charges == total and epsilon == found[0][2]
            assert state == {"id": book.id, "charges": total, "head": book.head}
    engine = wc.PrivacyEngine("rdp", ledger=tmp_path / "run.ledger")
    assert engine.steps == 9
    engine.ledger.close()


def test_a_ledger_is_held_by_one_engine(tmp_path: Path) -> None:
    for rank, (second, asked) in enumerate(results(2, jobs.held, str(tmp_path))):
        assert second.kind == "ContractError" and "in use by another engine" in second.text
        assert (asked is None) if rank == 0 else "held by rank 0" in asked.text


def test_a_budget_is_that_of_all_runs(tmp_path: Path) -> None:
    results(2, jobs.charged, str(tmp_path), 3)
    found = results(2, jobs.within_a_budget, str(tmp_path))
    assert found[0] == found[1]
    steps, epsilon, _ = found[0]
    assert steps == read(tmp_path / "run.ledger").charges == 8 and 5 < epsilon <= 6.0


def lines(path: Path) -> list[tuple[int, str]]:
    text = path.read_text() if path.exists() else ""
    return [(int(charge), digest) for charge, _, digest in (line.partition(" ") for line in text.splitlines())]


@pytest.mark.parametrize(("endless", "world"), [(jobs.endless, 2), (shard_jobs.endless, 2)], ids=["whole", "sharded"])
def test_ranks_killed_at_random_moments(tmp_path: Path, endless: Any, world: int) -> None:
    """Whoever dies: all stop, nothing applied is uncounted, no noise comes twice, the checkpoint can be read.

    Of a sharded model every rank applies rows of its own, and all write the checkpoint.
    """
    whole = endless is jobs.endless
    rng, lively = random.Random(5), 0
    for kill in range(KILLS):
        before, began = len(lines(tmp_path / "applied-0")), len(lines(tmp_path / "began"))
        group = start(world, endless, str(tmp_path))
        early = FULL and kill % 5 == 4  # before the first step, perhaps; otherwise in the midst of training
        name, wanted = ("began", began + world) if early else ("applied-0", before + 2)
        deadline = time.monotonic() + 90
        while len(lines(tmp_path / name)) < wanted and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(rng.uniform(0.0, 0.5 if early else 0.2))
        victim = rng.randrange(world)
        os.kill(group[victim][0].pid, signal.SIGKILL)
        outcomes = finish(group)
        for rank, outcome in enumerate(outcomes):
            if rank == victim:
                assert outcome is None
            else:
                # fully_shard waits for other ranks by itself, with words of gloo's
                words = ("lost the other ranks",) if whole else ("lost the other ranks", "onnection", "stops with")
                assert isinstance(outcome, Failed) and any(word in outcome.text for word in words), outcome
        applied = [lines(tmp_path / f"applied-{rank}") for rank in range(world)]
        lively += len(applied[0]) > before
        ledger = tmp_path / "run.ledger"
        counted = read(ledger).charges if ledger.exists() and ledger.stat().st_size else 0
        seen: dict[int, str] = {}
        for rank in range(world):
            numbers = [charge for charge, _ in applied[rank]]
            assert len(set(numbers)) == len(numbers) and max(numbers, default=-1) < counted
            for charge, digest in applied[rank]:
                told = seen.setdefault(charge, digest)
                assert told == digest or not whole  # one release for each charge, the same everywhere
        assert len(seen) <= counted <= len(seen) + kill + 1
        noise = lines(tmp_path / "noise")
        assert len({charge for charge, _ in noise}) == len({key for _, key in noise}) == len(noise)
        assert seen.keys() <= {charge for charge, _ in noise}
    assert lively >= KILLS // 2
