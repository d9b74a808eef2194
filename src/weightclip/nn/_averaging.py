"""Averages of the weights over training steps: post-processing of released values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from weightclip._torch import copy_all_, lerp_all_
from weightclip.errors import WeightclipError


class ParameterAverage:
    """Running average of a model's parameters, exponential by default, uniform (Polyak) on request.

    The average starts at the parameters of the first `update`, so initial weights do not linger in it.

    Formal guarantees: reads nothing but the released weights, so it is post-processing and costs no privacy. Averages
    of weights inside a convex set (a norm ball) stay inside it.

    Args:
        model: the model whose parameters are averaged; they are read, and written only inside `apply`.
        decay: weight of the past in each update, in [0, 1).
        polyak: uniform average over all updates instead; ``decay`` is then unused.
        warmup: use ``min(decay, (1 + t) / (10 + t))`` at update t, so that early weights are forgotten faster.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> average = ParameterAverage(model, polyak=True)
        >>> for value in (1.0, 2.0, 6.0):
        ...     _ = nn.init.constant_(model.weight, value)
        ...     average.update()
        >>> with average.apply():
        ...     model.weight.item()
        3.0
        >>> model.weight.item()
        6.0
    """

    def __init__(self, model: nn.Module, decay: float = 0.99, polyak: bool = False, warmup: bool = False) -> None:
        if not 0.0 <= decay < 1.0:
            raise WeightclipError(f"ParameterAverage: decay must lie in [0, 1), got {decay}")
        self.decay = decay
        self.polyak = polyak
        self.warmup = warmup
        self.steps = 0
        self._names = [name for name, _ in model.named_parameters()]
        self._parameters = [p for _, p in model.named_parameters()]
        # At least float32: a bfloat16 average would round small steps away.
        self._average = [
            p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True) for p in self._parameters
        ]
        self._applied = False

    @torch.no_grad()
    def update(self) -> None:
        """Takes the present parameters into the average; call it after every optimiser step."""
        if self._applied:
            raise WeightclipError("ParameterAverage.update: the averaged weights are applied; leave `apply()` first")
        t, self.steps = self.steps, self.steps + 1
        if not self._parameters:
            return
        if t == 0:
            copy_all_(self._average, self._parameters)
            return
        past = t / (t + 1) if self.polyak else self.decay
        if self.warmup and not self.polyak:
            past = min(past, (1 + t) / (10 + t))
        present = [p.detach().to(a.dtype) for p, a in zip(self._parameters, self._average, strict=True)]
        lerp_all_(self._average, present, 1.0 - past)

    @contextmanager
    @torch.no_grad()
    def apply(self) -> Iterator[None]:
        """Puts the averaged weights into the model for the duration of a ``with`` block, then the trained ones back."""
        if self._applied:
            raise WeightclipError("ParameterAverage.apply: the averaged weights are already applied")
        trained = [p.detach().clone() for p in self._parameters]
        self._write(self._average)
        self._applied = True
        try:
            with torch.enable_grad():
                yield
        finally:
            self._write(trained)
            self._applied = False

    def _write(self, values: list[Tensor]) -> None:
        for p, value in zip(self._parameters, values, strict=True):
            p.detach().copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """Number of updates and averaged values by parameter name."""
        return {
            "steps": self.steps,
            "average": {name: a.clone() for name, a in zip(self._names, self._average, strict=True)},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned; names and shapes must be those of the model."""
        average = state["average"]
        if list(average) != self._names:
            raise WeightclipError("ParameterAverage.load_state_dict: parameter names differ from the model's")
        for name, a in zip(self._names, self._average, strict=True):
            if average[name].shape != a.shape:
                raise WeightclipError(f"ParameterAverage.load_state_dict: {name} has another shape than the model's")
            a.copy_(average[name])
        self.steps = int(state["steps"])
