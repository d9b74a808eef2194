"""Dense layers: y = Wx + bias with the weight gradient formed from scaled cotangents."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weightclip.factors._kind import Conf, Factors, Kind, Measure, Sums, entrywise_bound
from weightclip.factors._limits import (
    BOUND,
    CANCELLED,
    CAP,
    Counts,
    apart,
    beta_of,
    both_masked,
    cap_scale,
    masked,
    no_autocast,
    of_one_record,
    own,
    product_rounding,
    record_norm,
    record_scale,
    squared_norm,
    trained_input,
    trains,
    transforming,
    unchunked,
)
from weightclip.factors._own import Own, forms_own
from weightclip.factors._passes import collect
from weightclip.factors._record_norms import by_records
from weightclip.factors.kernels._products import (
    dense_gradient,
    fits,
    fits_scale,
    fused_norms,
    fused_scale,
    laid_out,
    over_records,
    record_sums,
    tile_bias,
)
from weightclip.factors.kernels._products_totals import fits_totals, keep, kept, scale_and_totals
from weightclip.factors.kernels._tiles import fits_tiles, tile_norms, tile_sums

_CACHE = 1 << 20  # entries of a float64 copy that stays in the cache


def dense_scale(
    x: Tensor, d: Tensor, limits: Tensor, flags: int, beta: float, product: torch.dtype = torch.float64,
    counter: Counts | None = None,
) -> Tensor | None:  # fmt: skip
    """Scale of each record: exact product norm for one position, position Grams where a cap meets several."""
    if flags == 0:
        return None
    places = math.prod(x.shape[1:-1])
    free = places == 1 or not flags & CAP or bool(flags & BOUND)
    if free and counter is None and x.is_cuda and fits_scale(x, d, flags & 7):
        return fused_scale(x, d, limits, flags & 7, beta**2 * places)
    if not free and counter is None and flags & 7 == CAP:
        norm = dense_norm(x, d, beta, product)  # not finite where a factor is not
        return cap_scale(None, norm, norm, norm, limits[2])
    x_norm, d_norm = dense_factors(x, d, beta)
    if free:
        return record_scale(x_norm, d_norm, limits, flags, counter)
    scale = record_scale(x_norm, d_norm, limits, flags & ~CAP, counter)
    return cap_scale(scale, dense_norm(x, d, beta, product), x_norm, d_norm, limits[2], counter)


def dense_factors(x: Tensor, d: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """||(x, beta)|| and ||delta|| of each record, over all its positions."""
    more = beta**2 * math.prod(x.shape[1:-1])
    return squared_norm(x, more).sqrt() if more else record_norm(x), record_norm(d)


def dense_norm(x: Tensor, d: Tensor, beta: float, product: torch.dtype) -> Tensor:
    """Norm of each record's gradient: exact for one position, by tiles or position Grams for several."""
    if math.prod(x.shape[1:-1]) > 1:
        return tile_norms(*_rows(x, d), beta) if _tiled(x, d, product) else position_gram(x, d, beta, product)
    if x.is_cuda and fits_scale(x, d, 1):
        return fused_norms(x, d, beta**2)
    return (squared_norm(x) + beta**2).sqrt() * record_norm(d)


def _tiled(x: Tensor, d: Tensor, product: torch.dtype) -> bool:
    """Whether tensor cores form the product of one record at a time."""
    if product != torch.float32 or not x.is_cuda:
        return False
    return fits_tiles(x, d, math.prod(x.shape[1:-1]), convolution=False)


def _totals_wanted(part: Any, x: Tensor, d: Tensor, flags: int) -> bool:
    """Whether the kernel of a record's scale finds its bias as well: the next to read the cotangents are tiles."""
    product = part._wc_product
    if product.chunk != 1 or not _tiled(x, d, product.dtype) or trains(part) != (True, True):
        return False
    free = (not flags & CAP or bool(flags & BOUND)) and fits_scale(x, d, flags & 7)
    return free and x.is_contiguous() and d.is_contiguous() and fits_totals(x, d, math.prod(x.shape[1:-1]))


def _rows(x: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """Both factors as (records, positions, channels)."""
    return (x, d) if x.dim() == 3 else (x.flatten(1, -2), d.flatten(1, -2))


def position_gram(x: Tensor, d: Tensor, beta: float, product: torch.dtype = torch.float64) -> Tensor:
    """||sum_s delta_s (x_s, beta)^T||_F of each record in float64, never less than what is formed.

    By S x S Grams or, where S (in + out) > in out, by the product itself, which is less work and memory then; so many
    records at a time that what is stored does not grow with the batch. Positions may cancel: the Grams' own rounding,
    c 2^-53 ||(x, beta)||^2 ||delta||^2, is added before the root, and that of the product after it (SOUNDNESS 4;
    float32 once cancelled 612 to 563).
    """
    places, width, out = math.prod(x.shape[1:-1]), x.shape[-1], d.shape[-1]
    grams = places * (width + out) <= width * out
    stored = places * (width + out) + (2 * places**2 if grams else width * out)
    return by_records(lambda x, d: _over_positions(x, d, beta, product, grams), x, d, stored)


def _over_positions(x: Tensor, d: Tensor, beta: float, product: torch.dtype, grams: bool) -> Tensor:
    xs, ds = x.flatten(1, -2).double(), d.flatten(1, -2).double()
    places = xs.shape[1]
    free = (xs.square().sum((1, 2)) + beta**2 * places) * ds.square().sum((1, 2))
    if grams:
        gram = (xs @ xs.transpose(1, 2) + beta**2) * (ds @ ds.transpose(1, 2))
        terms = xs.shape[2] + ds.shape[2] + places**2 + 8
        exact = (gram.sum((1, 2)).clamp(min=0) + terms * 2.0**-53 * free).sqrt()
    else:  # each entry is off by at most S 2^-53 ||x_a|| ||delta_b||; what stands below the root keeps it smooth
        square = (ds.transpose(1, 2) @ xs).square().sum((1, 2)) + beta**2 * ds.sum(1).square().sum(1)
        exact = (square + 2.0**-106 * free).sqrt() + (places + 8) * 2.0**-53 * free.sqrt()
    found = exact + product_rounding(places, product, x.is_cuda) * free.sqrt()
    return torch.maximum(found, CANCELLED * free.sqrt()).to(torch.float32)


def dense_product(x: Tensor, d: Tensor, scale: Tensor | None, dtype: torch.dtype, chunk: int) -> Tensor:
    """sum_i scale_i delta_i x_i^T, in ``dtype``, optionally in chunks of records summed in float64."""
    if dtype == torch.float64 and x.is_cuda and fits(x, d):
        return dense_gradient(x, d, scale)[0]
    d, x = masked(d, scale, True), masked(x, scale, False)
    dtype = torch.promote_types(dtype, x.dtype)  # values of a float64 model may lie beyond float32
    dtype, chunk = unchunked(dtype, chunk)

    def product(x: Tensor, d: Tensor) -> Tensor:
        return d.reshape(-1, d.shape[-1]).to(dtype).t() @ x.reshape(-1, x.shape[-1]).to(dtype)

    if chunk <= 0 and dtype == torch.float64 and x.device.type == "cpu" and not transforming():
        return _in_blocks(_flat(x), _flat(d))
    if chunk <= 0:
        return product(x, d)
    total = product(x[:chunk], d[:chunk]).double()
    for start in range(chunk, x.shape[0], chunk):
        total = total + product(x[start : start + chunk], d[start : start + chunk])
    return total


def _in_blocks(x: Tensor, d: Tensor) -> Tensor:
    """d^T x in float64, in blocks of rows whose float64 copies stay in the cache: several times faster if x is wide."""
    rows = max(64, _CACHE // x.shape[1]) if x.shape[1] else x.shape[0]
    if rows >= x.shape[0]:
        return d.double().t() @ x.double()
    total = torch.zeros(d.shape[1], x.shape[1], dtype=torch.float64)
    for start in range(0, len(x), rows):
        total.addmm_(d[start : start + rows].double().t(), x[start : start + rows].double())
    return total


def bias_product(d: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """sum_i scale_i delta_i over records and positions, channels last."""
    if d.is_cuda and fits(d, d):
        return record_sums(d.reshape(d.shape[0], -1, d.shape[-1]).transpose(1, 2), scale)[0]
    d = masked(d, scale, True)
    return _flat(d).sum(0, dtype=torch.promote_types(dtype, torch.float64))


def _flat(value: Tensor) -> Tensor:
    """Records and positions on dimension 0."""
    return value if value.dim() == 2 else value.reshape(-1, value.shape[-1])


def dense_sums(
    x: Tensor,
    d: Tensor,
    scale: Tensor | None,
    like: Tensor,
    product: tuple[torch.dtype, int],
    wanted: tuple[bool, bool],
    group: int = 0,
    wide: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of weight and bias summed over records, each only if wanted; laid out as the weight ``like``."""
    if product == (torch.float64, 0) and x.is_cpu and d.numel() <= _CACHE and not transforming():
        x, d = (x, d) if scale is None else both_masked(x, d, scale)
        d = _flat(d).double()  # one copy for both gradients
        return _in_blocks(_flat(x), d) if wanted[0] else None, d.sum(0) if wanted[1] else None
    if product == (torch.float32, 1) and wanted[0] and _tiled(x, d, torch.float32):
        totals = kept(x, d)
        x, d = _rows(x, d)
        stored, group = (torch.float64, 0) if wide else (like.dtype, group)
        weight = tile_sums(x, d, scale, stored=stored, group=group)[:, :, 0, 0]
        if not wanted[1]:
            return laid_out(weight, like, wide), None
        return laid_out(weight, like, wide), tile_bias(d, scale) if totals is None else over_records(totals, scale)[0]
    by_kernel, (dtype, chunk) = x.is_cuda and fits(x, d), of_one_record(product, x)
    if scale is not None and not by_kernel:  # scaled once for both gradients
        x, d, scale = *both_masked(x, d, scale), None
    if by_kernel and dtype == torch.float64 and wanted[0]:
        weight, bias = dense_gradient(x, d, scale, wanted[1])
        return laid_out(weight, like, wide), bias
    return (
        dense_product(x, d, scale, dtype, chunk) if wanted[0] else None,
        bias_product(d, scale, dtype) if wanted[1] else None,
    )


class Dense(Kind):
    """y = Wx + bias over any number of positions."""

    def factors(self, part: Any, x: Tensor, d: Tensor, conf: Conf) -> Factors:
        return dense_factors(x, d, beta_of(part))

    def norm(self, part: Any, x: Tensor, d: Tensor, way: int, conf: Conf) -> Tensor:
        return dense_norm(trained_input(part, x), d, beta_of(part), part._wc_product.dtype)

    def scale(self, part: Any, x: Tensor, d: Tensor, counter: Counts | None, conf: Conf) -> Tensor | None:
        limits, flags, beta, product = part._wc_limits, part._wc_flags, beta_of(part), part._wc_product.dtype
        if counter is None and _totals_wanted(part, x, d, flags):
            scale, totals = scale_and_totals(x, d, limits, flags & 7, beta**2 * math.prod(x.shape[1:-1]))
            keep(x, d, totals)
            return scale
        return dense_scale(x, d, limits, flags, beta, product, counter)

    def sums(self, part: Any, x: Tensor, d: Tensor, scales: Tensor | None, conf: Conf, wide: bool = False) -> Sums:
        product, group = apart(part, wide), part._wc_product.group
        return dense_sums(x, d, scales, part.weight, product, trains(part), group, wide)

    def gradients(self, part: Any, x: Tensor, d: Tensor, conf: Conf) -> list[Tensor]:
        xs, ds = (t.double().reshape(t.shape[0], -1, t.shape[-1]) for t in (x, d))
        found = [ds.mT @ xs] if trains(part)[0] else []
        return [*found, beta_of(part) * ds.sum(1)] if trains(part)[1] else found

    def own(self, part: Any, x: Tensor, d: Tensor, conf: Conf, way: int) -> Own | None:
        if math.prod(x.shape[1:-1]) <= 1 or not forms_own(part, x, way):
            return None
        weight, bias = trains(part)
        left, right = (t.float().reshape(len(t), -1, t.shape[-1]) for t in (d, x))
        found = torch.bmm(left.mT, right).flatten(1) if weight else None
        return Own(found, d.reshape(len(d), -1, d.shape[-1]).sum(1, dtype=torch.float64) if bias else None)

    def certified(self, part: Any, x: Tensor, d: Tensor, both: Factors, measure: Measure, conf: Conf) -> Tensor:
        product = super().certified(part, x, d, both, measure, conf)
        if measure.entrywise in (None, 2):
            return product
        single = math.prod(x.shape[1:-1]) == 1
        return entrywise_bound(product, x, d, beta_of(part), measure.entrywise == 1, single)


class Outer(Dense):
    """A dense layer on outer products of two inputs, whose weight has a dimension for each."""

    def sums(self, part: Any, x: Tensor, d: Tensor, scales: Tensor | None, conf: Conf, wide: bool = False) -> Sums:
        product, group = apart(part, wide), part._wc_product.group
        weight, bias = dense_sums(x, d, scales, part.weight.flatten(1), product, trains(part), group, wide)
        return weight if weight is None else weight.reshape(part.weight.shape), bias

    def own(self, part: Any, x: Tensor, d: Tensor, conf: Conf, way: int) -> Own | None:
        return None


DENSE, OUTER = Dense(), Outer()


class DenseFunction(torch.autograd.Function):
    """The native dense layer forward; backward with bounded factors in the weight gradient only.

    With a ``key`` both factors go to the engine's collector and the weight gets no gradient from autograd; without one
    (audits, which differentiate it once more) the limited product is returned as the gradient.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x, weight, bias, token, key, limits, flags, beta, dtype, chunk):
        """Native forward."""
        return own(F.linear(x, weight, bias))

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Keep what the backward needs."""
        x, weight, bias, token, ctx.key, limits, *ctx.settings = inputs
        ctx.save_for_backward(x, weight, token if ctx.key else limits)

    @staticmethod
    def backward(ctx, d):
        """Ordinary input gradient; weight gradient from s_i delta_i (SOUNDNESS section 4)."""
        x, weight, token = ctx.saved_tensors
        gx = gw = gb = None
        with no_autocast(d.device.type):
            if ctx.needs_input_grad[0]:
                gx = (d @ weight.to(d.dtype)).to(x.dtype)
            if ctx.key:
                collect(ctx.key, token, x, d)
            elif ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
                limits, (flags, beta, dtype, chunk) = token, ctx.settings
                scale = dense_scale(x, d, limits, flags, beta if ctx.needs_input_grad[2] else 0.0, dtype)
                gw, gb = dense_sums(x, d, scale, weight, (dtype, chunk), ctx.needs_input_grad[1:3])
                gw, gb = (g if g is None else g.to(weight.dtype) for g in (gw, gb))
        return gx, gw, gb, *[None] * 7
