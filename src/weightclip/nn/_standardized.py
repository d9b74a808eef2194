"""Convolution with standardised kernels, and the pull-back of a gradient released at the effective kernel."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightclip.nn._norm import positive, safe_normalise


class StandardizedConv2d(nn.Conv2d):
    """`torch.nn.Conv2d` that convolves with ``gain * (W - mean) / (max(floor, std) * sqrt(fan_in))``.

    Mean and population standard deviation are taken per output channel over the ``fan_in`` entries of its kernel. The
    parameters keep their native names ``weight`` and ``bias``, so state dicts are those of `torch.nn.Conv2d`.

    Formal guarantees:
        Every output channel of the effective kernel has l2 norm at most ``gain``, whatever ``weight`` is (so a group's
        kernel matrix has Frobenius norm at most ``gain * sqrt(out_channels / groups)``). The bounds are those of
        a convolution with `effective_weight`, never with ``weight``; noise belongs on the gradient at the effective
        kernel, which `pull_back` then maps, as post-processing, to the gradient at ``weight``. The map from
        ``weight`` to the effective kernel has l2 gain ``gain / (floor * sqrt(fan_in))``.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias: as in `torch.nn.Conv2d`.
        floor: smallest divisor of the standardisation, a public constant.
        gain: fixed factor of the effective kernel.

    Example:
        >>> conv = StandardizedConv2d(3, 8, 3, padding=1)
        >>> conv.effective_weight().flatten(1).norm(dim=1).max().item() <= 1.0001
        True
        >>> list(conv.state_dict())
        ['weight', 'bias']
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | str = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        floor: float = 1e-3,
        gain: float = 1.0,
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias)
        self.floor = positive(floor, "StandardizedConv2d: floor")
        self.gain = positive(gain, "StandardizedConv2d: gain")

    @property
    def fan_in(self) -> int:
        """Number of entries of one output channel's kernel."""
        return self.weight[0].numel()

    def effective_weight(self) -> Tensor:
        """The kernel the layer convolves with, in the dtype of ``weight`` and differentiable."""
        return safe_normalise(self.weight, self.floor, (1, 2, 3)) * (self.gain / math.sqrt(self.fan_in))

    @torch.no_grad()
    def pull_back(self, gradient: Tensor) -> Tensor:
        """Maps a gradient at the effective kernel to the gradient at ``weight``, by the transposed Jacobian there.

        Formal guarantees: a linear function of ``gradient`` that reads nothing but the public weights, so it is
        post-processing when ``gradient`` already carries its noise.
        """
        dims = (1, 2, 3)
        weight = self.weight.double()  # one small tensor per step: exactness costs nothing
        g = gradient.double()
        centred = weight - weight.mean(dims, keepdim=True)
        variance = centred.square().mean(dims, keepdim=True)
        clamped = variance.clamp_min(self.floor**2)
        # J = scale * (P - u u^T), P the centring, u the unit vector of the centred kernel; no u where the floor acts.
        along = (g * centred).mean(dims, keepdim=True) / clamped * (variance >= self.floor**2)
        scale = clamped.rsqrt() * (self.gain / math.sqrt(self.fan_in))
        return (scale * (g - g.mean(dims, keepdim=True) - along * centred)).to(gradient.dtype)

    def forward(self, input: Tensor) -> Tensor:
        return F.conv2d(
            input, self.effective_weight(), self.bias, self.stride, self.padding, self.dilation, self.groups
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, floor={self.floor}, gain={self.gain}"
