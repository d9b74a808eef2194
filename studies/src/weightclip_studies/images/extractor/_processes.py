"""Pictures from random processes alone: textured dead leaves, and outputs of generators that nobody trained.

No image of any data set is read anywhere in this file, so a network trained on these pictures costs no privacy and
counts as no extra data. All work is done for a whole batch of pictures at once; the only loops are over the leaves of a
picture and the layers of a generator.

At 48 x 48 pixels one picture of 48 leaves takes about 48 x 45 passes over 2,304 pixels: 600,000 of them move some 20 TB
if every pass reaches memory, 5 to 10 seconds of one H200 (4.3 TB/s).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from weightclip_studies.images.extractor._draws import Draws


@dataclass(frozen=True)
class Processes:
    """How pictures are made. Every field is public.

    Attributes:
        size: Height and width.
        leaves: Shapes of a picture of leaves; later ones hide earlier ones.
        generated: Share of the pictures that come from random generators, the last ones of each chunk.
        chunk: Pictures made at a time; part of what a seed means.
    """

    size: int = 48
    leaves: int = 48
    generated: float = 0.3
    chunk: int = 2048


def pictures(
    count: int,
    settings: Processes,
    seed: int,
    device: torch.device | str = "cpu",
    source: torch.device | str = "cpu",
    say: Callable[[str], None] | None = None,
) -> Tensor:
    """``count`` pictures as uint8 (count x 3 x size x size), on ``device``.

    Formal guarantees: a function of the arguments alone; reads no data.

    Args:
        count: Number of pictures.
        settings: How they are made.
        seed: Which ones are made.
        device: Where they are made, and stay.
        source: Where random numbers are drawn: "cpu" for the same pictures (up to rounding) on every device.
        say: Told how far it has come, every 50 chunks.
    """
    out = torch.empty(count, 3, settings.size, settings.size, dtype=torch.uint8, device=device)
    for number, part in enumerate(out.split(settings.chunk)):
        draws = Draws("pictures", seed, number, device=device, source=source)
        random = round(len(part) * settings.generated)
        made = [_leaves(len(part) - random, settings, draws)] if random < len(part) else []
        made += [_generated(random, settings.size, draws)] if random else []
        part.copy_((torch.cat(made).clamp(0, 1) * 255).round())
        if say is not None and number % 50 == 0:
            say(f"pictures {number * settings.chunk + len(part)} of {count}")
    return out


def textures(count: int, size: int, draws: Draws) -> Tensor:
    """Grey textures of a random spectrum, mean 0 and variance 1 (count x size x size).

    White noise is filtered by f^-a (a between 0.4 and 2.4), stretched up to four times in a random direction, and in a
    third of the cases kept near one frequency, which makes stripes and spots; half of them are then pushed towards two
    levels.
    """
    rows = torch.fft.fftfreq(size, device=draws.device).view(1, -1, 1)
    columns = torch.fft.rfftfreq(size, device=draws.device).view(1, 1, -1)

    def each(low: float = 0.0, high: float = 1.0) -> Tensor:
        return draws.uniform(count, 1, 1, low=low, high=high)

    angle, stretch = each(0, math.pi), 4 ** each()
    u, v = _turn(columns, rows, angle)
    f = torch.hypot(u * stretch, v).clamp_min(1 / size)
    middle, narrow = 0.5 * 10 ** -each(0.2, 1.1), each(0.15, 0.5)
    ring = torch.exp(-((f / middle).log() / narrow).square())
    size_of = torch.where(each() < 1 / 3, ring, f ** -each(0.4, 2.4))
    x = torch.fft.irfft2(torch.fft.rfft2(draws.normal(count, size, size)) * size_of, s=(size, size))
    x = _standard(x, (1, 2))
    steep = 10 ** each(-0.5, 1)
    return torch.where(each() < 0.5, _standard(torch.tanh(steep * x), (1, 2)), x)


def _leaves(count: int, settings: Processes, draws: Draws) -> Tensor:
    """Ellipses, rectangles, triangles and blobs, each with a texture, a colour and a shade of its own."""
    size, leaves = settings.size, settings.leaves
    bank = textures(max(64, count), size, draws)

    def each(low: float = 0.0, high: float = 1.0) -> Tensor:
        return draws.uniform(leaves, count, 1, 1, low=low, high=high)

    # r^-3: as many shapes at every scale, from a smallest radius of the picture's own
    low, high = (size / 24 * 6 ** draws.uniform(1, count, 1, 1)) ** -2, (size * 0.6) ** -2
    radius = (high + (low - high) * each()).rsqrt()
    x, y, angle, aspect, kind = each(-0.1, 1.1) * size, each(-0.1, 1.1) * size, each(0, 6.2832), each(0.3), each()
    waves, phases = 0.35 * draws.uniform(leaves, 2, count, 1, 1), 6.2832 * draws.uniform(leaves, 2, count, 1, 1)
    which = draws.whole(len(bank), leaves, count)
    # colours: a picture has a palette, a leaf its grey level and a smaller chroma; textures vary along one colour
    chroma = 0.2 * draws.uniform(1, count, 1, 1, 1)
    palette = 0.08 * draws.normal(1, count, 3, 1, 1)
    colour = draws.uniform(leaves, count, 1, 1, 1) + palette + chroma * draws.normal(leaves, count, 3, 1, 1)
    along = 1 + 0.4 * draws.normal(leaves, count, 3, 1, 1)
    along = along * 0.25 * draws.uniform(leaves, count, 1, 1, 1)
    slope = 0.25 * draws.normal(leaves, count, 2, 1, 1) / size
    soft = each(0.5, 1.5)
    rows = torch.arange(size, device=draws.device, dtype=torch.float32).view(1, -1, 1)
    columns = rows.transpose(1, 2)
    image = torch.zeros(count, 3, size, size, device=draws.device)
    for i in range(leaves):
        dx, dy = columns - x[i], rows - y[i]
        paint = bank[which[i]].unsqueeze(1) * along[i] + colour[i]
        paint = paint + (slope[i, :, 0:1] * dx.unsqueeze(1) + slope[i, :, 1:2] * dy.unsqueeze(1))
        if i == 0:
            image = paint.clamp(0, 1)  # lies behind everything
            continue
        u, v = _turn(dx, dy, angle[i])
        far = _distance(u, v / aspect[i], kind[i], waves[i], phases[i])
        cover = ((radius[i] - far) / soft[i] + 0.5).clamp(0, 1).unsqueeze(1)
        image = torch.lerp(image, paint.clamp(0, 1), cover)
    light = 1 + 0.5 * (
        draws.normal(count, 1, 1, 1) * (columns / size - 0.5) + draws.normal(count, 1, 1, 1) * (rows / size - 0.5)
    )
    return image * light.clamp(0.4, 1.6)


def _distance(u: Tensor, v: Tensor, kind: Tensor, waves: Tensor, phases: Tensor) -> Tensor:
    """How far a point lies from the middle of a shape of radius 1, per unit of its radius."""
    ring = torch.hypot(u, v)
    square = torch.maximum(u.abs(), v.abs())
    half, lean = 0.5 * u, math.sqrt(3) / 2 * v
    triangle = 1.6 * torch.maximum(-u, torch.maximum(half + lean, half - lean))
    turn = torch.atan2(v, u)
    bumpy = ring / (1 + waves[0] * torch.cos(3 * turn + phases[0]) + waves[1] * torch.cos(5 * turn + phases[1]))
    return torch.where(
        kind < 0.3, ring, torch.where(kind < 0.55, square, torch.where(kind < 0.75, triangle, bumpy))
    )  # fmt: skip


def _generated(count: int, size: int, draws: Draws, group: int = 256) -> Tensor:
    """Outputs of convolutional generators with random weights; each group of pictures has a generator of its own.

    Every picture scales the channels by numbers of its own, so no two of them come from the same function.
    """
    made = []
    for part in torch.arange(count).split(group):
        n = len(part)
        x, wide = draws.normal(n, 64, -(-size // 8), -(-size // 8)), 64
        for width in (64, 32, 16):
            x = nn.functional.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
            weight = draws.normal(width, wide, 3, 3) * (draws.uniform(width, wide, 1, 1) < 0.4)
            x = x * (0.7 * draws.normal(n, wide, 1, 1)).exp()
            x = _standard(nn.functional.conv2d(nn.functional.pad(x, (1, 1, 1, 1), "replicate"), weight), (2, 3))
            grain = draws.uniform(n, width, 1, 1) ** 4 * draws.normal(n, 1, *x.shape[2:])
            x = nn.functional.leaky_relu(x + 0.5 * grain + 0.5 * draws.normal(n, width, 1, 1), 0.1)
            wide = width
        # three grey maps mix four colours, sharply in some pictures and softly in others
        mixed = _standard(torch.einsum("noc,nchw->nohw", draws.normal(n, 3, wide), x), (2, 3))
        steep = 10 ** draws.uniform(n, 3, 1, 1, low=-0.3, high=1)
        mixed = torch.sigmoid(steep * (mixed - 0.7 * draws.normal(n, 3, 1, 1)))
        x = _colours(n, draws) + torch.zeros_like(mixed)
        for k in range(3):
            x = torch.lerp(x, _colours(n, draws), mixed[:, k : k + 1])
        made.append(x[..., :size, :size])
    return torch.cat(made)


def _colours(count: int, draws: Draws) -> Tensor:
    """A grey level and a smaller chroma for each picture (count x 3 x 1 x 1)."""
    return draws.uniform(count, 1, 1, 1) + 0.15 * draws.normal(count, 3, 1, 1)


def _turn(x: Tensor, y: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    """Coordinates along and across a direction."""
    c, s = torch.cos(angle), torch.sin(angle)
    return c * x + s * y, c * y - s * x


def _standard(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Mean 0 and variance 1 over ``dims``, of each picture by itself."""
    centred = x - x.mean(dims, keepdim=True)
    return centred / (centred.square().mean(dims, keepdim=True) + 1e-6).sqrt()
