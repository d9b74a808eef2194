"""Work that never changes goes to the device once: constants are copied once, launches recorded as a CUDA graph."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor

from weightclip._torch import DispatchMode, storage_address, tree_leaves

_WARM = 2  # plain runs before recording, so that libraries have made their plans and workspaces
_MOST = 8  # graphs kept


@functools.cache  # recorded graphs read them: none may be dropped
def constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Constants of a run, copied to the device once: every copy from the host would wait for the device."""
    return torch.tensor(values, dtype=torch.float64, device=device)


class Recorder:
    """Runs a function of device tensors, from its third call on by replaying a CUDA graph; elsewhere just runs it.

    Formal guarantees:
        A replay launches the recorded kernels in their order on the recorded addresses. It computes what the function
        would, provided that the key changes with every address and every Python value the function reads, and that it
        draws no random numbers. Memory the function read while it was recorded is kept as long as the graph, whatever
        becomes of the tensors. Results are overwritten by the next replay.
    """

    def __init__(self, device: torch.device) -> None:
        self.on, self.device = device.type == "cuda", device
        self.aside: torch.cuda.Stream | None = None
        self._runs: dict[Hashable, int] = {}
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any, list[Any]]] = {}

    def __call__(self, key: Hashable, work: Callable[[], Any]) -> Any:
        """The result of ``work()``."""
        if not self.on:
            if self.aside is None:
                return work()
            with torch.cuda.stream(self.aside):  # what is recorded next on that branch reads the result
                return work()
        # a graph records one stream, of one device: work on another would run once, and its replays be empty
        with torch.cuda.device(self.device):
            return self._run(key, work)

    def _run(self, key: Hashable, work: Callable[[], Any]) -> Any:
        if torch.cuda.is_current_stream_capturing():  # a larger graph is being recorded, maybe with a branch for this
            with torch.cuda.stream(self.aside):
                return work()
        if key not in self._graphs:
            runs = self._runs.get(key, 0)
            if runs < _WARM:
                self._runs = {**self._runs, key: runs + 1} if len(self._runs) < 64 else {key: runs + 1}
                return work()
            if len(self._graphs) >= _MOST:
                self._graphs.clear()
            graph, reads, before = torch.cuda.CUDAGraph(), Reads(), torch.cuda.current_stream()
            aside = side_stream(self.device, "parts")
            try:
                with torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"), reads:
                    result = work()
            except RuntimeError as error:
                self.on = False  # recording runs nothing, so that nothing is done twice
                torch.cuda.set_stream(before)  # a recording that fails does not go back by itself
                warnings.warn(f"CUDA graphs are off, steps are slower: {str(error).splitlines()[0]}", stacklevel=3)
                torch.cuda.synchronize()
                return work()
            self._graphs[key] = graph, result, list(reads.kept.values())
        graph, result, _ = self._graphs[key]
        graph.replay()
        return result


@functools.cache
def wake_backward_thread(device: torch.device) -> None:
    """A small backward pass on a GPU. torch runs backward passes in a thread of the device's own, which has a context
    of CUDA's after its first kernel only: if a library (cuBLAS) comes first there, torch warns."""
    if device.type == "cuda":
        leaf = torch.zeros((), device=device, requires_grad=True)
        torch.autograd.grad(leaf * 2.0, leaf)


@functools.cache
def side_stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """Where to record. torch's own choice is one stream for all, of whichever device recorded first: on it, work on
    another device would run instead of being recorded."""
    return torch.cuda.Stream(device)


class Reads(DispatchMode):
    """Collects the memory that operators read but did not make."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, Any] = {}
        self._made: set[int] = set()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Looks away: for what torch compiled without anybody looking, and would compile anew otherwise.

        What compiled code reads belongs to the model, or to that code, which lives as long as the recording needs it.
        """
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for storage in _storages((args, kwargs)):
            if (address := storage_address(storage)) not in self._made:
                self.kept[address] = storage
        result = func(*args, **(kwargs or {}))
        self._made |= {storage_address(s) for s in _storages(result)} - self.kept.keys()
        return result


def _storages(values: Any) -> list[Any]:
    return [value.untyped_storage() for value in tree_leaves(values) if isinstance(value, Tensor)]
