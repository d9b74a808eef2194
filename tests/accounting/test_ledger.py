"""An engine with a ledger: counts before it releases, goes on from what was counted, shares the file with nobody."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
from pathlib import Path

import pytest
import torch
from tests.ledger_kit import book_of, charges, disk, killed, started, steps

import weightclip as wc
from weightclip.accounting import _ledger
from weightclip.accounting._accounting import Mechanism, epsilon
from weightclip.accounting._ledger import Ledger
from weightclip.accounting._ledger_format import read
from weightclip.errors import UncountedReleases

DELTA = 1e-5


def cost(count: int, sigma: float = 1.0) -> float:
    return epsilon([Mechanism("gaussian", sigma, 0.25, count)], DELTA, "rdp")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.ledger"


@pytest.mark.parametrize("block", [1, 3])
def test_every_release_is_on_the_disk_before_it_can_be_seen(path: Path, block: int) -> None:
    with disk(path) as image:
        run = started(path, block=block)
        seen = []

        def look(*_) -> None:  # after the engine's own hook: the noisy gradient is there, the weights are the old ones
            assert run.model[0].weight.grad is not None
            seen.append(book_of(image["bytes"]).charges)

        run.optimizer.register_step_pre_hook(look)
        steps(run, 7)
    assert seen == [-(-(i + 1) // block) * block for i in range(7)]
    assert run.engine.steps == 7 and run.engine.get_epsilon(DELTA) == cost(7)


def test_a_fused_step_is_charged_too(path: Path) -> None:
    run = started(path)
    step = run.engine.fused_step()
    for x, y in run.loader:
        step(x, y)
    assert charges(path) == run.engine.steps == 4


def test_a_new_engine_goes_on_from_what_was_counted(path: Path) -> None:
    run = started(path)
    steps(run, 3)
    assert run.engine.report(DELTA)["ledger"] == {"id": read(path).id, "charges": 3, "head": read(path).head}
    killed(run)
    other = started(path)
    assert other.engine.steps == 3 and other.engine.get_epsilon(DELTA) == cost(3)
    steps(other, 2)
    assert other.engine.steps == 5 and other.engine.get_epsilon(DELTA) == cost(5) == read(path).epsilon(DELTA, "rdp")
    assert "deleting the ledger" in " ".join(other.engine.report(DELTA)["not_covered"])


def test_a_killed_block_is_counted_whole_and_a_budget_is_not_overrun_by_one(path: Path) -> None:
    run = started(path, block=10)
    steps(run, 4)
    assert run.engine.steps == 4 and run.engine.get_epsilon(DELTA) == cost(4)  # it knows what it released
    killed(run)
    assert charges(path) == 10
    again = started(path, block=10)
    assert again.engine.steps == 10
    numbers = steps(again, 1)
    assert again.engine.steps == 11 and len(numbers) == 1
    killed(again)
    budget = started(path.with_name("b"), block=10, sigma=None, target_epsilon=2.0, target_delta=1e-4, epochs=3)
    with pytest.warns(UserWarning, match="budget"):
        budget.train(4)
    assert charges(path.with_name("b")) == budget.engine.steps == 12


def test_the_run_of_the_issue(path: Path, tmp_path: Path) -> None:
    """Saved after 40 steps, killed after 60, resumed by a new engine: 60 are printed."""
    run = started(path)
    steps(run, 40)
    run.engine.save(tmp_path / "saved")
    steps(run, 20)
    killed(run)
    other = started(path)
    other.engine.load(tmp_path / "saved")
    assert other.engine.steps == 60 and other.engine.get_epsilon(DELTA) == cost(60)
    steps(other, 1)
    assert other.engine.get_epsilon(DELTA) == cost(61)
    for loader_state in ({"draws": 40}, {"draws": 0}):
        other.loader.load_state_dict(loader_state)
        assert other.loader.draws >= 61


def test_no_noise_and_no_draw_comes_twice(path: Path) -> None:
    """The same seed on the same ledger, weights that do not move: every release differs from every other."""
    found = []
    for _ in range(3):
        run = started(path, seed=5, rate=0.0, batch=24)
        found += steps(run, 2)
        killed(run)
    draws = []
    for _ in range(3):
        run = started(path, seed=5, rate=0.0, sigma=0.0)
        draws += steps(run, 3)
        run.loader.load_state_dict({"draws": 0})
        draws += steps(run, 2)
        killed(run)
    for group in (found, draws):
        assert all(not torch.equal(group[i], group[j]) for i in range(len(group)) for j in range(i))


def test_budgets_count_what_the_ledger_holds(path: Path) -> None:
    settings = {"sigma": None, "target_epsilon": 2.0, "target_delta": 1e-4, "epochs": 2.0}
    run = started(path, **settings)
    sigma = run.engine.noise_multiplier
    steps(run, 5)
    killed(run)
    again = started(path, **settings)
    assert again.engine.noise_multiplier == sigma and again.engine.steps_left() == 3
    with pytest.warns(UserWarning, match="budget"):
        again.train(3)
    assert again.engine.steps == 8 and again.engine.get_epsilon(1e-4) <= 2.0
    killed(again)
    over = started(path, **settings)
    with pytest.warns(UserWarning, match="budget"):
        assert list(over.loader) == []


def test_a_budget_over_other_mechanisms_is_kept(path: Path) -> None:
    first = started(path, sigma=2.0)
    steps(first, 3)
    spent = first.engine.get_epsilon(1e-4)
    killed(first)
    for accountant in ("rdp", "pld"):
        run = started(
            path, sigma=None, target_epsilon=spent + 1.0, target_delta=1e-4, epochs=2.0, accountant=accountant
        )
        assert run.engine.steps_left() == 5
        killed(run)
    with pytest.warns(UserWarning, match="budget"):
        (run := started(path, sigma=None, target_epsilon=spent + 1.0, target_delta=1e-4, epochs=2.0)).train(3)
    assert run.engine.steps == 8 and spent < run.engine.get_epsilon(1e-4) <= spent + 1.0
    killed(run)
    with pytest.raises(wc.WeightclipError, match="raise it"):
        started(path, sigma=None, target_epsilon=spent / 2, target_delta=1e-4, epochs=20.0)
    gc.collect()
    with pytest.raises(wc.WeightclipError, match="raise it"):
        started(path, sigma=None, target_epsilon=spent / 2, target_delta=1e-4, epochs=20.0, mechanism=wc.KNorm(1))


def test_settings_may_change_with_the_checkpoint(path: Path, tmp_path: Path) -> None:
    run = started(path)
    steps(run, 2)
    run.engine.save(tmp_path / "saved")
    killed(run)
    other = started(path, sigma=2.0)
    other.engine.load(tmp_path / "saved")
    steps(other, 1)
    assert [(m.sigma, m.steps) for m in other.engine.mechanisms()] == [(1.0, 2), (2.0, 1)]
    report = other.engine.report(DELTA)
    assert [m["steps"] for m in report["mechanisms"]] == [2, 1] and report["public"]["steps"] == 3


def test_exact_resume_only_where_nothing_was_charged_since(path: Path, tmp_path: Path) -> None:
    whole = started(None, seed=3)
    steps(whole, 4)
    run = started(path, seed=3)
    steps(run, 3)
    run.engine.save(tmp_path / "saved")
    killed(run)
    other = started(path, seed=3)
    other.engine.load(tmp_path / "saved", exact=True)
    steps(other, 1)
    assert all(torch.equal(a, b) for a, b in zip(whole.weights().values(), other.weights().values(), strict=True))
    killed(other)
    late = started(path, seed=3)
    with pytest.raises(wc.ContractError, match="past the checkpoint"):
        late.engine.load(tmp_path / "saved", exact=True)


def test_checkpoints_and_ledgers_belong_together(path: Path, tmp_path: Path) -> None:
    run = started(path)
    steps(run, 2)
    old = path.read_bytes()
    steps(run, 2)
    run.engine.save(tmp_path / "saved")
    killed(run)
    with pytest.raises(wc.ContractError, match="ledger=path"):
        started(None).engine.load(tmp_path / "saved")
    with pytest.raises(wc.ContractError, match="not in the ledger"):
        started(tmp_path / "other").engine.load(tmp_path / "saved")
    path.write_bytes(old)  # an older copy, by itself in order
    short = started(path)
    with pytest.raises(wc.ContractError, match="lacks some"):
        short.engine.load(tmp_path / "saved")
    steps(short, 5)  # longer than the checkpoint's, but not its continuation
    with pytest.raises(wc.ContractError, match="lacks some"):
        short.engine.load(tmp_path / "saved")
    plain = started(None)
    steps(plain, 1)
    plain.engine.save(tmp_path / "plain")
    with pytest.raises(wc.ContractError, match="not in the ledger"):
        short.engine.load(tmp_path / "plain")


def test_without_a_ledger_resuming_says_what_it_cannot_know(tmp_path: Path) -> None:
    run = started(None)
    steps(run, 1)
    run.engine.save(tmp_path / "saved")
    assert run.engine.report()["ledger"] is None and "ledger" not in " ".join(run.engine.report()["not_covered"])
    other = started(None)
    with pytest.warns(UncountedReleases, match="without a ledger"):
        other.engine.load(tmp_path / "saved")
    assert "only a ledger" in " ".join(other.engine.report()["not_covered"])


def test_two_engines_never_share_a_ledger(path: Path) -> None:
    run = started(path)
    with pytest.raises(wc.ContractError, match=r"another engine of this process: call its detach\(\)"):
        wc.PrivacyEngine(ledger=path)
    run.engine.detach()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        held = Ledger(path)
        os.write(writer, b"x")
        signal.pause()
        held.close()
        os._exit(0)
    try:
        assert os.read(reader, 1) == b"x"
        with pytest.raises(wc.ContractError, match="in use by another process"):
            wc.PrivacyEngine(ledger=path)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reader)
        os.close(writer)
    assert wc.PrivacyEngine(ledger=path).steps == 0  # the system let go of it


def test_a_forked_process_neither_charges_nor_holds_the_lock(path: Path) -> None:
    ledger = Ledger(path)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:  # as a loader's worker, which outlives its parent for a while
        try:
            ledger.charge()
        except wc.ContractError:
            os.write(writer, b"r")
        signal.pause()
        os._exit(0)
    try:
        assert os.read(reader, 1) == b"r"
        with pytest.raises(wc.ContractError, match="in use"):
            Ledger(path)  # the parent's lock is still there
        os.close(ledger._fd)  # all that the system does for a parent that is killed
        ledger._fd = -1
        Ledger(path).close()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("harm", ["removed", "replaced", "longer", "shorter"])
def test_a_ledger_that_is_touched_during_a_run_stops_it(path: Path, harm: str) -> None:
    run = started(path)
    steps(run, 2)
    if harm == "removed":
        path.unlink()
    elif harm == "replaced":
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(data)
    else:
        path.write_bytes(path.read_bytes() + b"x" if harm == "longer" else path.read_bytes()[:-9])
    before = run.weights()
    for _ in range(2):
        with pytest.raises(wc.ContractError, match="nothing more is released"):
            steps(run, 1)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), run.weights().values(), strict=True))
    assert run.engine.steps == 2


@pytest.mark.parametrize("where", ["pwrite", "fsync"])
def test_what_cannot_be_written_is_not_released(path: Path, monkeypatch, where: str) -> None:
    run = started(path)
    steps(run, 1)
    before = run.weights()
    with monkeypatch.context() as patch:

        def full(*_):
            raise OSError(28, "No space left on device")

        patch.setattr(os, where, full)
        with pytest.raises(wc.WeightclipError, match="No space left on device.*nothing was released"):
            steps(run, 1)
    with pytest.raises(wc.ContractError, match="start again"):
        steps(run, 1)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), run.weights().values(), strict=True))
    killed(run)
    assert started(path).engine.steps in (1, 2)


@pytest.mark.parametrize("where", ["before", "half", "written", "synced"])
def test_interrupted_and_continued_in_the_same_process(path: Path, monkeypatch, where: str) -> None:
    run = started(path, block=2)
    steps(run, 2)
    write, sync = _ledger._write, _ledger._sync

    def stop_write(fd, data, at):
        if where in ("written", "half"):
            write(fd, data[: 50 if where == "half" else None], at)
        if where != "synced":
            raise KeyboardInterrupt
        write(fd, data, at)

    def stop_sync(fd):
        sync(fd)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_ledger, "_write", stop_write)
        patch.setattr(_ledger, "_sync", stop_sync)
        with pytest.raises(KeyboardInterrupt):
            steps(run, 1)
    steps(run, 3)
    assert run.engine.steps == (5 if where == "before" else 7)  # the interrupted block is lost
    assert charges(path) == (6 if where == "before" else 8) and read(path).torn == 0


def test_bad_settings_are_refused_in_one_line(path: Path) -> None:
    for block in (0, -1, 1.5, True, "2"):
        with pytest.raises(wc.WeightclipError, match="ledger_block"):
            wc.PrivacyEngine(ledger=path, ledger_block=block)  # type: ignore[arg-type]
    assert not path.exists()
    run = started(path)
    run.engine.detach()
    with pytest.raises(wc.ContractError, match="ADD_OR_REMOVE_ONE"):
        started(path, adjacency=wc.Adjacency.REPLACE_ONE, accountant="pld")


def test_copies_charge_the_same_ledger_and_pickles_are_refused(path: Path) -> None:
    run = started(path)
    assert copy.deepcopy(run.engine.ledger) is run.engine.ledger
    with pytest.raises(wc.ContractError, match="pickled"):
        pickle.dumps(run.engine.ledger)
    unused = wc.PrivacyEngine(ledger=path.with_name("new"))
    with pytest.raises(wc.ContractError, match="no private model"):
        unused.detach()  # which frees the ledger all the same
    fresh = Ledger(path.with_name("new"))
    with pytest.raises(wc.ContractError, match="make_private"):
        fresh.charge()
    assert (fresh.charges, fresh.mechanisms(), fresh.state()["id"]) == (0, [], None)
