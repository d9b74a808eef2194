"""The norm of one record's gradient over several uses of one parameter, exact where that is cheap (SOUNDNESS 7 a).

A cap needs each record's norm before anything can be summed. On the CPU the cheapest way to a norm of a convolution, or
of a dense layer over positions, is the record's own gradient in float32 (:func:`own_gradients`); kept until scales are
known, it makes the sum a product of a vector and a matrix. Larger layers and devices take norms and sums in two passes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightclip.factors import _kinds
from weightclip.factors._dense import dense_factors, position_gram
from weightclip.factors._embedding import embedding_factors, embedding_norm
from weightclip.factors._limits import product_rounding
from weightclip.factors._record_norms import CHEAPEST, EXACT, Geometry

if TYPE_CHECKING:
    from weightclip.factors._collector import Use

_SMALL = 2**20  # entries of a parameter whose per-record gradients are formed (in chunks of records)
_CHUNK = 2**23  # entries of such a chunk
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


def own_gradients(part: Any, x: Tensor, d: Tensor, conf: Sequence[int], way: int) -> Own | None:
    """Each record's gradient, where that is the cheapest way; None where it is not, or another way was asked for.

    Whether it is follows from public shapes and settings alone.
    """
    fits = (
        x.is_cpu and isinstance(part, nn.Module) and way in (CHEAPEST, EXACT) and not torch.is_grad_enabled()
        and part._wc_product.dtype == torch.float32 and x.dtype != torch.float64
        and len(x) * cast(Any, part).weight.numel() <= _ROOM
    )  # fmt: skip
    if not fits:
        return None
    kind, (weight, bias) = part._wc_form, _kinds.trains(part)
    if kind is _kinds.DENSE and math.prod(x.shape[1:-1]) > 1:
        left, right = (t.float().reshape(len(t), -1, t.shape[-1]) for t in (d, x))
        found = torch.bmm(left.mT, right).flatten(1) if weight else None
        return Own(found, d.reshape(len(d), -1, d.shape[-1]).sum(1, dtype=torch.float64) if bias else None)
    if kind is _kinds.CONV:
        shape = _kinds.shape_of(part, conf)
        if shape.transposed:
            return None
        found = _conv(x.float(), d.float(), shape.geometry(), cast(Any, part).weight) if weight else None
        return Own(found, d.flatten(2).sum(2, dtype=torch.float64) if bias else None)
    return None


def _conv(x: Tensor, d: Tensor, geometry: Geometry, weight: Tensor) -> Tensor:
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


def norm_over(uses: Sequence[Use], way: int) -> Tensor:
    """Norm of each record's gradient over all these uses of one layer: blocks are orthogonal, uses of one add up.

    Formal guarantees:
        Never below the norm of what the uses' ``scaled`` add for a record of scale one.
    """
    found: dict[Any, list[Use]] = {}
    for use in uses:
        found.setdefault(use.key(), []).append(use)
    norms = [_norm_of_one(block, way) for block in found.values()]
    if len(norms) == 1:
        return norms[0]
    return torch.stack(norms).double().square().sum(0).sqrt().float() * (1 + 2.0**-22)


def _norm_of_one(uses: list[Use], way: int) -> Tensor:
    if len(uses) == 1:
        (use,), (x, d, conf) = uses, uses[0].grouped()
        use.own = own_gradients(use.part, x, d, conf, way)
        return (
            use.part._wc_form.norm(use.part, x, d, way, conf)
            if use.own is None
            else use.own.norm(_kinds.beta_of(use.part))
        )
    alike = len({_kinds.trains(use.part) for use in uses}) == 1
    simple = all(u.part._wc_form in (_kinds.DENSE, _kinds.EMBEDDING) for u in uses)
    if alike and simple and _kinds.trains(uses[0].part)[0]:
        return _rank_one(uses)
    if alike and uses[0].part.weight.numel() <= _SMALL:
        return _formed(uses)
    parts = [use.grouped() for use in uses]
    norms = [use.part._wc_form.norm(use.part, x, d, way, conf) for use, (x, d, conf) in zip(uses, parts, strict=True)]
    return torch.stack(norms).sum(0) * (1 + len(uses) * 2.0**-23)


def _rank_one(uses: list[Use]) -> Tensor:
    """Dense layers and embeddings: all uses are positions of one product, a sum of left (x) right."""
    tables, products = [], []
    for use in uses:
        x, d, _ = use.grouped()
        if use.part._wc_form is _kinds.EMBEDDING:
            ids, right = x.reshape(x.shape[0], -1), d.reshape(x.shape[0], -1, d.shape[-1])
            if use.part.padding_idx is not None:
                right = torch.where((ids == use.part.padding_idx)[..., None], torch.zeros_like(right), right)
            tables.append((ids, right))
        else:
            x, d = (t.reshape(t.shape[0], -1, t.shape[-1]) for t in (x, d))
            products.append((x, d) if use.turned else (d, x))
    part, beta = uses[0].part, _kinds.beta_of(uses[0].part)
    dtype, total, free = part._wc_product.dtype, 0.0, []
    if products:
        left, right = (torch.cat([p[k].double() for p in products], 1) for k in (0, 1))
        total = total + position_gram(right, left, beta, dtype).double().square()
        a, b = dense_factors(right, left, beta)
        free.append(a.double() * b.double())
    if tables:
        ids, rows = (torch.cat([t[k] for t in tables], 1) for k in (0, 1))
        total = total + embedding_norm(ids, rows, None, dtype).double().square()
        a, b = embedding_factors(ids, rows)
        free.append(a.double() * b.double())
    if products and tables:
        picked = left.gather(2, ids[:, None, :].expand(-1, left.shape[1], -1))  # records x positions x tokens
        total = total + 2 * (picked * (right @ rows.double().mT)).sum((1, 2))
        terms = picked.shape[1] * picked.shape[2] + right.shape[2] + 8
        total = total + terms * 2.0**-52 * free[0] * free[1]
    return (torch.as_tensor(total).clamp(min=0).sqrt() * (1 + 2.0**-22)).float()


def _formed(uses: list[Use]) -> Tensor:
    """Per-record gradients of all uses, added up in float64, a chunk of records at a time."""
    parts = [use.grouped() for use in uses]
    chunk = max(1, _CHUNK // max(1, uses[0].part.weight.numel()))
    found = []
    for start in range(0, parts[0][1].shape[0], chunk):
        total, room = None, 0.0
        for use, (x, d, conf) in zip(uses, parts, strict=True):
            kind, x, d = use.part._wc_form, x[start : start + chunk], d[start : start + chunk]
            weight, *bias = kind.gradients(use.part, x, d, conf)
            own = torch.cat([g.flatten(1) for g in (weight.mT if use.turned else weight, *bias)], 1)
            total = own if total is None else total + own
            a, b = kind.factors(use.part, x, d, conf)
            places = math.prod(d.shape[1:]) + 8
            room = room + product_rounding(places, use.part._wc_product.dtype) * a.double() * b.double()
        assert total is not None
        found.append((total.square().sum(1).sqrt() + room).float())
    return torch.cat(found)
