"""Peak memory is that of settled steps, alike for modes that record when they are prepared and those that do later."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from weightclip_studies import bench as _bench
from weightclip_studies.bench import _step

GIB = 2**30
CUDA = torch.device("cuda")


class Card:
    """Memory of a device that is not there: what steps allocate, what recordings keep, and all that was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.live = self.pool = self.cached = self.top_live = self.top_reserved = 0
        self.calls: list[str] = []
        for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved",
                     "reset_peak_memory_stats", "empty_cache", "synchronize"):  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, self.told(name))
        monkeypatch.setattr(_step, "prepare", self.prepare)

    def told(self, name: str) -> Callable[..., int]:
        def call(*device: torch.device) -> int:
            self.calls.append(name)
            if name == "reset_peak_memory_stats":
                self.top_live, self.top_reserved = self.live, self.live + self.pool + self.cached
            if name == "empty_cache":
                self.cached = 0
            answers = {
                "memory_allocated": self.live, "memory_reserved": self.live + self.pool + self.cached,
                "max_memory_allocated": self.top_live, "max_memory_reserved": self.top_reserved,
            }  # fmt: skip
            return answers.get(name, 0)

        return call

    def use(self, amount: int) -> None:
        """Allocate for a moment; the allocator keeps it."""
        self.cached = max(self.cached, amount)
        self.top_live = max(self.top_live, self.live + amount)
        self.top_reserved = max(self.top_reserved, self.live + self.pool + self.cached)

    def prepare(self, mode: str, name: str, batch: int, device: torch.device, setting: _bench.Setting):
        """Weights of 1 GiB; a step takes 2 GiB, compiling 20, recording 9; plain training records before its steps."""
        self.live += GIB
        self.use(20 * GIB)
        taken = 0

        def record() -> None:
            self.use(9 * GIB)
            self.pool += 2 * GIB

        if mode == "plain-graph":
            record()

        def step() -> None:
            nonlocal taken
            taken += 1
            self.calls.append("step")
            if mode == "factors-graph" and taken == 3:
                record()
            if not mode.endswith("-graph") or (mode == "factors-graph" and taken < 3):
                self.use(2 * GIB)

        return step


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mode", ["plain", "factors", "plain-graph", "factors-graph"])
def test_every_mode_has_the_peak_of_its_steps(mode: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    card.live, card.pool, card.cached = 5 * GIB, 3 * GIB, 4 * GIB  # of modes that were prepared before
    _, peak = _step._warm(mode, "mlp", 8, CUDA, _bench.Setting(compiled=compiled))
    assert peak == 3.0  # weights and a step
    reset = len(card.calls) - 1 - card.calls[::-1].index("reset_peak_memory_stats")
    assert card.calls[:reset].count("step") >= 12  # all is compiled and recorded before the peak is looked for
    assert "step" in card.calls[reset:] and card.calls[-1].startswith("max_memory_")


def test_draws_are_measured_at_all_their_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    card, setting = Card(monkeypatch), _bench.Setting(draws=True)
    assert _step._warm("factors-graph", "mlp", 8, CUDA, setting)[1] == 3.0
    reset = len(card.calls) - 1 - card.calls[::-1].index("reset_peak_memory_stats")
    assert card.calls[:reset].count("step") >= 60 and card.calls[reset:].count("step") == 8
