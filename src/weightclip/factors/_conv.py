"""Convolutions, plain and transposed, with the weight gradient formed from scaled cotangents."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weightclip.factors._kind import Conf, Factors, Kind, Measure, Sums, entrywise_bound, one_norm
from weightclip.factors._limits import (
    BOUND,
    CANCELLED,
    CAP,
    KIND_SHIFT,
    Counts,
    apart,
    beta_of,
    cap_scale,
    formed_in,
    masked,
    no_autocast,
    of_one_record,
    product_rounding,
    record_norm,
    record_scale,
    squared_norm,
    trained_input,
    trains,
    transforming,
    unchunked,
    wide,
)
from weightclip.factors._own import Own, conv_gradients, forms_own
from weightclip.factors._passes import collect
from weightclip.factors._record_norms import CHANNEL, FREE, Shape, conv_record_norm, numbers, patches
from weightclip.factors.kernels._products import (
    fits,
    fits_scale,
    fused_norms,
    fused_scale,
    gradient_squares,
    laid_out,
    record_sums,
    weight_gradient,
)
from weightclip.factors.kernels._tiles import fits_tiles, tile_norms, tile_sums


def patch_counts(size: int, kernel: int, stride: int, dilation: int, padding: int, out: int, like: Tensor) -> Tensor:
    """In how many patches each input place of one axis lies."""
    places = torch.arange(size, device=like.device)[:, None] + padding
    start = places - dilation * torch.arange(kernel, device=like.device)[None, :]
    inside = (start >= 0) & (start % stride == 0) & (start < out * stride)
    return inside.sum(1).to(torch.float32)


def patch_norm_squared(x: Tensor, out: tuple[int, ...], kernel, stride, dilation, padding) -> Tensor:
    """||U_i||_F^2 of each record's patch matrix, without forming it: squares weighted by patch counts."""
    energy = wide(x).square().sum(1) + x.shape[1] * torch.finfo(torch.float32).tiny  # records x spatial
    if not transforming():
        weights = patch_weights(x, tuple(out), tuple(kernel), stride, dilation, padding)
        return (energy.flatten(1) * weights).sum(1)
    for axis in reversed(range(len(out))):
        counts = patch_counts(
            x.shape[2 + axis], kernel[axis], stride[axis], dilation[axis], padding[axis], out[axis], x
        ).to(energy.dtype)
        energy = (energy * counts).sum(-1)  # no matrix product: those may round operands to TF32
    return energy


def patch_energies(x: Tensor, shape: Shape) -> Tensor:
    """Sum of squares of each patch of each record: (records, output positions), all channels of the input."""
    energy = wide(x).square().sum(1)
    for axis, (k, s, p, e) in enumerate(zip(shape.kernel, shape.stride, shape.padding, shape.dilation, strict=True)):
        energy = F.pad(energy, [0, 0] * (energy.dim() - axis - 2) + [p, p]) if p else energy
        energy = energy.unfold(1 + axis, e * (k - 1) + 1, s)[..., ::e].sum(-1)
    return energy + x.shape[1] * math.prod(shape.kernel) * torch.finfo(torch.float32).tiny  # squares that vanish


conv_weights: dict[Any, Tensor] = {}


def patch_weights(x: Tensor, out: tuple[int, ...], kernel, stride, dilation, padding) -> Tensor:
    """In how many patches each input position lies: float32, one number a position, kept for the next step."""
    key = (x.device, tuple(x.shape[2:]), out, kernel, tuple(stride), tuple(dilation), tuple(padding))
    if key not in conv_weights:
        weights = torch.ones((), device=x.device)
        for axis, size in enumerate(x.shape[2:]):
            more = patch_counts(size, kernel[axis], stride[axis], dilation[axis], padding[axis], out[axis], x)
            weights = weights[..., None] * more
        if len(conv_weights) >= 256:
            conv_weights.clear()
        conv_weights[key] = weights.flatten().contiguous()
    return conv_weights[key]


def channel_sums(d: Tensor, scale: Tensor | None, alone: bool = False) -> Tensor:
    """sum_i scale_i sum over positions of delta_i, in float64; ``alone``: float32 within a record, whose own rounding
    that is (as that of a product of one record, ``_release.sum_slack``)."""
    if fits(d, d):
        return record_sums(d.flatten(2), scale)[0]
    flat = d.flatten(2)
    sums = flat.sum(2).double() if alone and d.dtype == torch.float32 else flat.sum(2, dtype=torch.float64)
    if scale is not None:
        sums = torch.where((scale > 0)[:, None], sums * scale[:, None], 0.0)
    return sums.sum(0)


def conv_product(x, d, scale, weight, conf, dtype, chunk, transposed, output_padding) -> Tensor:
    """Weight gradient of the batch from scaled cotangents, in ``dtype``, chunks summed in float64."""
    stride, padding, dilation, groups = conf
    if dtype == torch.float64 and by_kernel(x, d, groups, transposed):
        return weight_gradient(x, d, scale, weight.shape[2:], stride, padding, dilation)[0]
    # each record is scaled when its turn comes, by a plain number
    alone = chunk == 1 and x.device.type == "cpu" and not transforming() and not torch.is_grad_enabled()
    if not alone:
        d, x = masked(d, scale, True), masked(x, scale, False)
    dtype = torch.promote_types(dtype, x.dtype)  # values of a float64 model may lie beyond float32
    if dtype == torch.float64 and x.is_cuda and x.dim() == 4 and groups == 1 and not transposed:
        return by_taps(x, d, weight.shape[2:], stride, padding, dilation)
    dtype, chunk = unchunked(dtype, chunk)
    kernel = weight.to(dtype)

    def product(x: Tensor, d: Tensor) -> Tensor:
        return torch.ops.aten.convolution_backward(
            d.to(dtype), x.to(dtype), kernel, None, stride, padding, dilation, transposed, output_padding, groups,
            (False, True, False),
        )[1]  # fmt: skip

    if alone:
        return _one_by_one(product, x, d, scale, kernel)
    if chunk <= 0:
        return product(x, d)
    total = product(x[:chunk], d[:chunk]).double()
    for start in range(chunk, x.shape[0], chunk):
        total.add_(product(x[start : start + chunk], d[start : start + chunk]))
    return total


def _one_by_one(product: Any, x: Tensor, d: Tensor, scale: Tensor | None, kernel: Tensor) -> Tensor:
    """Products of one record each, scaled and summed in float64."""
    total = torch.zeros(kernel.shape, dtype=torch.float64)
    for i, s in enumerate([1.0] * len(x) if scale is None else scale.tolist()):
        if s > 0:  # others contribute exact zeros, whatever they hold
            total.add_(product(x[i : i + 1], d[i : i + 1]), alpha=s)
    return total


def by_taps(x: Tensor, d: Tensor, kernel, stride, padding, dilation) -> Tensor:
    """The weight gradient of a 2-D convolution as one float64 matrix product per kernel entry.

    At stride 1 both tensors are laid on the padded grid, channels last: a tap then is a shift of the flat rows, read in
    place, and rows that wrap around meet the zeros of the cotangent's border. Other strides gather each tap's window.
    On an H200 this is two to three times faster than cuDNN in float64.
    """
    records, channels = x.shape[:2]
    height, width = d.shape[2:]
    border = (0, 0, padding[1], padding[1], padding[0], padding[0])
    grid = F.pad(x.permute(0, 2, 3, 1).double(), border)  # records x rows x columns x channels
    taps = [(i * dilation[0], j * dilation[1]) for i in range(kernel[0]) for j in range(kernel[1])]
    if tuple(stride) == (1, 1):
        rows, columns = grid.shape[1:3]
        laid = F.pad(d.permute(0, 2, 3, 1).double(), (0, 0, 0, columns - width, 0, rows - height))
        left, right = laid.reshape(-1, d.shape[1]), grid.reshape(-1, channels)
        total = left.shape[0]
        shifts = [top * columns + first for top, first in taps]
        parts = [left[: total - k].t() @ right[k:] for k in shifts]
    else:
        left = d.permute(1, 0, 2, 3).reshape(d.shape[1], -1).double()  # out x (records positions)
        high, wide = (height - 1) * stride[0] + 1, (width - 1) * stride[1] + 1
        windows = [grid[:, t : t + high : stride[0], f : f + wide : stride[1]] for t, f in taps]
        parts = [left @ window.reshape(-1, channels) for window in windows]
    return torch.stack(parts, 2).unflatten(2, tuple(kernel))  # out x in x kernel


def conv_factors(x: Tensor, d: Tensor, beta: float, shape: Shape) -> tuple[Tensor, Tensor]:
    """Norm of each record's patch matrix with its row of beta (transposed: its bound), and of its cotangent."""
    out = tuple(d.shape[2:])
    if shape.transposed:
        squares = shape.overlap * squared_norm(x)
    else:
        squares = patch_norm_squared(x, out, shape.kernel, shape.stride, shape.dilation, shape.padding)
    return (squares + beta**2 * math.prod(out)).sqrt(), record_norm(d)


def conv_norm(x: Tensor, d: Tensor, beta: float, shape: Shape, kind: int, product: torch.dtype) -> Tensor:
    """Norm of each record's gradient, or a bound of it, in the way asked for."""
    if kind == FREE and not shape.transposed and fits_scale(x, d, 1):
        return fused_norms(x, d, beta**2 * math.prod(d.shape[2:]), _counts(x, d, shape))
    if kind == FREE or _odd(shape):
        x_norm, d_norm = conv_factors(x, d, beta, shape)
        return x_norm * d_norm
    return _norm(x, d, beta, shape, kind, product)


def _norm(x: Tensor, d: Tensor, beta: float, shape: Shape, kind: int, product: torch.dtype) -> Tensor:
    if shape.transposed:  # input and cotangent change roles; the bias sees the cotangent itself
        x_norm, d_norm = conv_factors(x, d, 0.0, shape)
        weight = conv_record_norm(d, x, shape.geometry(), 0.0, kind, product, free=x_norm * d_norm)
        places = math.prod(d.shape[2:])
        bias = d.double().flatten(2).sum(2).square().sum(1).sqrt()
        bias = bias + product_rounding(places, product) * math.sqrt(places) * record_norm(d.double())
        return torch.hypot(weight.double(), beta * bias).float() * (1 + 2.0**-22)
    if kind != CHANNEL and _tiled(x, d, shape, product):
        return tile_norms(x, d, beta, shape.window(), _counts(x, d, shape))
    if kind != CHANNEL and not torch.is_grad_enabled() and by_kernel(x, d, shape.groups, shape.transposed):
        return _by_products(x, d, beta, shape, product)
    x_norm, d_norm = conv_factors(x, d, beta, shape)
    return conv_record_norm(x, d, shape.geometry(), beta, kind, product, free=x_norm * d_norm)


def _by_products(x: Tensor, d: Tensor, beta: float, shape: Shape, product: torch.dtype) -> Tensor:
    """Norm of each record's gradient by the kernel that sums them, one record at a time; as `conv_record_norm`."""
    places, (x, d) = math.prod(d.shape[2:]), (t if fits_scale(t, t, 1) else t.contiguous() for t in (x, d))
    free = fused_norms(x, d, beta**2 * places, _counts(x, d, shape)).double() * (1 + 2.0**-8)  # of float32 sums
    square = gradient_squares(x, d, shape.kernel, shape.stride, shape.padding, shape.dilation)
    rounding = product_rounding(places, product)
    if beta:  # a row in float32, rows in float64
        square = square + (beta * wide(d).sum(3).sum(2, dtype=torch.float64)).square().sum(1)
        rounding += (d.shape[3] + 8) * 2.0**-24
    return torch.maximum(square.sqrt() + rounding * free, CANCELLED * free).float()


def _counts(x: Tensor, d: Tensor, shape: Shape) -> Tensor:
    return patch_weights(x, tuple(d.shape[2:]), shape.kernel, shape.stride, shape.dilation, shape.padding)


def _odd(shape: Shape) -> bool:
    """Whether a transposed convolution's output reaches beyond what its input's places lead to: only the free bound."""
    return shape.transposed and any(e >= s for e, s in zip(shape.extra, shape.stride, strict=True))


def _tiled(x: Tensor, d: Tensor, shape: Shape, product: torch.dtype) -> bool:
    """Whether tensor cores form the product of one record at a time."""
    if product != torch.float32 or x.dim() != 4 or shape.groups > 1 or shape.transposed:
        return False
    return fits_tiles(x, d, math.prod(d.shape[2:]), convolution=True)


def conv_scale(
    x: Tensor, d: Tensor, limits: Tensor, flags: int, beta: float, shape: Shape, product: torch.dtype = torch.float64,
    counter: Counts | None = None,
) -> Tensor | None:  # fmt: skip
    """Scale of each record; a cap meets the norm its kind asks for."""
    if flags == 0:
        return None
    flags = flags & ~BOUND  # whose kind is FREE
    if not shape.transposed and counter is None and fits_scale(x, d, flags):
        return fused_scale(x, d, limits, flags, beta**2 * math.prod(d.shape[2:]), _counts(x, d, shape))
    kind = flags >> KIND_SHIFT
    if flags & 7 == CAP and kind not in (FREE, CHANNEL) and counter is None and _tiled(x, d, shape, product):
        norm = _norm(x, d, beta, shape, kind, product)  # not finite where a factor is not
        return cap_scale(None, norm, norm, norm, limits[2])
    x_norm, d_norm = conv_factors(x, d, beta, shape)
    if not flags & CAP or kind == FREE or _odd(shape):
        return record_scale(x_norm, d_norm, limits, flags, counter)
    scale = record_scale(x_norm, d_norm, limits, flags & ~CAP, counter)
    norm = _norm(x, d, beta, shape, kind, product)
    return cap_scale(scale, norm, x_norm, d_norm, limits[2], counter)


def conv_sums(
    x: Tensor, d: Tensor, scale: Tensor | None, like: Tensor, shape: Shape, product: tuple[torch.dtype, int],
    wanted: tuple[bool, bool], wide: bool = False,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of kernel and bias summed over records, each only if wanted; laid out as the weight ``like``."""
    if product == (torch.float32, 1) and wanted[0] and _tiled(x, d, shape, torch.float32):
        weight = tile_sums(x, d, scale, shape.window(), torch.float64 if wide else like.dtype)
        return laid_out(weight, like, wide), channel_sums(d, scale) if wanted[1] else None
    dtype, chunk = of_one_record(product, x)
    if wanted[0] and dtype == torch.float64 and by_kernel(x, d, shape.groups, shape.transposed):
        sizes = like.shape[2:], shape.stride, shape.padding, shape.dilation
        weight, bias = weight_gradient(x, d, scale, *sizes, wanted[1])
        return laid_out(weight, like, wide), bias
    weight = bias = None
    if wanted[0]:
        weight = conv_product(x, d, scale, like, shape.conf, dtype, chunk, shape.transposed, shape.extra)
    if wanted[1]:
        bias = channel_sums(d, scale, dtype == torch.float32 and chunk == 1)
    return weight, bias


def laid_as(value: Tensor, weight: Tensor) -> Tensor:
    """Channels last where the kernel is (what group normalisation makes usually is not): one copy for all readers."""
    if weight.dim() != 4 or weight.is_contiguous() or not weight.is_contiguous(memory_format=torch.channels_last):
        return value
    return value.contiguous(memory_format=torch.channels_last)


def shape_of(part: Any, conf: Conf) -> Shape:
    """The numbers of one use of a convolution, as its forward pass had them."""
    kernel = part.weight.shape[2:]
    return Shape.of((*kernel, *[1] * ((len(conf) - 2) // 4 - len(kernel))), conf)


class Conv(Kind):
    """Convolutions, plain and transposed."""

    def grouped(self, x: Tensor, d: Tensor, conf: Conf, m: int) -> tuple[Tensor, Tensor, Conf]:
        """Rows of a record are one more axis, which the kernel does not reach along."""
        n = (len(conf) - 2) // 4
        stride, padding, dilation, extra = (conf[i * n : (i + 1) * n] for i in range(4))
        x, d = (t.unflatten(0, (-1, m)).movedim(1, -1) for t in (x, d))
        return x, d, [*stride, 1, *padding, 0, *dilation, 1, *extra, 0, *conf[4 * n :]]

    def factors(self, part: Any, x: Tensor, d: Tensor, conf: Conf) -> Factors:
        return conv_factors(x, d, beta_of(part), shape_of(part, conf))

    def norm(self, part: Any, x: Tensor, d: Tensor, way: int, conf: Conf) -> Tensor:
        return conv_norm(trained_input(part, x), d, beta_of(part), shape_of(part, conf), way, formed_in(part, x))

    def scale(self, part: Any, x: Tensor, d: Tensor, counter: Counts | None, conf: Conf) -> Tensor | None:
        limits, flags, beta, product = part._wc_limits, part._wc_flags, beta_of(part), formed_in(part, x)
        return conv_scale(x, d, limits, flags, beta, shape_of(part, conf), product, counter)

    def sums(self, part: Any, x: Tensor, d: Tensor, scales: Tensor | None, conf: Conf, wide: bool = False) -> Sums:
        product = apart(part, wide)
        return conv_sums(x, d, scales, part.weight, shape_of(part, conf), product, trains(part), wide)

    def gradients(self, part: Any, x: Tensor, d: Tensor, conf: Conf) -> list[Tensor]:
        shape = shape_of(part, conf)
        image, other = (d, x) if shape.transposed else (x, d)
        u = patches(image.double(), shape.geometry())  # records x groups x patch x positions
        e = other.double().flatten(2).unflatten(1, (shape.groups, -1))
        found = [e @ u.mT] if trains(part)[0] else []  # records x groups x out x patch, as the weight lies
        return [*found, beta_of(part) * d.double().flatten(2).sum(2)] if trains(part)[1] else found

    def own(self, part: Any, x: Tensor, d: Tensor, conf: Conf, way: int) -> Own | None:
        shape, (weight, bias) = shape_of(part, conf), trains(part)
        if shape.transposed or not forms_own(part, x, way):
            return None
        found = conv_gradients(x.float(), d.float(), shape.geometry(), part.weight) if weight else None
        return Own(found, d.flatten(2).sum(2, dtype=torch.float64) if bias else None)

    def certified(self, part: Any, x: Tensor, d: Tensor, both: Factors, measure: Measure, conf: Conf) -> Tensor:
        product, shape, beta = super().certified(part, x, d, both, measure, conf), shape_of(part, conf), beta_of(part)
        if measure.entrywise in (1, math.inf):
            return entrywise_bound(product, x, d, beta, measure.entrywise == 1, False)
        if measure.entrywise is None and not shape.transposed:
            largest = (patch_energies(x, shape).flatten(1).amax(1) + beta**2).sqrt()
            return torch.minimum(product, largest * one_norm(d))
        return product


CONV = Conv()


class ConvFunction(torch.autograd.Function):
    """Native convolution forward; backward with bounded factors in the weight gradient only (see DenseFunction)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x, weight, bias, token, key, limits, flags, beta, dtype, chunk, stride, padding, dilation, groups, transposed,
        extra,
    ):  # fmt: skip
        """Native forward."""
        if weight.dtype != x.dtype:  # as cast by autocast, which does not know this operator everywhere
            weight, bias = weight.to(x.dtype), bias if bias is None else bias.to(x.dtype)
        return torch.convolution(x, weight, bias, stride, padding, dilation, transposed, extra, groups)

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Keep what the backward needs."""
        x, weight, bias, token, ctx.key, limits, flags, beta, dtype, chunk, *conf = inputs
        ctx.save_for_backward(x, weight, token, limits)
        ctx.settings, ctx.conf = (flags, beta, dtype, chunk), conf

    @staticmethod
    def backward(ctx, d):
        """Ordinary input gradient; weight gradient from s_i delta_i (SOUNDNESS section 4)."""
        x, weight, token, limits = ctx.saved_tensors
        flags, beta, dtype, chunk = ctx.settings
        stride, padding, dilation, groups, transposed, extra = ctx.conf
        gx = gw = gb = None
        d = laid_as(d, weight)
        with no_autocast(d.device.type):
            if ctx.needs_input_grad[0]:
                gx = torch.ops.aten.convolution_backward(
                    d, x.to(d.dtype), weight.to(d.dtype), None, stride, padding, dilation, transposed, extra, groups,
                    (True, False, False),
                )[0].to(x.dtype)  # fmt: skip
            if ctx.key:
                collect(ctx.key, token, x, d, numbers(*ctx.conf))
            elif ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
                shape = Shape(tuple(weight.shape[2:]), *ctx.conf)
                scale = conv_scale(x, d, limits, flags, beta if ctx.needs_input_grad[2] else 0.0, shape, dtype)
                gw, gb = conv_sums(x, d, scale, weight, shape, (dtype, chunk), ctx.needs_input_grad[1:3])
                gw, gb = (g if g is None else g.to(weight.dtype) for g in (gw, gb))
        return gx, gw, gb, *[None] * 13


def by_kernel(x: Tensor, d: Tensor, groups: int, transposed: bool) -> bool:
    """Whether ``weight_gradient`` can take these factors."""
    return x.dim() == 4 and groups == 1 and not transposed and fits(x, d)
