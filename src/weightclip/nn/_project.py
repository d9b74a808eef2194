"""Per-record radii: projection on the l2 ball, and scaling to unit norm with a floor."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weightclip.errors import WeightclipError
from weightclip.nn._norm import positive, wide


def scale_to(x: Tensor, target: float, threshold: float, detach: bool) -> Tensor:
    """``x * target / max(threshold, norm(x))`` per record, in at least float32.

    A record whose squared norm is not finite becomes zeros.
    """
    if x.ndim < 2:
        raise WeightclipError(f"a per-record norm needs shape (records, ...), got {tuple(x.shape)}")
    dims = tuple(range(1, x.ndim))
    wide_x = wide(x)
    with torch.no_grad():
        finite = wide_x.square().sum(dims, keepdim=True).isfinite()
    # Zero the record first and take its norm afterwards: 0 * inf in the backward pass would be NaN.
    clean = torch.where(finite, wide_x, 0.0)
    square = (clean.detach() if detach else clean).square().sum(dims, keepdim=True)
    outside = square.clamp_min(threshold * threshold).rsqrt() * target  # clamped before the root: finite gradient at 0
    # Inside the ball the factor is a constant, exactly 1 for a projection.
    return clean * torch.where(square > threshold * threshold, outside, target / threshold)


class Project(nn.Module):
    """Projection of each record on the l2 ball of a public ``radius``, over all non-record dimensions.

    Formal guarantees:
        l2 norm of each record's output at most ``radius``; l2 gain 1; l1 and l-infinity gain ``(1 + sqrt(n)) / 2`` with
        ``n`` the number of elements of a record, or 1 in the backward pass with ``detach=True``. A record that is not
        finite (or whose squared norm overflows) becomes zeros and receives a zero gradient.

    Args:
        radius: public radius of the ball.
        detach: treat the scale as a constant in the backward pass. The forward is the same; the cotangent is then
            multiplied by a number in (0, 1], which is non-expansive in every norm.

    Example:
        >>> Project(1.0)(torch.tensor([[3.0, 4.0], [0.3, 0.4], [float("nan"), 1.0]]))
        tensor([[0.6000, 0.8000],
                [0.3000, 0.4000],
                [0.0000, 0.0000]])
    """

    def __init__(self, radius: float, detach: bool = False) -> None:
        super().__init__()
        self.radius = positive(radius, "Project: radius")
        self.detach = detach

    def forward(self, x: Tensor) -> Tensor:
        return scale_to(x, self.radius, self.radius, self.detach).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.radius}, detach={self.detach}"


class UnitNorm(nn.Module):
    """``x / max(floor, norm(x))`` per record: unit norm wherever the record is not smaller than ``floor``.

    Dividing by the norm alone has no finite gain near 0; the floor gives it one.

    Formal guarantees:
        l2 norm of each record's output at most 1 (and at most ``norm(x) / floor``); l2 gain ``1 / floor``; l1 and
        l-infinity gain ``(1 + sqrt(n)) / (2 floor)``, or ``1 / floor`` in the backward pass with ``detach=True``.
        A record that is not finite becomes zeros and receives a zero gradient.

    Example:
        >>> UnitNorm(0.1)(torch.tensor([[3.0, 4.0], [0.0, 0.01]]))
        tensor([[0.6000, 0.8000],
                [0.0000, 0.1000]])
    """

    def __init__(self, floor: float, detach: bool = False) -> None:
        super().__init__()
        self.floor = positive(floor, "UnitNorm: floor")
        self.detach = detach

    def forward(self, x: Tensor) -> Tensor:
        return scale_to(x, 1.0, self.floor, self.detach).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.floor}, detach={self.detach}"
