"""Searches in several processes: the same as in one, whoever is killed. Kills of whole commands: WEIGHTCLIP_FULL=1."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from weightclip.cli import main
from weightclip.errors import WeightclipError
from weightclip.search import FunctionSearch, Place, Shared, SharedBoard, TableSearch, _table, shared_search
from weightclip.tabular import Drawn, Schema, _search, files

pytest.importorskip("optuna", reason="needs the extra 'search'")
FULL = os.environ.get("WEIGHTCLIP_FULL") == "1"
OWN = f"{Path(__file__).with_name('own_function.py')}:train"
OPTIONS = ("--epsilon", "3", "--delta", "1e-5", "--sample-rate", "0.1", "--steps", "5")


@pytest.fixture(autouse=True)
def noise_that_is_enough(monkeypatch):
    """Finding the least takes seconds, and has tests of its own."""
    monkeypatch.setattr(FunctionSearch, "cost", lambda self: 3.0)


def function(mean_runs: float = 3.0, seed: int | None = 5) -> FunctionSearch:
    return FunctionSearch(OWN, 3.0, 1e-5, 0.1, 5, mean_runs, seed=seed)


def test_a_shared_search_of_a_function_finds_what_one_process_finds(tmp_path):
    place = Place.of(None, tmp_path / "model")
    with shared_search(function(), Shared(place)) as board:
        weights, report = function().search(board)
    alone, same = function().search()
    assert report == same and all(torch.equal(weights[k], alone[k]) for k in alone) and not list(tmp_path.iterdir())


def test_a_shared_search_of_a_table_finds_what_one_process_finds(tmp_path, monkeypatch):
    for module in (_search, _table):
        monkeypatch.setattr(module, "run_epsilon", lambda *_: 1.0)  # finding it takes seconds
    rng = np.random.default_rng(0)
    rows = [f"{a:.4f},{b:.4f},{'yes' if a + b > 0 else 'no'}" for a, b in rng.normal(size=(300, 2))]
    (tmp_path / "t.csv").write_text("\n".join(["a,b,y", *rows, ""]))
    work = TableSearch(files.File(tmp_path / "t.csv"), "y", Schema(), False, 9.0, mean_runs=2.0, epochs=1.0, seed=4)
    with shared_search(work, Shared(Place.of(None, tmp_path / "model"))) as board:
        model, report = work.search(board)
    alone, same = work.search()
    assert report == same and model.pipeline() == alone.pipeline()
    assert all(np.array_equal(model.tensors()[k], v) for k, v in alone.tensors().items())


def test_what_goes_wrong_leaves_a_search_to_go_on_with(tmp_path, monkeypatch):
    place = Place.of(None, tmp_path / "model")
    with pytest.raises(ZeroDivisionError), shared_search(function(), Shared(place)) as board:
        drawn = board.drawn
        raise ZeroDivisionError
    with pytest.raises(WeightclipError, match="--resume"):
        Shared(place)
    monkeypatch.setattr(Drawn, "draw", lambda *_: pytest.fail("drawn again"))
    with shared_search(function(), Shared(place, resume=True)) as board:
        assert board.drawn == drawn and function().search(board)[1]["epsilon"] <= 3.0
    with pytest.raises(WeightclipError, match="between 1 and 1024"):
        Shared(place, 0)


def test_two_workers_from_the_shell(tmp_path, capsys):
    out = tmp_path / "model"
    with pytest.raises(SystemExit) as stop:
        main(["tune", OWN, *OPTIONS, "--mean-runs", "3", "--out", str(out), "--workers", "2"])
    shown = capsys.readouterr()
    assert stop.value.code == 0 and [p.name for p in tmp_path.iterdir()] == ["model"]
    assert shown.out.count("\n") == 1 and "secret" not in shown.out + shown.err
    with pytest.raises(SystemExit) as stop:
        main(["verify", str(out)])
    assert stop.value.code == 0 and "files unchanged" in capsys.readouterr().out
    report = json.loads((out / "privacy.json").read_text())
    (out / "privacy.json").write_text(json.dumps({**report, "epsilon": 1.0}))
    for path in (out, out / "privacy.json"):
        with pytest.raises(SystemExit) as stop:
            main(["verify", str(path)])
        assert stop.value.code == 1


@pytest.mark.parametrize(
    ("options", "named"),
    [(("--workers", "0"), "--workers"), (("--resume",), "no search"), (("--target", "y"), "--target"),
     (("--storage", "nonsense://x"), "--storage"), (("--steps", "0"), "--steps"), (("--sample-rate", "2"), "--sample")],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)  # fmt: skip
def test_bad_options_of_a_function_are_named_in_one_line(options, named, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["tune", OWN, *OPTIONS, "--out", str(tmp_path / "m"), *options])
    error = capsys.readouterr().err.strip()
    assert stop.value.code == 1 and error.startswith("error: ") and "\n" not in error and named in error


def command(out: Path, resume: bool) -> int:
    """``weightclip tune`` in a process of its own; its number."""
    pid = os.fork()
    if pid:
        return pid
    try:
        main(["tune", OWN, *OPTIONS, "--mean-runs", "8", "--out", str(out), "--workers", "2", *["--resume"] * resume])
    except SystemExit as stop:
        os._exit(int(stop.code or 0))
    finally:
        os._exit(1)


def told(log: Path) -> list[list[str]]:
    """Settings and process of every attempt at a run."""
    return [line.split() for line in log.read_text().splitlines()] if log.exists() else []


@pytest.mark.skipif(not FULL, reason="minutes: WEIGHTCLIP_FULL=1")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_command_that_is_killed_again_and_again_does_the_runs_that_were_drawn(tmp_path, monkeypatch):
    """Kills of the first process, and of helpers; runs are told apart by the settings they draw."""
    rng, kills, searches, helped = random.Random(1), {"first": 0, "helper": 0}, 0, 0
    monkeypatch.setenv("OWN_PAUSE", "4")
    while sum(kills.values()) < 8 or min(kills.values()) < 2:
        out, log = tmp_path / f"m{searches}", tmp_path / f"log{searches}"
        place, expected, firsts = Place.of(None, out), None, set()
        monkeypatch.setenv("OWN_LOG", str(log))
        while not out.exists():
            before, pid = len(told(log)), command(out, expected is not None)
            firsts.add(str(pid))
            while len(told(log)) == before and os.waitpid(pid, os.WNOHANG) == (0, 0):
                time.sleep(0.05)
            if expected is None:
                board = SharedBoard(place, lambda result: result, lambda stored: stored)
                board.join(FunctionSearch(OWN, 3.0, 1e-5, 0.1, 5, 8.0).settings())
                numbers = range(len(board.drawn.candidates))
                expected = {repr(0.1 + 0.9 * float(board.drawn.candidate(i).uniform())) for i in numbers}
                board.close()
            time.sleep(rng.uniform(0.0, 24.0))
            alive = sorted({int(p) for _, p in told(log)[before:] if Path(f"/proc/{p}").exists()} | {pid})
            victim = alive[-1] if kills["first"] > kills["helper"] else rng.choice(alive)
            if not out.exists():
                os.kill(victim, signal.SIGKILL)
                kills["first" if victim == pid else "helper"] += 1
            with contextlib.suppress(ChildProcessError):
                status = os.waitpid(pid, 0)[1]
                assert status == 0 or victim == pid, os.waitstatus_to_exitcode(status)
        assert {lr for lr, _ in told(log)} == expected and place.file is not None and not place.file.exists()
        helped += sum(pid not in firsts for _, pid in told(log))
        searches += 1
    assert helped >= 3, "helpers did some of the runs"
