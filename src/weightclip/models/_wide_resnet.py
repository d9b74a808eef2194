"""Wide residual networks without batch normalisation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from weightclip.errors import WeightclipError
from weightclip.nn import ConvexResidual, Residual, SafeGroupNorm, StandardizedConv2d


class WideResNet(nn.Module):
    """Pre-activation wide residual network (Zagoruyko & Komodakis, 2016) for small images.

    Batch normalisation mixes records, so `SafeGroupNorm` takes its place. With the defaults (normalisation without
    parameters, convolutions with biases) WRN-40-4 has exactly the 8,944,266 parameters of the paper's table, WRN-16-4
    2,747,530. The usual layout, affine normalisation and no convolution biases (``affine=True, bias=False``), has
    8,949,210. The graph is plain: convolutions, normalisations, activations, additions, an average, a dense layer.

    Args:
        depth: number of layers, ``6 n + 4``.
        width: widening factor.
        num_classes: number of logits.
        groups: groups of every normalisation; divides 16.
        norm: ``"safe"`` for `SafeGroupNorm`, ``"none"`` for no normalisation.
        alpha: floor of the normalisation's divisor.
        affine: whether the normalisations have parameters.
        bias: whether the convolutions have biases. A convolution's bias is dear under privacy.
        weight_standardization: use `StandardizedConv2d`.
        convex: weight of the body in a convex combination with the shortcut (gain 1 at any depth); None: plain sum.
        in_channels: colour planes of the input.
        stem: channels of the first convolution.
        activation: makes one activation module.

    Example:
        >>> sum(p.numel() for p in WideResNet(16, 4).parameters())
        2747530
        >>> WideResNet(10, 1)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        depth: int = 16,
        width: int = 4,
        num_classes: int = 10,
        groups: int = 16,
        norm: Literal["safe", "none"] = "safe",
        alpha: float = 1.0,
        affine: bool = False,
        bias: bool = True,
        weight_standardization: bool = False,
        convex: float | None = None,
        in_channels: int = 3,
        stem: int = 16,
        activation: Callable[[], nn.Module] = nn.ReLU,
    ) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            raise WeightclipError(f"WideResNet: depth must be 6 n + 4 with n >= 1 (10, 16, 28, 40, ...), got {depth}")
        if norm not in ("safe", "none"):
            raise WeightclipError(f"WideResNet: norm must be 'safe' or 'none', got {norm!r}")

        def conv(c_in: int, c_out: int, kernel: int, stride: int = 1) -> nn.Conv2d:
            kind = StandardizedConv2d if weight_standardization else nn.Conv2d
            layer = kind(c_in, c_out, kernel, stride=stride, padding=kernel // 2, bias=bias)
            nn.init.normal_(layer.weight, std=math.sqrt(2.0 / (c_in * kernel**2)))
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
            return layer

        def norm_act(channels: int) -> list[nn.Module]:
            layers: list[nn.Module] = [activation()]
            return layers if norm == "none" else [SafeGroupNorm(groups, channels, alpha, affine), *layers]

        def merge(body: nn.Module, shortcut: nn.Module | None) -> nn.Module:
            return Residual(body, shortcut) if convex is None else ConvexResidual(body, convex, shortcut)

        layers: list[nn.Module] = [conv(in_channels, stem, 3)]
        c_in = stem
        for group, c_out in enumerate((16 * width, 32 * width, 64 * width)):
            for block in range((depth - 4) // 6):
                stride = 2 if group > 0 and block == 0 else 1
                inner = [conv(c_in, c_out, 3, stride), *norm_act(c_out), conv(c_out, c_out, 3)]
                if c_in == c_out and stride == 1:
                    layers.append(merge(nn.Sequential(*norm_act(c_in), *inner), None))
                else:  # where the shape changes, the first normalisation and activation serve both branches
                    layers += [*norm_act(c_in), merge(nn.Sequential(*inner), conv(c_in, c_out, 1, stride))]
                c_in = c_out
        self.features = nn.Sequential(*layers, *norm_act(c_in))
        self.classifier = nn.Linear(c_in, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.mean(self.features(x), (2, 3)))
