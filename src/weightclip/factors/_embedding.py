"""Embeddings: row lookup with the table's gradient formed from scaled cotangents."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weightclip.factors._kind import Conf, Factors, Kind, Measure, Sums, one_norm
from weightclip.factors._limits import (
    BOUND,
    CANCELLED,
    CAP,
    Counts,
    cap_scale,
    masked,
    own,
    product_rounding,
    record_norm,
    record_scale,
    trains,
)
from weightclip.factors._passes import collect
from weightclip.factors._record_norms import by_records


def embedding_factors(ids: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """The input factor is the constant sqrt(S): all S positions may hit one row (SOUNDNESS section 3)."""
    d_norm = record_norm(d)
    return torch.full_like(d_norm, math.sqrt(max(1, math.prod(ids.shape[1:])))), d_norm


def embedding_norm(ids: Tensor, d: Tensor, skip: int | None, product: torch.dtype = torch.float64) -> Tensor:
    """Norm of each record's gradient of the table: positions that hit one row add up before squaring.

    ``skip`` is the row that gets no gradient. In float64, never less than what is formed (as ``position_gram`` of a
    dense layer, of which this is the case of one-hot inputs): by S x S Grams or, where there are more positions than
    columns, by the rows that were hit; so many records at a time that what is stored does not grow with the batch.
    """
    places, columns = math.prod(ids.shape[1:]), d.shape[-1]
    grams = places <= columns
    stored = 2 * places * (columns + (places if grams else 2))
    return by_records(lambda ids, d: _over_positions(ids, d, skip, product, grams), ids, d, stored)


def _over_positions(ids: Tensor, d: Tensor, skip: int | None, product: torch.dtype, grams: bool) -> Tensor:
    places = math.prod(ids.shape[1:])
    rows, ds = ids.reshape(ids.shape[0], places), d.reshape(ids.shape[0], places, d.shape[-1]).double()
    if skip is not None:
        ds = torch.where((rows == skip)[..., None], 0.0, ds)
    squares = ds.square().sum((1, 2))
    if places <= 1:
        return (squares + ds.shape[2] * torch.finfo(torch.float32).tiny).sqrt().float()
    free = places * squares
    if grams:
        gram = ((ds @ ds.mT) * (rows[:, :, None] == rows[:, None, :])).sum((1, 2)).clamp(min=0)
        exact = (gram + (ds.shape[2] + places**2 + 8) * 2.0**-53 * free).sqrt()
    else:  # as in position_gram
        square = _summed_by_row(rows, ds).square().sum((1, 2))
        exact = (square + 2.0**-106 * free).sqrt() + (places + 8) * 2.0**-53 * free.sqrt()
    found = exact + product_rounding(places, product) * free.sqrt()
    return torch.maximum(found, CANCELLED * free.sqrt()).float()


def _summed_by_row(rows: Tensor, ds: Tensor) -> Tensor:
    """Cotangents of each record added over the positions that hit one row, the sums in any order; zeros fill up."""
    ordered, order = rows.sort(1)
    number = torch.cat([torch.zeros_like(rows[:, :1]), (ordered.diff(dim=1) != 0).cumsum(1)], 1)  # of the row, sorted
    places = torch.empty_like(number).scatter(1, order, number)[..., None].expand_as(ds)
    return torch.zeros_like(ds).scatter_add(1, places, ds)


def embedding_scale(
    ids: Tensor, d: Tensor, limits: Tensor, flags: int, skip: int | None, product: torch.dtype,
    counter: Counts | None = None,
) -> Tensor | None:  # fmt: skip
    """Scale of each record: a cap meets the exact norm, a certified bound the product of the factors' norms."""
    if flags == 0:
        return None
    both = embedding_factors(ids, d)
    if not flags & CAP or flags & BOUND:
        return record_scale(*both, limits, flags, counter)
    scale = record_scale(*both, limits, flags & ~CAP, counter)
    return cap_scale(scale, embedding_norm(ids, d, skip, product), *both, limits[2], counter)


def embedding_sums(ids: Tensor, d: Tensor, scale: Tensor | None, rows: int, skip: int, dtype: torch.dtype) -> Tensor:
    """Scaled cotangents summed per row of the table; ``skip`` is the row that gets none (-1: no such row)."""
    values = masked(d, scale, True)
    values = values.to(torch.promote_types(dtype, values.dtype))
    return torch.ops.aten.embedding_dense_backward(values, ids, rows, skip, False)


class Embedding(Kind):
    """Rows of a table."""

    def factors(self, part: Any, x: Tensor, d: Tensor, conf: Conf) -> Factors:
        return embedding_factors(x, d)

    def norm(self, part: Any, x: Tensor, d: Tensor, way: int, conf: Conf) -> Tensor:
        return embedding_norm(x, d, part.padding_idx, part._wc_product.dtype)

    def scale(self, part: Any, x: Tensor, d: Tensor, counter: Counts | None, conf: Conf) -> Tensor | None:
        limits, flags, product = part._wc_limits, part._wc_flags, part._wc_product.dtype
        return embedding_scale(x, d, limits, flags, part.padding_idx, product, counter)

    def sums(self, part: Any, x: Tensor, d: Tensor, scales: Tensor | None, conf: Conf, wide: bool = False) -> Sums:
        skip, rows = -1 if part.padding_idx is None else part.padding_idx, part.weight.shape[0]
        # a table's rows are added over records: what forms one record's product by itself does not help here
        dtype = torch.float64 if wide or part._wc_product.chunk else part._wc_product.dtype
        return embedding_sums(x, d, scales, rows, skip, dtype) if trains(part)[0] else None, None

    def gradients(self, part: Any, x: Tensor, d: Tensor, conf: Conf) -> list[Tensor]:
        ids, ds = x.reshape(x.shape[0], -1), d.double().reshape(x.shape[0], -1, d.shape[-1])
        if part.padding_idx is not None:
            ds = ds * (ids != part.padding_idx)[..., None]
        table = ds.new_zeros(len(ids), part.weight.shape[0], ds.shape[-1])
        return [table.scatter_add_(1, ids[..., None].expand_as(ds), ds)]

    def certified(self, part: Any, x: Tensor, d: Tensor, both: Factors, measure: Measure, conf: Conf) -> Tensor:
        product = super().certified(part, x, d, both, measure, conf)
        return product if measure.entrywise == 2 else torch.minimum(product, one_norm(d))


EMBEDDING = Embedding()


class EmbeddingFunction(torch.autograd.Function):
    """Native lookup forward; every row of the table gets a (dense) gradient, so every row gets noise.

    Its arguments are those of the other kinds, a bias it never has included.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(indices, weight, bias, token, key, limits, flags, padding_idx, dtype):
        """Native forward."""
        return own(F.embedding(indices, weight, padding_idx))

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Keep what the backward needs."""
        indices, weight, _, token, ctx.key, limits, flags, padding_idx, dtype = inputs
        ctx.save_for_backward(indices, token, limits)
        ctx.settings = (flags, -1 if padding_idx is None else padding_idx, dtype, weight.shape[0], weight.dtype)

    @staticmethod
    def backward(ctx, d):
        """Sum of scaled cotangents per row."""
        indices, token, limits = ctx.saved_tensors
        flags, padding_idx, dtype, rows, native = ctx.settings
        gradient = None
        if ctx.key:
            collect(ctx.key, token, indices, d)
        else:
            scale = embedding_scale(indices, d, limits, flags, padding_idx, dtype)
            gradient = embedding_sums(indices, d, scale, rows, padding_idx, dtype).to(native)
        return None, gradient, *[None] * 7
