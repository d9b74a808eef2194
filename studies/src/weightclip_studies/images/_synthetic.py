"""Pictures made of nothing but chance: occluding shapes of random size and colour, the "dead leaves" model.

Their patches have the edges and the spectrum of natural images (Lee, Mumford & Huang, 2001), so filters and whitening
taken from them owe nothing to any data set: no privacy is spent, and no extra data is used.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def dead_leaves(
    count: int, size: int = 32, planes: int = 3, leaves: int = 60, seed: int = 0, device: torch.device | str = "cpu"
) -> Tensor:
    """Images in [0, 1] (count x planes x size x size): discs and rectangles, later ones hiding earlier ones.

    Radii follow a power law r^-3 between 2 pixels and half the image, which makes the pictures scale-invariant.

    Args:
        count: Number of images.
        size: Height and width.
        planes: 1 (grey) or 3 (colours are a grey level plus a smaller chroma).
        leaves: Shapes per image.
        seed: Seed of the pictures.
        device: Where to make them.
    """
    g = torch.Generator().manual_seed(seed)

    def uniform(low: float = 0.0, high: float = 1.0) -> Tensor:
        return (torch.rand(count, leaves, generator=g) * (high - low) + low).to(device)

    low, high = 2.0**-2, (size / 2) ** -2
    radius = (high + (low - high) * uniform()).rsqrt()
    x, y = uniform(-0.1, 1.1) * size, uniform(-0.1, 1.1) * size
    angle, aspect = uniform(0, math.pi), uniform(0.3, 1.0)
    square = uniform() < 0.5
    chroma = 0.1 * torch.randn(count, leaves, planes, generator=g).to(device)
    colour = (uniform().unsqueeze(-1) + (chroma if planes > 1 else 0)).clamp(0, 1)  # count x leaves x planes
    shade = 0.15 * torch.randn(count, leaves, 2, generator=g).to(device) / size  # slope of the grey level inside a leaf
    rows = torch.arange(size, device=device, dtype=torch.float32).view(1, -1, 1)
    columns = rows.transpose(1, 2)
    image = colour[:, 0, :, None, None].expand(-1, -1, size, size)  # the first leaf lies behind everything
    for i in range(1, leaves):
        dx, dy = columns - x[:, i, None, None], rows - y[:, i, None, None]
        c, s = torch.cos(angle[:, i, None, None]), torch.sin(angle[:, i, None, None])
        u, v = c * dx + s * dy, (c * dy - s * dx) / aspect[:, i, None, None]
        inside = torch.where(square[:, i, None, None], torch.maximum(u.abs(), v.abs()), torch.hypot(u, v))
        cover = (radius[:, i, None, None] - inside + 0.5).clamp(0, 1).unsqueeze(1)  # soft edge of one pixel
        slope = (shade[:, i, 0, None, None] * dx + shade[:, i, 1, None, None] * dy).unsqueeze(1)
        image = image + cover * (colour[:, i, :, None, None] + slope - image)
    return image.clamp(0, 1)


def strokes(count: int, size: int = 28, seed: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """Bright lines of random thickness on black, in the middle (count x 1 x size x size, in [0, 1]).

    Lines are where a smooth random field is near zero: the distance from there is the field over its slope.
    """
    g = torch.Generator().manual_seed(seed)
    wide = 2 * size
    rows, columns = torch.fft.fftfreq(wide).view(-1, 1), torch.fft.rfftfreq(wide).view(1, -1)
    smooth = 0.03 * 4 ** torch.rand(count, 1, 1, generator=g)
    noise = torch.fft.rfft2(torch.randn(count, wide, wide, generator=g))
    field = torch.fft.irfft2(noise * torch.exp(-((torch.hypot(rows, columns) / smooth) ** 2)), s=(wide, wide))
    field = (field / field.std((1, 2), keepdim=True))[:, : size + 1, : size + 1]
    slope = torch.hypot(field.diff(dim=1)[:, :, :size], field.diff(dim=2)[:, :size]) + 0.02
    thick = 1.5 + 1.5 * torch.rand(count, 1, 1, generator=g)
    line = (thick - field[:, :size, :size].abs() / slope).clamp(0, 1)
    place = torch.arange(size) - (size - 1) / 2
    edge = size * (0.3 + 0.2 * torch.rand(count, 1, 1, generator=g))
    inside = (edge - torch.hypot(place.view(-1, 1), place.view(1, -1)) + 0.5).clamp(0, 1)
    return (line * inside).unsqueeze(1).to(device)
