"""The example runs under torchrun, and gives what one process gives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

import weightclip as wc
from weightclip.accounting import read

EXAMPLE = Path(__file__).parents[2] / "examples" / "ddp.py"


def run(folder: Path, *launcher: str) -> tuple[str, dict[str, torch.Tensor]]:
    """What the example prints, and the weights of its checkpoint."""
    environment = {**os.environ, "PYTHONPATH": str(Path(wc.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(EXAMPLE), "--epochs", "1", "--seed", "1", "--folder", str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
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
