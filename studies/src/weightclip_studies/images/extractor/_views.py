"""Random views of a whole batch of pictures at once, on whatever device it lies."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from weightclip_studies.images.extractor._draws import Draws

# to grey level and two chroma planes and back; a turn of the chroma planes is a change of hue
_TO_YIQ = ((0.299, 0.587, 0.114), (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112))


@functools.cache
def _planes(device: torch.device) -> tuple[Tensor, Tensor]:
    """The colour planes and their inverse, copied to a device once."""
    to = torch.tensor(_TO_YIQ, dtype=torch.float64)
    return to.float().to(device), torch.linalg.inv(to).float().to(device)


@dataclass(frozen=True)
class Views:
    """How two views of one picture may differ.

    Attributes:
        size: Height and width of a view.
        smallest: Smallest share of the picture's area that a crop keeps.
        jitter: Largest relative change of brightness, contrast and saturation.
        hue: Largest turn of the colours, as a share of a full turn.
        jittered: Probability of the changes of colour.
        grey: Probability of a grey view.
        hole: Side of a square of mean grey, as a share of the view; 0 for none. Half of the views have one.
    """

    size: int = 32
    smallest: float = 0.2
    jitter: float = 0.4
    hue: float = 0.1
    jittered: float = 0.8
    grey: float = 0.2
    hole: float = 0.0


def view(images: Tensor, settings: Views, draws: Draws) -> Tensor:
    """One random view of each picture (uint8, records x 3 x any x any), as floats in [0, 1]."""
    return _colours(_crop(images.float() / 255, settings, draws), settings, draws)


def _crop(x: Tensor, s: Views, draws: Draws) -> Tensor:
    """Random crops resized to ``size``, mirrored half of the time."""
    n = len(x)
    area = draws.uniform(n, low=s.smallest)
    ratio = torch.exp(draws.uniform(n, low=-math.log(4 / 3), high=math.log(4 / 3)))
    wide, high = (area * ratio).sqrt().clamp_max(1), (area / ratio).sqrt().clamp_max(1)
    across, down = (1 - wide) * draws.uniform(n, low=-1), (1 - high) * draws.uniform(n, low=-1)
    mirror = torch.where(draws.uniform(n) < 0.5, -1.0, 1.0)
    zero = torch.zeros_like(wide)
    turn = torch.stack([torch.stack([wide * mirror, zero, across], 1), torch.stack([zero, high, down], 1)], 1)
    grid = nn.functional.affine_grid(turn, [n, x.shape[1], s.size, s.size], align_corners=False)
    return nn.functional.grid_sample(x, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def _colours(x: Tensor, s: Views, draws: Draws) -> Tensor:
    """Brightness, contrast, saturation, hue, grey, a hole."""
    n, side = len(x), x.shape[-1]

    def each(low: float = 0.0, high: float = 1.0) -> Tensor:
        return draws.uniform(n, 1, 1, 1, low=low, high=high)

    bright, contrast, colourful = (each(1 - s.jitter, 1 + s.jitter) for _ in range(3))
    angle = draws.uniform(n, low=-2 * math.pi * s.hue, high=2 * math.pi * s.hue)
    to, back = _planes(x.device)
    luma = to[0].view(1, 3, 1, 1)
    # all four changes are linear in the colours: one matrix for each picture, and the mean for the contrast
    c, sn, one, zero = torch.cos(angle), torch.sin(angle), torch.ones_like(angle), torch.zeros_like(angle)
    turn = torch.stack([one, zero, zero, zero, c, -sn, zero, sn, c], 1).view(n, 3, 3)
    turn[:, 1:] *= colourful.view(n, 1, 1)
    matrix = back @ turn @ to
    mean = (x * luma).sum(1, keepdim=True).mean((2, 3), keepdim=True)
    other = torch.einsum("noc,nchw->nohw", matrix, x)
    other = bright * (mean + contrast * (other - mean))
    x = torch.where(each() < s.jittered, other, x).clamp(0, 1)
    x = torch.where(each() < s.grey, (x * luma).sum(1, keepdim=True), x)
    if s.hole:
        half = 0.5 * s.hole * side * (each() < 0.5)
        rows = torch.arange(side, device=x.device).view(1, 1, -1, 1) + 0.5
        inside = ((rows - side * each()).abs() < half) & ((rows.transpose(2, 3) - side * each()).abs() < half)
        x = torch.where(inside, 0.5, x)
    return x
