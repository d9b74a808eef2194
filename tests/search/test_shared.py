"""Searches in several processes: the same as in one, whoever is killed. Kills of whole commands: WEIGHTCLIP_FULL=1."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
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
def test_bad_options_of_a_function_are_named_in_one_line(options, named, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(FunctionSearch, "cost", lambda self: 1.0)
    with pytest.raises(SystemExit) as stop:
        main(["tune", OWN, *OPTIONS, "--out", str(tmp_path / "m"), *options])
    error = capsys.readouterr().err.strip()
    assert stop.value.code == 1 and error.startswith("error: ") and "\n" not in error and named in error


@pytest.mark.skipif(not FULL, reason="minutes: WEIGHTCLIP_FULL=1")
def test_a_command_that_is_killed_again_and_again_does_the_runs_that_were_drawn(tmp_path):
    """Kills of the first process, and of helpers; runs are told apart by the settings they draw."""
    rng, kills, pids = random.Random(1), 0, set()
    for turn in range(6):
        out, log = tmp_path / f"m{turn}", tmp_path / f"log{turn}"
        place = Place.of(None, out)
        command = [sys.executable, "-c", "from weightclip.cli import main; main()", "tune", OWN, *OPTIONS,
                   "--mean-runs", "6", "--out", str(out), "--workers", "2"]  # fmt: skip
        environment = {**os.environ, "OWN_LOG": str(log), "OWN_PAUSE": "0.5", "PYTHONPATH": os.pathsep.join(sys.path)}
        expected: set[str] | None = None
        while not out.exists():
            more = ["--resume"] if expected is not None else []
            process = subprocess.Popen([*command, *more], env=environment, stderr=subprocess.PIPE)
            if kills < 4 * (turn + 1):
                time.sleep(rng.uniform(4.0, 14.0))
                helpers = {int(line.split()[1]) for line in log.read_text().splitlines()} if log.exists() else set()
                victim = rng.choice(sorted(helpers | {process.pid}))
                if process.poll() is None and Path(f"/proc/{victim}").exists():
                    os.kill(victim, signal.SIGKILL)
                    kills += 1
            error = process.communicate()[1].decode()
            assert process.returncode in (0, -signal.SIGKILL), error
            if expected is None and place.file is not None and place.file.exists():
                board = SharedBoard(place, lambda result: result, lambda stored: stored)
                try:
                    board.join(FunctionSearch(OWN, 3.0, 1e-5, 0.1, 5, 6.0).settings())
                except WeightclipError:  # killed before anything was drawn
                    continue
                candidates = range(len(board.drawn.candidates))
                expected = {repr(0.1 + 0.9 * float(board.drawn.candidate(i).uniform())) for i in candidates}
                board.close()
        done = {line.split()[0] for line in log.read_text().splitlines()}
        pids |= {line.split()[1] for line in log.read_text().splitlines()}
        assert expected is None or done == expected
        assert place.file is not None and not place.file.exists()
    assert kills >= 6 and len(pids) > 12  # helpers did some of them
