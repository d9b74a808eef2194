"""Each record's own gradient, on the CPU, where that is the cheapest way to its norm (SOUNDNESS 7 a).

A cap needs each record's norm before anything can be summed. On the CPU the cheapest way to a norm of a convolution, or
of a dense layer over positions, is the record's own gradient in float32; kept until scales are known, it makes the sum
a product of a vector and a matrix. Larger layers and devices take norms and sums in two passes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightclip.factors._record_norms import CHEAPEST, EXACT, Geometry

_ROOM = 2**24  # entries: 64 MiB in float32, for the gradients of all records and for patches of a chunk of them
_LONG = 2**21  # multiplications of one record from which its own convolution is faster than patches of many


@dataclass(frozen=True)
class Own:
    """Each record's gradient of one layer: float32, records x entries of the weight; biases in float64, beta not in."""

    weight: Tensor | None
    bias: Tensor | None

    def norm(self, beta: float) -> Tensor:
        """Norm of each record's gradient, weight and beta times bias.

        Formal guarantees:
            Of the very numbers that :meth:`sums` adds up, in float64, rounded up.
        """
        square: Any = 0.0
        if self.weight is not None:
            square = torch.linalg.vector_norm(self.weight, 2, 1, dtype=torch.float64).square()
        if self.bias is not None:
            square = square + (beta * self.bias).square().sum(1)
        return (square.sqrt() * (1 + 2.0**-23)).float()

    def sums(self, scale: Tensor | None, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """sum_i scale_i (gradient of record i), in float64; a record of scale zero adds exact zeros."""
        parts = [self.weight, self.bias]
        if scale is None:
            found = [None if p is None else p.sum(0, dtype=torch.float64) for p in parts]
        else:
            good = scale > 0
            if not bool(good.all()):  # zero times infinity is no zero
                parts, scale = [None if p is None else p[good] for p in parts], scale[good]
            found = [None if p is None else _weighted(scale.double(), p) for p in parts]
        return None if found[0] is None else found[0].view(like.shape), found[1]


def _weighted(scale: Tensor, rows: Tensor) -> Tensor:
    """scale @ rows in float64, without a float64 copy of all rows."""
    total = torch.zeros(rows.shape[1], dtype=torch.float64)
    chunk = max(1, (_ROOM // 8) // max(1, rows.shape[1]))
    for start in range(0, len(rows), chunk):
        total += scale[start : start + chunk] @ rows[start : start + chunk].double()
    return total


def forms_own(part: Any, x: Tensor, way: int) -> bool:
    """Whether gradients of single records may be formed here; from public shapes and settings alone."""
    return (
        x.is_cpu and isinstance(part, nn.Module) and way in (CHEAPEST, EXACT) and not torch.is_grad_enabled()
        and part._wc_product.dtype == torch.float32 and x.dtype != torch.float64
        and len(x) * cast(Any, part).weight.numel() <= _ROOM
    )  # fmt: skip


def conv_gradients(x: Tensor, d: Tensor, geometry: Geometry, weight: Tensor) -> Tensor:
    """Gradients of a convolution's kernel, records x entries, each of one record's own float32 product."""
    places, size = math.prod(d.shape[2:]), weight.numel()
    if places * size > _LONG:
        conf = geometry.stride, geometry.padding, geometry.dilation, False, (0,) * len(geometry.kernel), geometry.groups
        found = x.new_empty(len(x), size)
        kernel = weight.new_empty(weight.shape[0], weight.shape[1], *geometry.kernel)
        for i in range(len(x)):
            own = torch.ops.aten.convolution_backward(
                d[i : i + 1], x[i : i + 1], kernel, None, *conf, (False, True, False)
            )[1]
            found[i] = own.flatten()
        return found
    chunk = max(1, _ROOM // max(1, math.prod(geometry.kernel) * x.shape[1] * places))
    parts = []
    for start in range(0, len(x), chunk):
        u, e = _patches(x[start : start + chunk], geometry), d[start : start + chunk]
        e = e.flatten(2).unflatten(1, (geometry.groups, -1))  # records x groups x out x positions
        parts.append((e @ u.mT).flatten(1))
    return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else x.new_zeros(0, size)


def _patches(x: Tensor, geometry: Geometry) -> Tensor:
    """U of each record and group: (records, groups, patch, positions), by one copy from overlapping windows."""
    padded = F.pad(x, [p for axis in reversed(geometry.padding) for p in (axis, axis)])
    spans = [e * (k - 1) + 1 for k, e in zip(geometry.kernel, geometry.dilation, strict=True)]
    places = [(n - w) // s + 1 for n, w, s in zip(padded.shape[2:], spans, geometry.stride, strict=True)]
    record, channel, *steps = padded.stride()
    taps = [step * e for step, e in zip(steps, geometry.dilation, strict=True)]
    moves = [step * s for step, s in zip(steps, geometry.stride, strict=True)]
    windows = padded.as_strided(
        (len(x), x.shape[1], *geometry.kernel, *places), (record, channel, *taps, *moves), padded.storage_offset()
    )
    return windows.reshape(len(x), geometry.groups, -1, math.prod(places))
