"""Adam for noisy gradients: releases are filtered first, and the noise's variance is taken off the second moment."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_BETAS = (0.9, 0.999)
_LEAST = 0.1
"""What stays of the second moment's root where the noise is all of it, in deviations of the noise."""


class NoisyAdam(torch.optim.Optimizer):
    """Adam on releases whose noise is known.

    With ``lowpass`` κ the gradient is the running mean κ·g + (1 − κ)·release, corrected for its start (a first-order
    filter as in Doppler, of what is released). With ``noise`` s the second moment is max(v − s², (s/10)²): the noise
    adds s² to every entry of v, and entries of little signal would all look alike (as in DP-AdamBC). Behind a filter s²
    is what the filter leaves of it.

    Args:
        parameters: What is trained.
        lr: Learning rate.
        noise: Standard deviation of the noise of each released entry; 0 corrects nothing.
        lowpass: κ; 0 filters nothing.

    Formal guarantees:
        None of its own: reads releases and public numbers alone, so that it is post-processing.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float, noise: float = 0.0, lowpass: float = 0.0
    ) -> None:  # fmt: skip
        super().__init__(parameters, {"lr": lr})
        self.noise, self.lowpass, self.steps = noise, lowpass, 0
        self.expected = 0.0  # of the second moment, from the noise alone

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step; releases that are missing leave their parameters alone."""
        self.steps += 1
        k, t, two = self.lowpass, self.steps, _BETAS[1]
        calmed = (1 - k) / (1 + k) * (1 - k ** (2 * t)) / (1 - k**t) ** 2  # the filter's part of the variance at step t
        self.expected = two * self.expected + (1 - two) * self.noise**2 * calmed
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._move(parameters, [p.grad for p in parameters if p.grad is not None], group["lr"])

    def _move(self, parameters: list[nn.Parameter], grads: list[Tensor], lr: float) -> None:
        k, t, (one, two) = self.lowpass, self.steps, _BETAS
        if k:
            filtered = self._kept(parameters, "filtered")
            torch._foreach_lerp_(filtered, grads, 1 - k)
            grads = list(torch._foreach_div(filtered, 1 - k**t))
        mean, square = self._kept(parameters, "mean"), self._kept(parameters, "square")
        torch._foreach_lerp_(mean, grads, 1 - one)
        torch._foreach_mul_(square, two)
        torch._foreach_addcmul_(square, grads, grads, 1 - two)
        size = list(torch._foreach_div(square, 1 - two**t))
        if self.noise:
            variance = self.expected / (1 - two**t)
            torch._foreach_sub_(size, variance)
            torch._foreach_clamp_min_(size, _LEAST**2 * variance)
        torch._foreach_sqrt_(size)
        torch._foreach_add_(size, 1e-8)
        torch._foreach_addcdiv_(parameters, mean, size, -lr / (1 - one**t))

    def _kept(self, parameters: list[nn.Parameter], name: str) -> list[Tensor]:
        for p in parameters:
            if name not in self.state[p]:
                self.state[p][name] = torch.zeros_like(p)
        return [self.state[p][name] for p in parameters]
