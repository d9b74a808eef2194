"""Dense layers: y = Wx + bias with the weight gradient formed from scaled cotangents."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from weightclip.factors._limits import CAP, cap_scale, masked, record_scale, squared_norm


def dense_scale(x: Tensor, d: Tensor, limits: Tensor, flags: int, beta: float) -> Tensor | None:
    """Scale of each record: exact product norm for one position, position Grams where a cap meets several."""
    if flags == 0:
        return None
    places = x[0].numel() // max(1, x.shape[-1])
    x_norm, d_norm = (squared_norm(x) + beta**2 * places).sqrt(), squared_norm(d).sqrt()
    if flags & CAP and places > 1:
        scale = record_scale(x_norm, d_norm, limits, flags & ~CAP)
        return cap_scale(scale, position_gram(x, d, beta), x_norm, d_norm, limits)
    return record_scale(x_norm, d_norm, limits, flags)


def position_gram(x: Tensor, d: Tensor, beta: float) -> Tensor:
    """||sum_s delta_s (x_s, beta)^T||_F of each record by S x S Grams in float64 (float32 cancels)."""
    xs, ds = x.flatten(1, -2).double(), d.flatten(1, -2).double()
    gram = (xs @ xs.transpose(1, 2) + beta**2) * (ds @ ds.transpose(1, 2))
    return gram.sum((1, 2)).clamp(min=0).sqrt().to(torch.float32)


def dense_product(x: Tensor, d: Tensor, scale: Tensor | None, dtype: torch.dtype, chunk: int) -> Tensor:
    """sum_i scale_i delta_i x_i^T, in ``dtype``, optionally in chunks of records summed in float64."""
    d, x = masked(d, scale, True), masked(x, scale, False)
    rows = x.shape[0] if chunk <= 0 else chunk
    total: Tensor | None = None
    for start in range(0, max(1, x.shape[0]), max(1, rows)):
        left = d[start : start + rows].reshape(-1, d.shape[-1]).to(dtype)
        right = x[start : start + rows].reshape(-1, x.shape[-1]).to(dtype)
        part = left.t() @ right
        total = part if total is None else total.double() + part
    assert total is not None
    return total


def bias_product(d: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """sum_i scale_i delta_i over records and positions, channels last."""
    d = masked(d, scale, True)
    return d.reshape(-1, d.shape[-1]).sum(0, dtype=torch.promote_types(dtype, torch.float64))


class DenseFunction(torch.autograd.Function):
    """The native dense layer forward; backward with bounded factors in the weight gradient only."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, weight, bias, limits, flags, beta, dtype, chunk):
        """Native forward."""
        return F.linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Keep what the backward needs."""
        x, weight, bias, limits, flags, beta, dtype, chunk = inputs
        ctx.save_for_backward(x, weight, limits)
        ctx.has_bias, ctx.settings = bias is not None, (flags, beta, dtype, chunk)

    @staticmethod
    def backward(ctx, d):
        """Ordinary input gradient; weight gradient from s_i delta_i (SOUNDNESS section 4)."""
        x, weight, limits = ctx.saved_tensors
        flags, beta, dtype, chunk = ctx.settings
        gx = gw = gb = None
        with torch.autocast(d.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                gx = (d @ weight.to(d.dtype)).to(x.dtype)
            if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
                scale = dense_scale(x, d, limits, flags, beta if ctx.needs_input_grad[2] else 0.0)
                if ctx.needs_input_grad[1]:
                    gw = dense_product(x, d, scale, dtype, chunk).to(weight.dtype)
                if ctx.needs_input_grad[2]:
                    gb = bias_product(d, scale, dtype).to(weight.dtype)
        return gx, gw, gb, None, None, None, None, None
