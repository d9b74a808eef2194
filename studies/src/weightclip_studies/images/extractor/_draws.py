"""Random numbers of a named purpose: drawn where their generator lives, used where the pictures are made."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


class Draws:
    """Uniform and normal numbers of one stream.

    A stream on the CPU gives the same numbers whatever device works with them; one on the GPU is fast, and gives the
    same numbers on GPUs only.

    Args:
        purpose: What the numbers are for: two purposes never share a stream.
        device: Where they are used.
        source: Where they are drawn.
    """

    def __init__(
        self, *purpose: object, device: torch.device | str = "cpu", source: torch.device | str = "cpu"
    ) -> None:
        told = hashlib.sha256("/".join(map(str, purpose)).encode()).digest()
        self.device = torch.device(device)
        self.generator = torch.Generator(device=source).manual_seed(int.from_bytes(told[:8], "big") >> 1)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Numbers between ``low`` and ``high``."""
        x = torch.rand(shape, generator=self.generator, device=self.generator.device)
        return (x * (high - low) + low).to(self.device)

    def normal(self, *shape: int) -> Tensor:
        """Numbers of mean 0 and variance 1."""
        return torch.randn(shape, generator=self.generator, device=self.generator.device).to(self.device)

    def whole(self, below: int, *shape: int) -> Tensor:
        """Whole numbers from 0 to ``below - 1``."""
        return torch.randint(0, below, shape, generator=self.generator, device=self.generator.device).to(self.device)
