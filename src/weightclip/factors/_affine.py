"""The affine part of a normalisation layer: y = gamma * x + b per channel, with bounded factors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from weightclip.factors._kernel import fits, record_sums
from weightclip.factors._limits import CAP, cap_scale, masked, product_rounding, record_scale, squared_norm, wide


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
    bias_part = d.double()
    weight_part = bias_part * x.double()
    free = (weight_part.flatten(1).abs().sum(1) + beta * bias_part.flatten(1).abs().sum(1)).square()
    if dims:
        weight_part, bias_part = weight_part.sum(dims), bias_part.sum(dims)
    exact = weight_part.flatten(1).square().sum(1) + beta**2 * bias_part.flatten(1).square().sum(1)
    return (exact.sqrt() + 2 * product_rounding(math.prod(x.shape[1:]), torch.float64) * free.sqrt()).float()


class AffineFunction(torch.autograd.Function):
    """gamma and b occupy dimensions ``first`` .. of the activation; records are dimension 0."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, weight, bias, limits, flags, beta, first, counter=None):
        """gamma * x + b."""
        y = x * shaped(weight, x, first).to(x.dtype)
        return y if bias is None else y + shaped(bias, x, first).to(x.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Keep what the backward needs."""
        x, weight, bias, limits, flags, beta, first, *counter = inputs
        ctx.counter = counter
        ctx.save_for_backward(x, weight, limits)
        ctx.settings = (flags, beta, first)

    @staticmethod
    def backward(ctx, d):
        """Ordinary input gradient; parameter gradients from s_i delta_i."""
        x, weight, limits = ctx.saved_tensors
        flags, beta, first = ctx.settings
        gw = gb = None
        gx = d * shaped(weight, d, first).to(d.dtype) if ctx.needs_input_grad[0] else None
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            scale = None
            if flags:
                dims = [k for k in range(1, x.dim()) if not first <= k < first + weight.dim()]
                shared = 1
                for k in dims:
                    shared *= x.shape[k]
                energy = wide(x).square()
                energy = energy.sum(dims) if dims else energy
                bias_part = beta if ctx.needs_input_grad[2] else 0.0
                # columns of different channels are disjoint: the parameter factor is the largest channel's norm
                x_norm = (energy.flatten(1).amax(1) + bias_part**2 * shared).sqrt()
                d_norm = squared_norm(d).sqrt()
                scale = record_scale(x_norm, d_norm, limits, flags & ~CAP, *ctx.counter)
                if flags & CAP:
                    norm = affine_record_norm(x, d, dims, bias_part)
                    scale = cap_scale(scale, norm, x_norm, d_norm, limits, *ctx.counter)
            if first == 1 and weight.dim() == 1 and fits(x, d):
                x, d = (t.reshape(*t.shape[:2], -1) for t in (x, d))  # also without positions
                gb, gw = record_sums(d, scale, x).to(weight.dtype).unbind()
                gw, gb = (g if needed else None for g, needed in zip((gw, gb), ctx.needs_input_grad[1:3], strict=True))
            else:
                ds, xs = masked(d, scale, True), masked(x, scale, False)
                if ctx.needs_input_grad[1]:
                    gw = summed(ds * xs, weight.shape, first).to(weight.dtype)
                if ctx.needs_input_grad[2]:
                    gb = summed(ds, weight.shape, first).to(weight.dtype)
        return gx, gw, gb, *([None] * (4 + len(ctx.counter)))
