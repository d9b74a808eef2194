"""Activations that keep the gradient's norm, and residual connections, the convex one with gain one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weightclip.errors import WeightclipError


class GroupSort(nn.Module):
    """Sorts (ascending) within groups of ``group_size`` consecutive channels, at every position.

    Formal guarantees: the Jacobian is a permutation (doubly stochastic where `MaxMin` meets a tie), so the gain is 1 in
    every p-norm; the l2 norm of the output equals that of the input.

    Args:
        group_size: channels per group; divides the number of channels (dimension 1).

    Example:
        >>> GroupSort(3)(torch.tensor([[3.0, 1.0, 2.0, 0.0, -1.0, 5.0]]))
        tensor([[ 1.,  2.,  3., -1.,  0.,  5.]])
    """

    def __init__(self, group_size: int) -> None:
        super().__init__()
        if group_size < 1:
            raise WeightclipError(f"GroupSort: group_size must be at least 1, got {group_size}")
        self.group_size = group_size

    def forward(self, x: Tensor) -> Tensor:
        return self._groups(x).sort(dim=2).values.flatten(1, 2)

    def _groups(self, x: Tensor) -> Tensor:
        if x.ndim < 2 or x.shape[1] % self.group_size:
            raise WeightclipError(
                f"{type(self).__name__} needs a number of channels divisible by {self.group_size}, "
                f"got shape {tuple(x.shape)}"
            )
        return x.unflatten(1, (x.shape[1] // self.group_size, self.group_size))  # records x groups x size x ...

    def extra_repr(self) -> str:
        return str(self.group_size)


class MaxMin(GroupSort):
    """`GroupSort` with groups of two, without a sort: (min, max) of each pair of consecutive channels.

    Example:
        >>> MaxMin()(torch.tensor([[3.0, 1.0, 0.0, 5.0]]))
        tensor([[1., 3., 0., 5.]])
    """

    def __init__(self) -> None:
        super().__init__(2)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self._groups(x).unbind(2)
        return torch.stack((torch.minimum(first, second), torch.maximum(first, second)), 2).flatten(1, 2)

    def extra_repr(self) -> str:
        return ""


class Abs(nn.Module):
    """Absolute value. Formal guarantees: gain 1 in every p-norm; the output has the norm of the input.

    Example:
        >>> Abs()(torch.tensor([[-2.0, 1.0]]))
        tensor([[2., 1.]])
    """

    def forward(self, x: Tensor) -> Tensor:
        return x.abs()


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
