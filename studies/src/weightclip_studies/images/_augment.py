"""Random crops and mirror images of a whole batch at once, on whatever device it lies."""

from __future__ import annotations

import torch
from torch import Tensor


def augment(x: Tensor, views: int = 1, padding: int = 4, flip: bool = True, seed: int = 0) -> Tensor:
    """``views`` random views of each image, those of one image adjacent: zero-padded, cropped back, perhaps mirrored.

    Formal guarantees: a view is a function of its own image and of random numbers that do not depend on any image.

    Args:
        x: Images, records x planes x height x width, of any type.
        views: Views of each image.
        padding: Pixels added on each side before the crop; 0 crops nothing.
        flip: Mirror each view left to right with probability one half.
        seed: Seed of this batch's crops and flips.
    """
    x = x.repeat_interleave(views, 0)
    count, planes, height, width = x.shape
    generator = torch.Generator(device=x.device).manual_seed(seed)

    def draw(high: int) -> Tensor:
        return torch.randint(0, high, (count, 1), generator=generator, device=x.device)

    columns, rows = torch.arange(width, device=x.device), torch.arange(height, device=x.device)
    # where each pixel of the view lies in the image; outside of it there are zeros
    across = columns + draw(2 * padding + 1) - padding  # records x width
    down = rows + draw(2 * padding + 1) - padding
    if flip:
        across = torch.where(draw(2).bool(), across.flip(1), across)
    inside = ((down >= 0) & (down < height)).unsqueeze(2) & ((across >= 0) & (across < width)).unsqueeze(1)
    place = down.clamp(0, height - 1).unsqueeze(2) * width + across.clamp(0, width - 1).unsqueeze(1)
    place = place.flatten(1).unsqueeze(1).expand(-1, planes, -1)
    return torch.where(inside.unsqueeze(1), x.flatten(2).gather(2, place).view_as(x), torch.zeros_like(x[:1, :1]))
