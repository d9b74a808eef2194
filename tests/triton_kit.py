"""Triton kernels without a GPU: its interpreter, in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # read by Triton when it is first imported


def kernel_device() -> torch.device:
    """Where kernels can run in this process; skips the test where they cannot."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if not INTERPRETED:
        pytest.skip("runs in a process of its own, see test_in_the_interpreter")
    return torch.device("cpu")


def run_interpreted(file: str) -> None:
    """Run the tests of a file in Triton's interpreter."""
    if torch.cuda.is_available() or INTERPRETED:
        pytest.skip("runs as it is")
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed: it comes with CUDA builds of torch")
    triton, numpy = (tuple(int(n) for n in version(name).split(".")[:2]) for name in ("triton", "numpy"))
    if triton <= (3, 6) and numpy >= (2, 4):  # seen with 3.6 (torch 2.10): int() of an array of one element
        pytest.skip("the interpreter of this Triton does not work with this NumPy")
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file], env=env,
                         capture_output=True, text=True)  # fmt: skip
    assert run.returncode == 0, run.stdout[-2000:]
