"""Norms of per-record weight gradients of a convolution, without the gradients where that is cheaper (SOUNDNESS 4).

The gradient of one record is U deltaT with U the patch matrix (an extra row of beta for the bias). Four ways to bound
its norm, from free to exact:

* free: ||U||_F ||delta||_F;
* channel Grams: sqrt(||UUT||_F ||delta deltaT||_F), never above the free bound;
* position Grams: sqrt(sum(UTU * deltaT delta)), exact, cheap where positions are few;
* per-record gradients of this one layer, in chunks: exact, costs what the weight gradient costs.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from weightclip.factors._limits import CANCELLED, product_rounding, record_norm, squared_norm, transforming, wide
from weightclip.factors.kernels._tiles import Window

MOST = 2**27  # float64 numbers, about, that a norm over positions holds at once; one record may need more


class CapNorm(enum.IntEnum):
    """How the norm of a record's gradient of a convolution is found (see the module's text)."""

    FREE = 0
    CHANNEL = 1
    POSITION = 2
    EXACT = 3
    CHEAPEST = 4


FREE, CHANNEL, POSITION, EXACT, CHEAPEST = CapNorm


class Geometry(NamedTuple):
    """A convolution's fixed numbers."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


@dataclass(frozen=True)
class Shape:
    """The fixed numbers of one use of a convolution, as ``torch.convolution`` takes them."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool
    extra: tuple[int, ...]  # output padding of a transposed one

    @property
    def conf(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]:
        """Stride, padding, dilation, groups."""
        return self.stride, self.padding, self.dilation, self.groups

    @property
    def overlap(self) -> int:
        """m: how many output positions one input place may reach by one channel (SOUNDNESS section 3)."""
        axes = zip(self.kernel, self.stride, self.dilation, strict=True)
        return math.prod(-(-k // (s // math.gcd(s, e))) for k, s, e in axes)

    @classmethod
    def of(cls, kernel: Sequence[int], conf: Sequence[int]) -> Shape:
        """From the numbers that :func:`numbers` made of a forward pass."""
        n = len(kernel)
        stride, padding, dilation, extra = (tuple(conf[i * n : (i + 1) * n]) for i in range(4))
        return cls(tuple(kernel), stride, padding, dilation, conf[4 * n], bool(conf[4 * n + 1]), extra)

    def window(self) -> Window:
        """The same for tiles: a 2-D convolution without groups."""
        kernel, stride, padding, dilation = (
            (n[0], n[1]) for n in (self.kernel, self.stride, self.padding, self.dilation)
        )
        return Window(kernel, stride, padding, dilation)

    def geometry(self) -> Geometry:
        """What norms of per-record gradients need to know."""
        return Geometry(self.kernel, self.stride, self.padding, self.dilation, self.groups)


def numbers(stride, padding, dilation, groups, transposed, extra) -> list[int]:
    """What a forward pass convolved with, as a flat list that compiled graphs can carry."""
    return [*stride, *padding, *dilation, *extra, groups, int(transposed)]


def by_records(find: Callable[[Tensor, Tensor], Tensor], x: Tensor, d: Tensor, entries: int) -> Tensor:
    """``find(x, d)``, of as many records at a time as hold ``MOST`` numbers if one of them takes ``entries``."""
    chunk = max(1, MOST // max(1, entries))
    if torch.compiler.is_compiling() or x.shape[0] <= chunk:  # a compiler would unroll the loop for every batch size
        return find(x, d)
    return torch.cat([find(x[i : i + chunk], d[i : i + chunk]) for i in range(0, x.shape[0], chunk)])


def cheapest(kind: int, x: Tensor, d: Tensor, geometry: Geometry) -> int:
    """The exact way with the least arithmetic, when asked to choose."""
    if kind != CHEAPEST:
        return kind
    places = math.prod(d.shape[2:])
    patch, out = math.prod(geometry.kernel) * x.shape[1] // geometry.groups, d.shape[1] // geometry.groups
    grams = places * places * (patch + out)
    return POSITION if grams < 2 * places * patch * out else EXACT


def patches(x: Tensor, geometry: Geometry) -> Tensor:
    """U of each record and group: (records, groups, patch, positions)."""
    for axis, (k, s, p, e) in enumerate(
        zip(geometry.kernel, geometry.stride, geometry.padding, geometry.dilation, strict=True)
    ):
        dim = 2 + axis
        pad = [0, 0] * (x.dim() - dim - 1) + [p, p]
        x = F.pad(x, pad) if p else x
        span = e * (k - 1) + 1
        x = x.unfold(dim, span, s)[..., ::e]  # positions stay at dim, taps go last
    taps = math.prod(geometry.kernel)
    places = x.shape[2 : 2 + len(geometry.kernel)]
    flat = x.reshape(x.shape[0], x.shape[1], math.prod(places), taps)  # records x channels x positions x taps
    flat = flat.permute(0, 1, 3, 2)  # records x channels x taps x positions
    return flat.reshape(x.shape[0], geometry.groups, -1, math.prod(places))


def conv_record_norm(
    x: Tensor, d: Tensor, geometry: Geometry, beta: float, kind: int, product: torch.dtype = torch.float64,
    chunk: int | None = None, free: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Bound of ||(U, beta 1) deltaT||_F of each record, never less than what is formed in type ``product``.

    float64 inside, with its own rounding and that of the product added, since positions may cancel; float32 out.
    ``chunk`` records at a time; by default as many as fill 64 MiB with U or the gradients (on a device 256 MiB, and
    at least 32, since launches cost more than memory there). ``free`` is the product of the factors' norms, if known.
    """
    kind = cheapest(kind, x, d, geometry)
    single = product == torch.float32 and x.is_cpu and x.dtype != torch.float64 and x.dim() <= 5
    if kind == EXACT and single and not transforming() and not torch.is_grad_enabled():  # audits differentiate it
        return _one_by_one(x, d, geometry, beta, free)
    if chunk is None:
        patch, places = math.prod(geometry.kernel) * x.shape[1], math.prod(d.shape[2:])
        widest = 8 * max(patch * places, patch * d.shape[1], patch**2 if kind == CHANNEL else places**2)
        chunk = max(32, (1 << 28) // max(1, widest)) if x.is_cuda else max(1, (1 << 26) // max(1, widest))
    parts = []
    for start in range(0, x.shape[0], chunk):
        parts.append(_norm(x[start : start + chunk], d[start : start + chunk], geometry, beta, kind, product))
    return torch.cat(parts) if parts else d.new_zeros(0, dtype=torch.float32)


def _one_by_one(x: Tensor, d: Tensor, geometry: Geometry, beta: float, free: Tensor | None) -> Tensor:
    """Norms of float32 products of one record each, as their sum is formed; cheaper than patches on the CPU."""
    weight = x.new_empty(d.shape[1], x.shape[1] // geometry.groups, *geometry.kernel, dtype=torch.float32)
    conf = geometry.stride, geometry.padding, geometry.dilation, False, (0,) * len(geometry.kernel), geometry.groups
    squares = (beta * d.flatten(2).sum(2, dtype=torch.float64)).square().sum(1)
    for i in range(len(x)):
        gradient = torch.ops.aten.convolution_backward(
            wide(d[i : i + 1]), wide(x[i : i + 1]), weight, None, *conf, (False, True, False)
        )[1]
        squares[i] += torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
    places, patch = math.prod(d.shape[2:]), math.prod(geometry.kernel)
    if free is None:  # every input lies in at most as many patches as a patch has places
        free = (patch * squared_norm(x) + beta**2 * places).sqrt() * record_norm(d)
    return (squares.sqrt() + product_rounding(places, torch.float32) * free).float()


def _norm(x: Tensor, d: Tensor, geometry: Geometry, beta: float, kind: int, product: torch.dtype) -> Tensor:
    u = patches(x.double(), geometry)  # records x groups x patch x positions
    e = d.double().flatten(2).unflatten(1, (geometry.groups, -1))  # records x groups x out x positions
    places = u.shape[-1]
    free = (u.square().sum((1, 2, 3)) + beta**2 * places) * e.square().sum((1, 2, 3))
    rounding, least = product_rounding(places, product, x.is_cuda) * free.sqrt(), CANCELLED * free.sqrt()
    if kind == FREE:
        square = (u.square().sum((2, 3)) + beta**2 * u.shape[-1]) * e.square().sum((2, 3))
        return square.sum(1).sqrt().float()
    if kind == CHANNEL:
        row = u.new_full((*u.shape[:2], 1, u.shape[-1]), beta)
        v = torch.cat([u, row], 2)
        left, right = v @ v.mT, e @ e.mT
        square = (left.square().sum((2, 3)).sqrt() * right.square().sum((2, 3)).sqrt()).sum(1)
        return torch.maximum(square.sqrt() + rounding, least).float()
    if kind == POSITION:
        gram = (u.mT @ u + beta**2) * (e.mT @ e)
        terms = u.shape[2] + e.shape[2] + places**2 + 8
        exact = (gram.sum((1, 2, 3)).clamp(min=0) + terms * 2.0**-53 * free).sqrt()
        return torch.maximum(exact + rounding, least).float()
    gradient = u @ e.mT  # records x groups x patch x out
    square = gradient.square().sum((1, 2, 3)) + beta**2 * e.sum(3).square().sum((1, 2))
    return torch.maximum(square.sqrt() + rounding, least).float()
