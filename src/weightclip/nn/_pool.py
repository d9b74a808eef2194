"""Pooling with a known gain: anti-aliased, norm-preserving, and averages scaled to gain one."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightclip.errors import WeightclipError
from weightclip.nn._norm import positive, wide


def _size(value: int, what: str) -> int:
    if value < 1:
        raise WeightclipError(f"{what} must be at least 1, got {value}")
    return value


class BlurPool2d(nn.Module):
    """Anti-aliased downsampling: a fixed binomial filter on every channel, zero padding, then a stride.

    Formal guarantees:
        `operator_norm` gives the gain, exact as the supremum over all image sizes. In one dimension let t_r be the sum
        of the taps whose offset is r modulo the stride; the filter is non-negative, so its polyphase response is
        largest at frequency 0 and the gain is ``sqrt(sum_r t_r**2)`` for p = 2, ``max_r t_r`` for p = 1,
        ``sum_r t_r = 1`` for p = infinity; two dimensions square it. Stride 2 gives 1/2, 1/4 and 1.
        ``unit_gain=True`` multiplies the output by the inverse of the l2 gain.

    Args:
        kernel_size: taps of the binomial filter, e.g. 3 for (1, 2, 1) / 4.
        stride: downsampling factor.
        unit_gain: scale the output so that the l2 gain is 1.

    Example:
        >>> pool = BlurPool2d()
        >>> pool(torch.ones(1, 2, 8, 8)).shape, pool.gain
        (torch.Size([1, 2, 4, 4]), 0.5)
    """

    taps: Tensor

    def __init__(self, kernel_size: int = 3, stride: int = 2, unit_gain: bool = False) -> None:
        super().__init__()
        self.kernel_size = _size(kernel_size, "BlurPool2d: kernel_size")
        self.stride = _size(stride, "BlurPool2d: stride")
        self.unit_gain = unit_gain
        binomial = [math.comb(kernel_size - 1, j) / 2 ** (kernel_size - 1) for j in range(kernel_size)]  # exact
        self.register_buffer("taps", torch.tensor(binomial), persistent=False)
        sums = [sum(binomial[r::stride]) for r in range(stride)]
        self._norms = {1.0: max(sums) ** 2, 2.0: sum(t * t for t in sums), math.inf: sum(sums) ** 2}
        self._scale = 1.0 / self._norms[2.0] if unit_gain else 1.0

    def operator_norm(self, p: float = 2) -> float:
        """Gain in the p-norm, p in {1, 2, inf}."""
        return self._scale * self._norms[float(p)]

    @property
    def gain(self) -> float:
        """Gain in the l2 norm."""
        return self.operator_norm(2)

    def forward(self, x: Tensor) -> Tensor:
        taps = self.taps.to(x.dtype)
        kernel = torch.outer(taps, taps).expand(x.shape[1], 1, -1, -1)
        y = F.conv2d(x, kernel, stride=self.stride, padding=(self.kernel_size - 1) // 2, groups=x.shape[1])
        return y * self._scale if self.unit_gain else y

    def extra_repr(self) -> str:
        return f"{self.kernel_size}, stride={self.stride}, unit_gain={self.unit_gain}"


class NormPool2d(nn.Module):
    """Norm-preserving pooling: the l2 norm of each non-overlapping window, smoothed at 0.

    The value is ``sqrt(s + floor**2) - floor``, ``s`` the sum of squares: within ``floor`` of the norm, 0 at 0, smooth.

    Formal guarantees: gain 1 for p = 1 and p = 2, ``kernel_size`` for p = infinity; the output's l2 norm is at most the
    input's. Rows and columns that do not fill a window are dropped.

    Example:
        >>> NormPool2d(2)(torch.tensor([[[[3.0, 0.0], [0.0, 4.0]]]]))
        tensor([[[[5.0000]]]])
    """

    def __init__(self, kernel_size: int, floor: float = 1e-6) -> None:
        super().__init__()
        self.kernel_size = _size(kernel_size, "NormPool2d: kernel_size")
        self.floor = positive(floor, "NormPool2d: floor")

    def forward(self, x: Tensor) -> Tensor:
        square = F.avg_pool2d(wide(x).square(), self.kernel_size, divisor_override=1)
        # The same value as sqrt(s + floor^2) - floor, without its cancellation.
        return (square / ((square + self.floor**2).sqrt() + self.floor)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.kernel_size}, floor={self.floor}"


L2Pool2d = NormPool2d


class ScaledAvgPool2d(nn.Module):
    """Sum over non-overlapping windows divided by the root of their area, so that the gain is one.

    Formal guarantees: gain 1 for p = 2, ``1 / kernel_size`` for p = 1, ``kernel_size`` for p = infinity; the output's
    l2 norm is at most the input's. Rows and columns that do not fill a window are dropped.

    Example:
        >>> ScaledAvgPool2d(2)(torch.ones(1, 1, 2, 2)).item()
        2.0
    """

    def __init__(self, kernel_size: int) -> None:
        super().__init__()
        self.kernel_size = _size(kernel_size, "ScaledAvgPool2d: kernel_size")

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(x, self.kernel_size) * float(self.kernel_size)  # mean * k = sum / k, and k = sqrt(area)

    def extra_repr(self) -> str:
        return str(self.kernel_size)
