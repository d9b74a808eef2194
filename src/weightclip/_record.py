"""Device work that never changes, recorded once as a CUDA graph: one launch a step instead of hundreds."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch

_WARM = 2  # plain runs before recording, so that libraries have made their plans and workspaces
_MOST = 8  # graphs kept


class Recorder:
    """Runs a function of device tensors, from its third call on by replaying a CUDA graph; elsewhere just runs it.

    Formal guarantees:
        A replay launches the recorded kernels in their order on the recorded addresses. It computes what the function
        would, provided that the key changes with every address and every Python value the function reads, that
        tensors it reads live as long as the recorder, and that it draws no random numbers. Results are overwritten by
        the next replay.
    """

    def __init__(self, device: torch.device) -> None:
        self.on = device.type == "cuda"
        self._runs: dict[Hashable, int] = {}
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}

    def __call__(self, key: Hashable, work: Callable[[], Any]) -> Any:
        """The result of ``work()``."""
        if not self.on or torch.cuda.is_current_stream_capturing():
            return work()
        if key not in self._graphs:
            runs = self._runs.get(key, 0)
            if runs < _WARM:
                self._runs = {**self._runs, key: runs + 1} if len(self._runs) < 64 else {key: runs + 1}
                return work()
            if len(self._graphs) >= _MOST:
                self._graphs.clear()
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    result = work()
            except RuntimeError as error:
                self.on = False  # recording runs nothing, so that nothing is done twice
                warnings.warn(f"CUDA graphs are off, steps are slower: {str(error).splitlines()[0]}", stacklevel=2)
                torch.cuda.synchronize()
                return work()
            self._graphs[key] = graph, result
        graph, result = self._graphs[key]
        graph.replay()
        return result
