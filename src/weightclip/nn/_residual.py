"""Residual connections: the sum, and the convex combination that keeps the gain at one."""

from __future__ import annotations

from torch import Tensor, nn

from weightclip.errors import WeightclipError


class Residual(nn.Module):
    """``shortcut(x) + body(x)``; the shortcut is the identity when it is None.

    Formal guarantees: in every norm, gain at most ``gain(shortcut) + gain(body)``; output bounds add.

    Example:
        >>> import torch
        >>> Residual(nn.ReLU())(torch.tensor([[-1.0, 2.0]]))
        tensor([[-1.,  4.]])
    """

    def __init__(self, body: nn.Module, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        return (x if self.shortcut is None else self.shortcut(x)) + self.body(x)


class ConvexResidual(nn.Module):
    """``(1 - weight) * shortcut(x) + weight * body(x)`` with a fixed, public ``weight`` in [0, 1].

    Formal guarantees: in every norm, gain at most ``(1 - weight) * gain(shortcut) + weight * gain(body)``, so two
    branches of gain 1 give gain 1 at any depth; output bounds combine the same way.

    Example:
        >>> import torch
        >>> ConvexResidual(nn.ReLU(), weight=0.5)(torch.tensor([[-1.0, 2.0]]))
        tensor([[-0.5000,  2.0000]])
    """

    def __init__(self, body: nn.Module, weight: float = 0.5, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        if not 0.0 <= weight <= 1.0:
            raise WeightclipError(f"ConvexResidual: weight must lie in [0, 1], got {weight}")
        self.body = body
        self.weight = float(weight)
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        straight = x if self.shortcut is None else self.shortcut(x)
        return straight * (1.0 - self.weight) + self.body(x) * self.weight

    def extra_repr(self) -> str:
        return f"weight={self.weight}"
