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
            for p in group["params"]:
                if p.grad is not None:
                    self._move(p, p.grad, group["lr"])

    def _move(self, p: nn.Parameter, gradient: Tensor, lr: float) -> None:
        k, t, (one, two), state = self.lowpass, self.steps, _BETAS, self.state[p]
        if not state:
            state.update({name: torch.zeros_like(p) for name in ("filtered", "mean", "square")})
        if k:
            gradient = state["filtered"].lerp_(gradient, 1 - k) / (1 - k**t)
        state["mean"].lerp_(gradient, 1 - one)
        state["square"].mul_(two).addcmul_(gradient, gradient, value=1 - two)
        size = state["square"] / (1 - two**t)
        if self.noise:
            variance = self.expected / (1 - two**t)
            size = (size - variance).clamp(min=_LEAST**2 * variance)
        p.addcdiv_(state["mean"], size.sqrt_().add_(1e-8), value=-lr / (1 - one**t))
