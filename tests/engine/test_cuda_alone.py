"""A CUDA test that once passed only after others had compiled its kernels: here it is the first of its process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.engine.test_cuda import BOUNDS
from tests.engine.test_cuda import test_recorded_steps_and_kernels_change_nothing as chosen

ROOT = Path(__file__).parents[2]
ALONE = "tests/engine/test_cuda.py::test_recorded_steps_and_kernels_change_nothing[weights]"


def run_alone(test: str, timeout: float) -> subprocess.CompletedProcess[str]:
    """One test in a process of its own, without what earlier processes have compiled."""
    settings = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", test]
    return subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=timeout)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_recorded_steps_pass_when_they_run_first_and_alone(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # kernels are compiled here, not found
    done = run_alone(ALONE, 580)
    assert done.returncode == 0 and "1 passed" in done.stdout, (done.stdout + done.stderr)[-4000:]


def test_the_name_of_that_test_is_still_its_own() -> None:
    assert f"{chosen.__name__}[weights]" == ALONE.partition("::")[2] and "weights" in BOUNDS
