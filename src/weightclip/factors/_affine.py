"""The affine part of a normalisation layer: y = gamma * x + b per channel, with bounded factors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from weightclip.factors._kind import Conf, Factors, Kind, Sums
from weightclip.factors._limits import (
    BOUND,
    CAP,
    Counts,
    beta_of,
    cap_scale,
    masked,
    product_rounding,
    record_norm,
    record_scale,
    trained_input,
    trains,
    wide,
)
from weightclip.factors._passes import collect
from weightclip.factors.kernels._products import channel_scale, fits, over_records, record_sums
from weightclip.factors.kernels._products_totals import fits_totals, keep, kept


def shaped(value: Tensor, like: Tensor, first: int) -> Tensor:
    """A parameter viewed so that it broadcasts over (records, ...): its own dimensions start at ``first``."""
    return value.reshape((1,) * first + tuple(value.shape) + (1,) * (like.dim() - first - value.dim()))


def summed(value: Tensor, shape: torch.Size, first: int) -> Tensor:
    """Sum over records and over every dimension the parameter does not have, in float64."""
    dims = [d for d in range(value.dim()) if not first <= d < first + len(shape)]
    return value.sum(dims, dtype=torch.float64).reshape(shape)


def affine_record_norm(x: Tensor, d: Tensor, dims: list[int], beta: float) -> Tensor:
    """Norm of each record's gradient of (gamma, beta b), never less than what is formed (positions may cancel).

    ``dims`` are the dimensions the parameters do not have.
    """
    rounding = 2 * product_rounding(math.prod(x.shape[1:]), torch.float64)
    if _by_kernel(x, d, dims):
        return _channel_scale(x, d, dims, None, 0, beta, rounding)
    bias_part = d.double()
    weight_part = bias_part * x.double()
    free = (weight_part.flatten(1).abs().sum(1) + beta * bias_part.flatten(1).abs().sum(1)).square()
    if dims:
        weight_part, bias_part = weight_part.sum(dims), bias_part.sum(dims)
    exact = weight_part.flatten(1).square().sum(1) + beta**2 * bias_part.flatten(1).square().sum(1)
    return (exact.sqrt() + rounding * free.sqrt()).float()


def _by_kernel(x: Tensor, d: Tensor, dims: list[int]) -> bool:
    """Whether the kernels of a gain and an offset per channel can take the factors."""
    return len(dims) == x.dim() - 2 and fits(x, d)


def _channel_scale(
    x: Tensor, d: Tensor, dims: list[int], limits: Tensor | None, flags: int, beta: float, rounding: float = 0.0
) -> Tensor:
    """``channel_scale``, and with it each record's sums over positions, kept for :func:`affine_sums`."""
    first, totals = next(k for k in range(1, x.dim()) if k not in dims), None
    left, right = by_channel(x, first), by_channel(d, first)
    if fits_totals(x, d, right.shape[2]):
        totals = torch.empty(len(d), 2, right.shape[1], dtype=torch.float64, device=d.device)
        keep(x, d, totals)
    return channel_scale(left, right, limits, flags, beta, rounding, totals)


def free_dims(x: Tensor, weight: Tensor, first: int) -> list[int]:
    """Dimensions of an activation, besides the records, that the parameters do not have."""
    return [k for k in range(1, x.dim()) if not first <= k < first + weight.dim()]


def affine_factors(x: Tensor, d: Tensor, beta: float, dims: list[int]) -> tuple[Tensor, Tensor]:
    """Columns of different channels are disjoint: the parameter factor is the largest channel's norm."""
    energy = wide(x).square()
    energy = energy.sum(dims) if dims else energy
    shared = math.prod(x.shape[k] for k in dims)
    hidden = shared * torch.finfo(torch.float32).tiny  # squares that vanish
    return (energy.flatten(1).amax(1) + (beta**2 * shared + hidden)).sqrt(), record_norm(d)


def affine_scale(
    x: Tensor, d: Tensor, limits: Tensor, flags: int, beta: float, dims: list[int], counter: Counts | None = None
) -> Tensor | None:
    """Scale of each record; a cap meets the exact norm, a certified bound the factors' product."""
    if flags == 0:
        return None
    capped = flags & CAP and not flags & BOUND
    if counter is None and _by_kernel(x, d, dims):
        if capped and flags & 7 == CAP:
            norm = affine_record_norm(x, d, dims, beta)  # not finite where a factor is not
            return cap_scale(None, norm, norm, norm, limits[2])
        if not capped:
            return _channel_scale(x, d, dims, limits, flags & 7, beta)
    x_norm, d_norm = affine_factors(x, d, beta, dims)
    if not capped:
        return record_scale(x_norm, d_norm, limits, flags, counter)
    scale = record_scale(x_norm, d_norm, limits, flags & ~CAP, counter)
    return cap_scale(scale, affine_record_norm(x, d, dims, beta), x_norm, d_norm, limits[2], counter)


def affine_sums(
    x: Tensor, d: Tensor, scale: Tensor | None, like: Tensor, first: int, wanted: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of gamma and b summed over records and shared places, each only if wanted."""
    if like.dim() == 1 and fits(x, d):
        totals = kept(x, d)
        if totals is None:
            found = record_sums(by_channel(d, first), scale, by_channel(x, first))
        else:
            found = over_records(totals, scale)
        bias, weight = found.unbind()
        return weight if wanted[0] else None, bias if wanted[1] else None
    ds, xs = masked(d, scale, True), masked(x, scale, False)
    return (
        summed(ds * xs, like.shape, first) if wanted[0] else None, summed(ds, like.shape, first) if wanted[1] else None
    )  # fmt: skip


def by_channel(value: Tensor, first: int) -> Tensor:
    """As (records, channels, positions); the parameters' only dimension is ``first``."""
    if first == 1:
        return value.reshape(*value.shape[:2], -1)  # also without positions
    return value.movedim(first, -1).reshape(value.shape[0], -1, value.shape[first]).transpose(1, 2)


def first_of(part: Any, x: Tensor) -> int:
    """The first dimension of an activation that a normalisation layer's parameters have."""
    return x.dim() - part.weight.dim() if hasattr(part, "normalized_shape") else 1


class Affine(Kind):
    """The affine part of a normalisation: gamma * x + b, for x already normalised."""

    def __init__(self, channels_first: bool) -> None:
        self.channels_first = channels_first

    def grouped(self, x: Tensor, d: Tensor, conf: Conf, m: int) -> tuple[Tensor, Tensor, Conf]:
        x, d, conf = super().grouped(x, d, conf, m)
        return (x.movedim(1, -1), d.movedim(1, -1), conf) if self.channels_first else (x, d, conf)

    def factors(self, part: Any, x: Tensor, d: Tensor, conf: Conf) -> Factors:
        return affine_factors(x, d, beta_of(part), free_dims(x, part.weight, first_of(part, x)))

    def norm(self, part: Any, x: Tensor, d: Tensor, way: int, conf: Conf) -> Tensor:
        dims = free_dims(x, part.weight, first_of(part, x))
        return affine_record_norm(trained_input(part, x), d, dims, beta_of(part))

    def scale(self, part: Any, x: Tensor, d: Tensor, counter: Counts | None, conf: Conf) -> Tensor | None:
        limits, flags, dims = part._wc_limits, part._wc_flags, free_dims(x, part.weight, first_of(part, x))
        return affine_scale(x, d, limits, flags, beta_of(part), dims, counter)

    def sums(self, part: Any, x: Tensor, d: Tensor, scales: Tensor | None, conf: Conf, wide: bool = False) -> Sums:
        return affine_sums(x, d, scales, part.weight, first_of(part, x), trains(part))

    def gradients(self, part: Any, x: Tensor, d: Tensor, conf: Conf) -> list[Tensor]:
        dims, ds = free_dims(x, part.weight, first_of(part, x)), d.double()
        both = [ds * x.double()] * trains(part)[0] + [beta_of(part) * ds] * trains(part)[1]
        return [g.sum(dims) if dims else g for g in both]


CHANNELS, TRAILING = Affine(True), Affine(False)


class AffineFunction(torch.autograd.Function):
    """gamma and b occupy dimensions ``first`` .. of the activation; records are dimension 0 (see DenseFunction)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, weight, bias, token, key, limits, flags, beta, first):
        """gamma * x + b."""
        y = x * shaped(weight, x, first).to(x.dtype)
        return y if bias is None else y + shaped(bias, x, first).to(x.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Keep what the backward needs."""
        x, weight, bias, token, ctx.key, limits, flags, beta, first = inputs
        ctx.save_for_backward(x, weight, token, limits)
        ctx.settings = (flags, beta, first)

    @staticmethod
    def backward(ctx, d):
        """Ordinary input gradient; parameter gradients from s_i delta_i."""
        x, weight, token, limits = ctx.saved_tensors
        flags, beta, first = ctx.settings
        gw = gb = None
        gx = d * shaped(weight, d, first).to(d.dtype) if ctx.needs_input_grad[0] else None
        if ctx.key:
            collect(ctx.key, token, x, d)
        elif ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            bias_part = beta if ctx.needs_input_grad[2] else 0.0
            scale = affine_scale(x, d, limits, flags, bias_part, free_dims(x, weight, first))
            gw, gb = affine_sums(x, d, scale, weight, first, ctx.needs_input_grad[1:3])
            gw, gb = (g if g is None else g.to(weight.dtype) for g in (gw, gb))
        return gx, gw, gb, *[None] * 6
