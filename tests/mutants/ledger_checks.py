"""Checks of the ledger from outside: files, releases as a user sees them, epsilon. Mutants do not pass them."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.ledger_kit import book_of, charges, disk, killed, started, steps

import weightclip as wc
from weightclip.accounting._accounting import Mechanism, epsilon
from weightclip.accounting._ledger_format import read
from weightclip.errors import UncountedReleases

CHECKS: list[Callable[[], None]] = []


def check(function: Callable[[Path], None]) -> Callable[[], None]:
    """A check gets a folder of its own."""

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            function(Path(folder))

    run.__name__ = function.__name__
    CHECKS.append(run)
    return run


def refused(act: Callable[[], object]) -> None:
    with pytest.raises(wc.WeightclipError):
        act()


@check
def every_release_is_on_the_disk_before_it_is_seen(folder: Path) -> None:
    """Power may fail at the moment somebody sees a gradient: what an fsync has put on the disk must count it."""
    for block in (1, 3):
        path = folder / f"{block}.ledger"
        with disk(path) as image:
            run = started(path, block=block)
            seen = []
            run.optimizer.register_step_pre_hook(lambda *_, i=image, s=seen: s.append(book_of(i["bytes"]).charges))
            steps(run, 5)
        assert all(counted >= i + 1 for i, counted in enumerate(seen))


@check
def a_killed_run_is_counted_whole(folder: Path) -> None:
    """Saved after 3 releases, killed after 7."""
    path = folder / "run.ledger"
    run = started(path)
    steps(run, 3)
    run.engine.save(folder / "saved")
    steps(run, 4)
    killed(run)
    other = started(path)
    other.engine.load(folder / "saved")
    for count in (7, 8):
        truth = epsilon([Mechanism("gaussian", 1.0, 0.25, count)], 1e-5, "rdp")
        assert other.engine.get_epsilon(1e-5) >= truth and other.engine.report(1e-5)["public"]["steps"] == count
        if count == 7:
            steps(other, 1)


@check
def changes_of_the_file_are_seen(folder: Path) -> None:
    path = folder / "run.ledger"
    for sigma in (1.0, 2.0):
        run = started(path, sigma=sigma)
        steps(run, 2)
        killed(run)
    lines = path.read_bytes().splitlines(keepends=True)
    other = folder / "other.ledger"
    run = started(other, sigma=50.0)
    steps(run, 4)
    killed(run)
    louder = other.read_bytes().splitlines(keepends=True)
    changed = [
        b"".join(lines).replace(b'"noise_multiplier":1.0', b'"noise_multiplier":9.0'),
        b"".join(lines[:3] + lines[4:]),
        b"".join(lines[:2] + lines[3:1:-1] + lines[4:]),
        b"".join(lines[:1] + louder[1:]),
    ]
    for data in changed:
        path.write_bytes(data)
        refused(lambda: read(path))
        refused(lambda: wc.PrivacyEngine(ledger=path))


@check
def one_engine_at_a_time(folder: Path) -> None:
    run = started(folder / "run.ledger")
    refused(lambda: wc.PrivacyEngine(ledger=folder / "run.ledger"))
    steps(run, 1)


@check
def a_torn_line_is_counted(folder: Path) -> None:
    """Cut anywhere inside its last line, a file never tells of fewer releases than before."""
    path = folder / "run.ledger"
    run = started(path, block=2)
    steps(run, 6)
    killed(run)
    data = path.read_bytes()
    for cut in (1, 5, 60, 150):
        path.write_bytes(data[:-cut])
        assert charges(path) >= 6
        engine = wc.PrivacyEngine("rdp", ledger=path)
        assert engine.steps >= 6
        engine.ledger.close()
        assert charges(path) >= 6


@check
def neither_noise_nor_draws_come_twice(folder: Path) -> None:
    """One seed, one ledger, weights that do not move: no release equals another."""
    for sigma, batch in ((1.0, 24), (0.0, 6)):
        path, found = folder / f"{sigma}.ledger", []
        for _ in range(2):
            run = started(path, seed=5, rate=0.0, sigma=sigma, batch=batch)
            found += steps(run, 3)
            if batch < 24:
                run.loader.load_state_dict({"draws": 0})
                found += steps(run, 2)
            killed(run)
        assert all(not torch.equal(found[i], found[j]) for i in range(len(found)) for j in range(i))


@check
def a_budget_counts_the_ledger(folder: Path) -> None:
    path, target = folder / "run.ledger", 2.0
    for sigma in (1.5, None, None):
        more = {} if sigma else {"target_epsilon": target, "target_delta": 1e-4, "epochs": 2.0}
        run = started(path, sigma=sigma, **more)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if sigma:
                steps(run, 2)
            else:
                run.train(1)  # four draws, then killed; the second run finds two left
        killed(run)
    assert read(path).epsilon(1e-4, "rdp") <= target and charges(path) <= 8


@check
def an_older_ledger_does_not_go_with_the_checkpoint(folder: Path) -> None:
    path = folder / "run.ledger"
    run = started(path)
    steps(run, 1)
    old = path.read_bytes()
    steps(run, 3)
    run.engine.save(folder / "saved")
    killed(run)
    path.write_bytes(old)
    other = started(path)
    refused(lambda: other.engine.load(folder / "saved"))


@check
def a_ledger_that_is_gone_stops_the_run(folder: Path) -> None:
    path = folder / "run.ledger"
    run = started(path)
    steps(run, 1)
    path.unlink()
    before = run.weights()
    refused(lambda: steps(run, 1))
    assert all(torch.equal(a, b) for a, b in zip(before.values(), run.weights().values(), strict=True))


@check
def without_a_ledger_a_resume_says_so(folder: Path) -> None:
    run = started(None)
    run.engine.save(folder / "saved")
    other = started(None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        other.engine.load(folder / "saved")
    assert any(w.category is UncountedReleases for w in caught)
    assert "only a ledger" in " ".join(other.engine.report()["not_covered"])
