"""Weight-gradient products whose sum over records is exact: eight-bit features, fifteen-bit cotangents, integer sums.

Rounding before the noise is part of the query (SOUNDNESS section 6). A float32 sum over 8,192 records can be moved by a
whole extra Delta by one record; an integer sum cannot. Features are stored once on a grid of 255 values, cotangents are
truncated towards zero on a grid of 32,767 values, and tensor cores add int8 products in int32 without error.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from weightclip._torch import int8_product
from weightclip.errors import WeightclipError

_DIGIT = 128
_TOP = 127 * _DIGIT + 127  # largest cotangent code
_COLUMNS = 1 << 17  # columns of an int8 product: 2^17 * 127^2 < 2^31
_CLIP = 8.0  # entries beyond this many times the root mean square of a unit vector are clamped


@dataclass(frozen=True)
class Features:
    """Features of one part of a data set on a public integer grid; the last row is a zero record for padding.

    Formal guarantees: the l2 norm of ``scale * codes[i]`` is at most 1 for every record, by construction.
    """

    codes: Tensor  # records + 1 x width, int8
    scale: float
    norms: Tensor  # records + 1, float32: scale * ||codes||, rounded up
    labels: Tensor  # records + 1, int64

    def __len__(self) -> int:
        return len(self.codes) - 1

    @property
    def width(self) -> int:
        """Number of features, padding included."""
        return self.codes.shape[1]

    def subset(self, rows: Tensor) -> Features:
        """The records ``rows``, with the zero record after them."""
        rows = torch.cat([rows, rows.new_tensor([len(self)])])
        return Features(self.codes[rows], self.scale, self.norms[rows], self.labels[rows])

    def values(self, rows: Tensor | slice = slice(None), dtype: torch.dtype = torch.float32) -> Tensor:
        """The features as numbers, ``scale * codes``."""
        return self.codes[rows].to(dtype) * self.scale


def grid(width: int) -> tuple[float, float]:
    """Step of the grid for unit vectors of ``width`` entries, and the factor that keeps rounding inside the ball.

    Rounding moves a vector by at most step sqrt(width)/2; shrinking it first by that much keeps its norm below 1.
    """
    step = _CLIP / math.sqrt(width) / 127
    return step, 1.0 - step * math.sqrt(width) / 2 - 1e-6


def encode(x: Tensor) -> Tensor:
    """Unit-norm records (records x width) as int8 codes of the grid."""
    step, shrink = grid(x.shape[1])
    return (x.float() * (shrink / step)).round_().clamp_(-127, 127).to(torch.int8)


def collect(codes: Tensor, labels: Tensor) -> Features:
    """Codes and labels of all records as `Features`; the width is padded to a multiple of 16."""
    step, _ = grid(codes.shape[1])
    pad = -codes.shape[1] % 16
    padded = torch.zeros(len(codes) + 1, codes.shape[1] + pad, dtype=torch.int8, device=codes.device)
    padded[:-1, : codes.shape[1]] = codes
    norms = torch.empty(len(padded), device=codes.device)
    for start in range(0, len(padded), 4096):
        part = padded[start : start + 4096].double().square().sum(1).sqrt() * (step * (1 + 1e-6))
        norms[start : start + 4096] = part
    if bool((norms > 1.0).any()):
        raise WeightclipError("features: a record lies outside the unit ball; encode unit vectors only")
    return Features(padded, step, norms, torch.cat([labels.long(), labels.new_zeros(1).long()]))


def quantise(delta: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """Cotangent codes (float64 integers) and their step; truncated towards zero, so no record's norm grows.

    Args:
        delta: records x units.
        bound: Public bound on the entries, 0-dim; larger entries are clamped.
    """
    step = bound.double() / _TOP
    codes = (delta.double() / step).trunc_().clamp_(-_TOP, _TOP)
    return codes, step


def integer_product(codes: Tensor, x: Tensor) -> Tensor:
    """sum_i codes_i x_i^T exactly, as float64: records x units, records x width (int8) -> units x width."""
    high = torch.div(codes, _DIGIT, rounding_mode="trunc")
    digits = torch.cat([high, codes - _DIGIT * high], 1).t()  # 2 units x records
    if x.device.type == "cuda":  # int8 tensor cores want operands contiguous along the records, sizes in multiples of 8
        units = digits.shape[0]
        rows = torch.zeros(max(24, units + -units % 8), digits.shape[1], dtype=torch.int8, device=x.device)
        rows[:units] = digits
        x = x if x.stride(0) == 1 else x.t().contiguous().t()
        total = int8_product(rows, x)[:units].double()
    elif integers_add_up():
        total = int8_product(digits.to(torch.int8).contiguous(), x).double()
    else:
        total = digits @ x.double()
    top, low = total.chunk(2)
    return top * _DIGIT + low


def outputs(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.t()`` of int8 rows in float32, on a CPU: records x width, units x width -> records x units.

    Each unit's weights are rounded to 21 bits of its largest, and products with them are exact, so that a record's
    outputs do not depend on its place or on other records. Where int8 products are not exact they are float32's.
    """
    if not integers_add_up():
        return x.float() @ weight.t()
    step = weight.abs().amax(1).double().clamp_min(1e-300) / _TOP / _DIGIT
    rest = (weight.double() / step[:, None]).trunc()
    digits = []
    for place in (_DIGIT**2, _DIGIT, 1):
        digit = torch.div(rest, place, rounding_mode="trunc")
        rest = rest - place * digit
        digits.append(digit)
    turned = torch.cat(digits).to(torch.int8).t()  # width x 3 units
    total = sum(  # int32 holds 127^2 times so many columns
        int8_product(part.contiguous(), rows.contiguous()).double()
        for part, rows in zip(x.split(_COLUMNS, 1), turned.split(_COLUMNS), strict=True)
    )
    assert isinstance(total, Tensor)
    top, middle, low = total.chunk(3, 1)
    return ((top * _DIGIT**2 + middle * _DIGIT + low) * step).float()


@functools.cache
def integers_add_up() -> bool:
    """Whether this CPU's int8 products are exact: some processors cut sums of two products to sixteen bits."""
    a = torch.full((24, 256), 127, dtype=torch.int8)
    signs = torch.tensor([1, -1], dtype=torch.int8).repeat(12)[:, None]
    try:
        found = int8_product(a * signs, (a * signs).t().contiguous())
    except RuntimeError:  # a build of torch without them
        return False
    return torch.equal(found, (a * signs).int() @ (a * signs).int().t())
