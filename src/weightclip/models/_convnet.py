"""The convolutional network of the paper's MNIST and Fashion-MNIST experiments."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from weightclip.nn import SafeGroupNorm, StandardizedConv2d


class ConvNet(nn.Module):
    """Two 3x3 convolutions, one max-pooling, two dense layers: 1,625,866 parameters on 1 x 28 x 28 inputs.

    Both convolutions are padded by 1, so that pooling leaves 64 x 14 x 14 = 12,544 features, as the paper's table of
    models requires. The pooling windows do not overlap: its gain is 1.

    Args:
        in_channels: colour planes of the input.
        size: height and width of the input, a multiple of 2.
        num_classes: number of logits.
        activation: makes one activation module.
        group_norm: number of groups of a `SafeGroupNorm` after each convolution; None: no normalisation.
        alpha: floor of the normalisation's divisor.
        weight_standardization: use `StandardizedConv2d`.

    Example:
        >>> import torch
        >>> sum(p.numel() for p in ConvNet().parameters())
        1625866
        >>> ConvNet()(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        in_channels: int = 1,
        size: int = 28,
        num_classes: int = 10,
        activation: Callable[[], nn.Module] = nn.ReLU,
        group_norm: int | None = None,
        alpha: float = 1.0,
        weight_standardization: bool = False,
    ) -> None:
        super().__init__()
        kind = StandardizedConv2d if weight_standardization else nn.Conv2d

        def block(c_in: int, c_out: int) -> list[nn.Module]:
            norm = [] if group_norm is None else [SafeGroupNorm(group_norm, c_out, alpha=alpha)]
            return [kind(c_in, c_out, 3, padding=1), *norm, activation()]

        self.features = nn.Sequential(*block(in_channels, 32), *block(32, 64), nn.MaxPool2d(2))
        self.classifier = nn.Sequential(
            nn.Linear(64 * (size // 2) ** 2, 128), activation(), nn.Linear(128, num_classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))
