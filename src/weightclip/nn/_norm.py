"""Normalisation with a bounded gain, one record at a time; radii of records: the l2 ball, unit norm with a floor."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from weightclip.errors import WeightclipError


def wide(x: Tensor) -> Tensor:
    """Half-precision inputs in float32, others untouched: squares overflow float16 and lose digits in bfloat16."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def positive(value: float, what: str) -> float:
    """``value`` as a float, or one clear error when it is not a positive finite number."""
    value = float(value)
    if not (math.isfinite(value) and value > 0):
        raise WeightclipError(f"{what} must be a positive finite number, got {value}")
    return value


def safe_normalise(x: Tensor, alpha: float, dims: tuple[int, ...]) -> Tensor:
    """``(x - mean) / max(alpha, std)`` over ``dims``: Eq. (safe group normalisation), its 1 made ``alpha``.

    The variance is clamped at ``alpha**2`` *before* the root, so a constant group has output 0 and a finite gradient.
    It is taken of the centred values, so that ``norm(output)**2 <= numel`` survives rounding however large the mean is.
    """
    centred = x - x.mean(dims, keepdim=True)
    variance = centred.square().mean(dims, keepdim=True)
    return centred * variance.clamp_min(alpha * alpha).rsqrt()


class SafeGroupNorm(nn.Module):
    """Group normalisation whose divisor never falls below ``alpha``.

    Channels (dimension 1) are split into ``num_groups`` groups; each record's group is centred and divided by
    ``max(alpha, std)`` over its channels and all positions, ``std`` being the population value without epsilon.

    Formal guarantees:
        With ``n_g`` elements per group and ``affine=False``: l2 gain at most ``1 / alpha``; l1 and l-infinity gain at
        most ``(1 + sqrt(n_g)) / (2 alpha)``; l2 norm of a record's output at most ``sqrt(numel)`` whatever the input.
        With ``affine=True`` gains are multiplied by ``max |weight|``, and the output is at most
        ``max |weight| * sqrt(numel) + sqrt(positions) * norm(bias)``. Records are never mixed.

    Args:
        num_groups: number of groups; divides ``num_channels``.
        num_channels: size of dimension 1.
        alpha: floor of the divisor, a public constant.
        affine: whether to learn a scale ``weight`` and a shift ``bias`` per channel.

    Example:
        >>> norm = SafeGroupNorm(2, 4, alpha=0.5)
        >>> norm(torch.ones(3, 4, 5, 5)).abs().max().item()  # a constant record: no division by zero
        0.0
        >>> bool(norm(100 * torch.randn(3, 4, 5, 5)).flatten(1).norm(dim=1).max() <= 10.001)  # sqrt(4 * 5 * 5)
        True
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, num_groups: int, num_channels: int, alpha: float = 1.0, affine: bool = False) -> None:
        super().__init__()
        if num_groups < 1 or num_channels % num_groups:
            raise WeightclipError(
                f"{type(self).__name__}: num_groups={num_groups} must divide num_channels={num_channels}"
            )
        self.num_groups = num_groups
        self.num_channels = num_channels
        self.alpha = positive(alpha, f"{type(self).__name__}: alpha")
        self.affine = affine
        self.weight = nn.Parameter(torch.ones(num_channels)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_channels)) if affine else None

    def normalise(self, x: Tensor) -> Tensor:
        """The layer without its affine part."""
        if x.ndim < 2 or x.shape[1] != self.num_channels:
            raise WeightclipError(
                f"{type(self).__name__} expects (records, {self.num_channels}, ...), got shape {tuple(x.shape)}"
            )
        groups = wide(x).unflatten(1, (self.num_groups, self.num_channels // self.num_groups)).flatten(2)
        return safe_normalise(groups, self.alpha, (2,)).reshape(x.shape).to(x.dtype)  # records x channels x positions

    def forward(self, x: Tensor) -> Tensor:
        y = self.normalise(x)
        if self.weight is None or self.bias is None:
            return y
        shape = (1, self.num_channels) + (1,) * (x.ndim - 2)
        return y * self.weight.view(shape) + self.bias.view(shape)

    def extra_repr(self) -> str:
        return f"{self.num_groups}, {self.num_channels}, alpha={self.alpha}, affine={self.affine}"


class SafeInstanceNorm(SafeGroupNorm):
    """Instance normalisation, ``(x - mean) / max(alpha, std)`` per record and channel over all positions.

    Formal guarantees: those of `SafeGroupNorm` with one channel per group (``n_g`` is the number of positions).

    Example:
        >>> SafeInstanceNorm(4)(torch.randn(2, 4, 6, 6)).shape
        torch.Size([2, 4, 6, 6])
    """

    def __init__(self, num_channels: int, alpha: float = 1.0, affine: bool = False) -> None:
        super().__init__(num_channels, num_channels, alpha, affine)

    def normalise(self, x: Tensor) -> Tensor:
        """The layer without its affine part."""
        if x.ndim < 3:
            raise WeightclipError(f"SafeInstanceNorm needs positions to normalise over, got shape {tuple(x.shape)}")
        return super().normalise(x)

    def extra_repr(self) -> str:
        return f"{self.num_channels}, alpha={self.alpha}, affine={self.affine}"


class SafeLayerNorm(nn.Module):
    """Layer normalisation over the last dimensions, ``(x - mean) / max(alpha, std)`` per record and position.

    Formal guarantees:
        With ``n_g = prod(normalized_shape)``: l2 gain at most ``1 / alpha``, l1 and l-infinity gain at most
        ``(1 + sqrt(n_g)) / (2 alpha)``, l2 norm of a record's output at most ``sqrt(numel)``. With ``affine=True``
        gains are multiplied by ``max |weight|``, and the output is at most
        ``max |weight| * sqrt(numel) + sqrt(positions) * norm(bias)``.

    Example:
        >>> SafeLayerNorm(8, alpha=0.1)(torch.zeros(2, 3, 8)).abs().max().item()
        0.0
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, normalized_shape: int | Sequence[int], alpha: float = 1.0, affine: bool = False) -> None:
        super().__init__()
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        if not shape or min(shape) < 1:
            raise WeightclipError(f"SafeLayerNorm: normalized_shape must name positive sizes, got {shape}")
        self.normalized_shape = shape
        self.alpha = positive(alpha, "SafeLayerNorm: alpha")
        self.affine = affine
        self.weight = nn.Parameter(torch.ones(shape)) if affine else None
        self.bias = nn.Parameter(torch.zeros(shape)) if affine else None

    def normalise(self, x: Tensor) -> Tensor:
        """The layer without its affine part."""
        rank = len(self.normalized_shape)
        if x.ndim <= rank or tuple(x.shape[-rank:]) != self.normalized_shape:  # dimension 0 is never normalised over
            raise WeightclipError(
                f"SafeLayerNorm expects (records, ..., {', '.join(map(str, self.normalized_shape))}), "
                f"got shape {tuple(x.shape)}"
            )
        return safe_normalise(wide(x), self.alpha, tuple(range(-rank, 0))).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        y = self.normalise(x)
        return y if self.weight is None or self.bias is None else y * self.weight + self.bias

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, alpha={self.alpha}, affine={self.affine}"


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
