"""The example runs under torchrun, and gives what one process gives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import weightclip as wc
from weightclip.accounting import read

FULL = os.environ.get("WEIGHTCLIP_FULL") == "1"
EXAMPLE = Path(__file__).parents[2] / "examples" / "ddp.py"


def ended(done: subprocess.CompletedProcess[str]) -> bool:
    """Whether a script came to its end.

    Rarely (1 of about 60 runs) a thread of gloo still holds a tensor while Python shuts down, and torch aborts the
    process (pytorch issue 90549, pull request 179291). Everything is printed and saved then, which the tests look at.
    """
    return done.returncode == 0 or "terminate called without an active exception" in done.stderr


def run(folder: Path, *launcher: str) -> tuple[str, dict[str, torch.Tensor]]:
    """What the example prints, and the weights of its checkpoint."""
    environment = {**os.environ, "PYTHONPATH": str(Path(wc.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(EXAMPLE), "--epochs", "1", "--seed", "1", "--folder", str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ended(done), done.stderr
    (weights,) = (folder / "checkpoint").glob("weights-*.safetensors")
    return done.stdout, {k: v for k, v in load_file(str(weights)).items() if k.startswith("model.")}


def test_ddp_under_torchrun(tmp_path: Path) -> None:
    out, weights = run(tmp_path / "two", "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    assert "2 processes, 5 steps" in out and out.count("epsilon") == 1
    assert 0 < float(out.split("epsilon ")[1].split()[0]) <= 3.0
    assert read(tmp_path / "two" / "run.ledger").charges == 5
    alone, same = run(tmp_path / "one")
    assert alone == out.replace("2 processes", "1 processes")
    assert weights.keys() == same.keys() and all(torch.equal(weights[k], same[k]) for k in same)


def launched(world: int, script: Path, *args: str) -> str:
    """What a script prints under torchrun."""
    environment = {**os.environ, "PYTHONPATH": str(Path(wc.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(world), "--standalone"]
    command = [sys.executable, *launcher, str(script), *args]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ended(done), done.stderr
    return done.stdout


@pytest.mark.parametrize("world", [1, 2] if FULL else [2])
def test_fsdp2_under_torchrun(tmp_path: Path, world: int) -> None:
    out = launched(world, EXAMPLE.with_name("fsdp2.py"), "--epochs", "1", "--seed", "1", "--folder", str(tmp_path))
    assert f"{world} processes, 5 steps: test accuracy 40.05%" in out and out.count("epsilon") == 1
    assert 0 < float(out.split("epsilon ")[1].split()[0]) <= 3.0
    assert read(tmp_path / "run.ledger").charges == 5
    (weights,) = (tmp_path / "checkpoint").glob("weights-*")
    assert len(list(weights.glob("__*"))) == world


@pytest.mark.skipif(not FULL, reason="starts four processes that import another library: WEIGHTCLIP_FULL=1")
@pytest.mark.parametrize("library", ["accelerate", "lightning"])
def test_loops_of_other_libraries_on_two_processes_are_those_on_one(library: str) -> None:
    pytest.importorskip(library)
    one, two = (launched(world, Path(__file__).with_name("scripts.py"), library) for world in (1, 2))
    assert one == two and one.splitlines()[-1].startswith("8 [")
