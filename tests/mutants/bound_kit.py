"""Tools of the bound mutants: a case is sound as the code is, and broken under the patch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests._climber import largest_ratio
from tests._networks import Case
from torch import nn

import weightclip as wc
from weightclip.losses import Huber

LIMIT = 1 + 1e-5


def set_weights(layer: nn.Module, *values: Any) -> nn.Module:
    """A layer with given weight and bias."""
    with torch.no_grad():
        for q, value in zip(layer.parameters(), values, strict=False):
            q.copy_(torch.tensor(value, dtype=torch.float32).reshape(q.shape))
    return layer


def violations(case: Any, trials: int = 12, steps: int = 40) -> int:
    """1 if some record's gradient exceeds its certified sensitivity, else 0."""
    return int(largest_ratio(case, seed=0, trials=trials, steps=steps) > LIMIT)


def caught(case: Any, mutate: Callable[[], None]) -> None:
    """Sound as it is, unsound under the mutant."""
    assert violations(case) == 0
    mutate()
    assert violations(case) > 0


def huber(model: nn.Module, shape: tuple[int, ...], classes: int, starts: Any = (), **bounds: Any) -> Any:
    """A case with a Huber loss, whose gradient is easily at its bound in any sign pattern."""
    starts = [torch.as_tensor(s, dtype=torch.float32) for s in starts]
    return Case(model, shape, Huber(), wc.Bounds(**{"input_radius": 1.0, **bounds}), classes=classes, starts=starts)
