"""Embeddings: row lookup with the table's gradient formed from scaled cotangents."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from weightclip.factors._limits import masked, own, record_scale, squared_norm


class EmbeddingFunction(torch.autograd.Function):
    """Native lookup forward; every row of the table gets a (dense) gradient, so every row gets noise."""

    generate_vmap_rule = True

    @staticmethod
    def forward(indices, weight, limits, flags, padding_idx, dtype, counter=None):
        """Native forward."""
        return own(F.embedding(indices, weight, padding_idx))

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Keep what the backward needs."""
        indices, weight, limits, flags, padding_idx, dtype, *counter = inputs
        ctx.counter = counter
        ctx.save_for_backward(indices, limits)
        ctx.settings = (flags, -1 if padding_idx is None else padding_idx, dtype, weight.shape[0], weight.dtype)

    @staticmethod
    def backward(ctx, d):
        """Sum of scaled cotangents per row; the input factor is the constant sqrt(S) (SOUNDNESS section 3)."""
        indices, limits = ctx.saved_tensors
        flags, padding_idx, dtype, rows, native = ctx.settings
        scale = None
        if flags:
            d_norm = squared_norm(d).sqrt()
            x_norm = torch.full_like(d_norm, math.sqrt(max(1, math.prod(indices.shape[1:]))))
            scale = record_scale(x_norm, d_norm, limits, flags, *ctx.counter)
        values = masked(d, scale, True)
        values = values.to(torch.promote_types(dtype, values.dtype))
        grad = torch.ops.aten.embedding_dense_backward(values, indices, rows, padding_idx, False)
        return None, grad.to(native), *([None] * (4 + len(ctx.counter)))
