"""ResNet-9: in training with batch normalisation, afterwards folded into plain convolutions with constants."""

from __future__ import annotations

import torch
from torch import Tensor, nn

STAGES = 4


def stage_widths(width: int) -> tuple[int, ...]:
    """Channels of the four maps."""
    return width, 2 * width, 4 * width, 8 * width


class Convolution(nn.Sequential):
    """3 x 3, ReLU, perhaps followed by a halving of the map; with batch normalisation, or with a bias in its place."""

    def __init__(self, inputs: int, outputs: int, norm: bool, halve: bool = False) -> None:
        parts: list[nn.Module] = [nn.Conv2d(inputs, outputs, 3, padding=1, bias=not norm)]
        parts += [nn.BatchNorm2d(outputs)] if norm else []
        parts += [nn.ReLU(), *([nn.MaxPool2d(2)] if halve else [])]
        super().__init__(*parts)

    @torch.no_grad()
    def folded(self) -> tuple[Tensor, Tensor]:
        """Weight and bias of the convolution that does the same with the statistics of training as constants."""
        convolution, norm = self[0], self[1]
        assert isinstance(convolution, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d)
        assert norm.running_mean is not None and norm.running_var is not None
        scale = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
        bias = norm.bias.double() - norm.running_mean.double() * scale
        return convolution.weight.double() * scale.view(-1, 1, 1, 1), bias


class ResNet9(nn.Module):
    """Images in [0, 1] (records x 3 x 32 x 32) to maps of four stages, 32, 16, 8 and 4 pixels wide.

    Formal guarantees: with ``norm=False`` a record's maps depend on that record alone: there are convolutions, ReLU,
    maxima and sums of one record's maps, nothing else. With ``norm=True`` (training on synthetic pictures) records mix.

    Args:
        width: Channels of the first stage; the others have 2, 4 and 8 times as many.
        norm: Batch normalisation, for training.
    """

    def __init__(self, width: int = 64, norm: bool = False) -> None:
        super().__init__()
        a, b, c, d = stage_widths(width)
        self.width, self.norm = width, norm
        self.first = Convolution(3, a, norm)
        self.second = Convolution(a, b, norm, halve=True)
        self.second_more = nn.Sequential(Convolution(b, b, norm), Convolution(b, b, norm))
        self.third = Convolution(b, c, norm, halve=True)
        self.fourth = Convolution(c, d, norm, halve=True)
        self.fourth_more = nn.Sequential(Convolution(d, d, norm), Convolution(d, d, norm))

    def forward(self, x: Tensor) -> list[Tensor]:
        one = self.first(4 * (x - 0.5))
        two = self.second(one)
        two = two + self.second_more(two)
        three = self.third(two)
        four = self.fourth(three)
        return [one, two, three, four + self.fourth_more(four)]

    def folded(self) -> ResNet9:
        """The same function with the statistics of training as constants, and nothing that mixes records."""
        plain = ResNet9(self.width, norm=False).to(next(self.parameters()).device)
        pairs = zip(_convolutions(self), _convolutions(plain), strict=True)
        for mine, other in pairs:
            weight, bias = mine.folded()
            into = other[0]
            assert isinstance(into, nn.Conv2d) and into.bias is not None
            into.weight.data.copy_(weight)
            into.bias.data.copy_(bias)
        return plain.eval()


def _convolutions(net: nn.Module) -> list[Convolution]:
    return [m for m in net.modules() if isinstance(m, Convolution)]


class Projected(nn.Module):
    """The network in training, and the two layers that are thrown away after it: images to vectors of length 1."""

    def __init__(self, width: int, outputs: int = 128) -> None:
        super().__init__()
        self.net = ResNet9(width, norm=True)
        wide = stage_widths(width)[-1]
        self.head = nn.Sequential(
            nn.Linear(wide, wide, bias=False), nn.BatchNorm1d(wide), nn.ReLU(), nn.Linear(wide, outputs, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(self.head(self.net(x)[-1].mean((2, 3))).float(), dim=1)
