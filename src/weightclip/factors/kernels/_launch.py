"""Launches of Triton's kernels, in a fraction of the host's time once such arguments have been seen."""

from __future__ import annotations

import functools
import importlib
import threading
from typing import Any

import torch
from torch import Tensor


def launch(kernel: Any, grid: tuple[int, int, int], *args: Any, **options: Any) -> None:
    """``kernel[grid](*args, **options)``, in a fraction of the host's time once such arguments have been seen.

    Triton looks at every argument to find the compiled variant: at types, alignments, and whether numbers are one or
    multiples of 16. The same numbers and alignments find the same one. All arguments are given by position, tensors
    first.
    """
    device = args[0].get_device()
    if device >= 0 and device != torch.cuda.current_device():  # kernels start on the current one
        with torch.cuda.device(device):
            return launch(kernel, grid, *args, **options)
    tensors = 1
    while isinstance(args[tensors], Tensor):  # they come first
        tensors += 1
    key = (id(kernel), device, args[tensors:], *[(a.dtype, a.data_ptr() % 16) for a in args[:tensors]])
    if device >= 0 and device not in _ready.devices:
        _make_ready(device)
    found = _compiled.get(key)
    if found is not None:
        found[grid](*args)
        return None
    found = kernel[grid](*args, **options)  # None in the interpreter
    if found is not None and _takes_all_arguments():
        if len(_compiled) >= 4096:  # batches of many sizes
            _compiled.clear()
        _compiled[key] = found
    return None


_compiled: dict[Any, Any] = {}


class _Ready(threading.local):
    """Devices whose context this thread has."""

    def __init__(self) -> None:
        self.devices: set[int] = set()


_ready = _Ready()


def _make_ready(device: int) -> None:
    """Triton launches in the thread's present context, which a backward thread has after its first call of CUDA's
    runtime only: memory comes from torch's cache, so that our kernel may be that call."""
    if not torch.cuda.is_current_stream_capturing():
        torch.cuda.mem_get_info(device)
        _ready.devices.add(device)


@functools.cache
def _takes_all_arguments() -> bool:
    """Whether compiled kernels are launched with the arguments of the JIT function, as Triton has done since 3.4."""
    version = importlib.import_module("triton").__version__
    return (3, 4) <= tuple(int(part) for part in version.split(".")[:2]) < (4, 0)
