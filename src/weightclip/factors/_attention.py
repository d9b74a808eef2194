"""nn.MultiheadAttention: its three in-projections are dense products with blocks of one parameter (SOUNDNESS 12)."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightclip.errors import ContractError
from weightclip.factors._dense import DENSE
from weightclip.factors._part import part_of
from weightclip.factors._routes import dense
from weightclip.factors._swap import FORMS, Private, copied, is_active


class _Attention(Private):
    """Self- and cross-attention; fused kernels that hide the projections are off."""

    _wc_form = DENSE

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Native outputs and weights."""
        layer: Any = self
        if not is_active(self):
            return self._wc_native.forward(
                self, query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )  # type: ignore[arg-type]
        if query.dim() != 3:
            raise ContractError("nn.MultiheadAttention needs batches: give the query three dimensions.")
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        inputs = (query, key, value) if layer.batch_first else (t.transpose(0, 1) for t in (query, key, value))
        q, k, v = self._projected(*inputs)
        more = 0
        if layer.bias_k is not None:
            k, v = (torch.cat([t, copied(self, n).expand(t.shape[0], -1, -1)], 1) for t, n in
                    ((k, "bias_k"), (v, "bias_v")))  # fmt: skip
            more += 1
        if layer.add_zero_attn:
            k, v = (torch.cat([t, t.new_zeros(t.shape[0], 1, t.shape[2])], 1) for t in (k, v))
            more += 1
        q, k, v = (t.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2) for t in (q, k, v))
        mask = _merged(attn_mask, key_padding_mask, layer.num_heads, more, q.dtype)
        dropout = layer.dropout if layer.training else 0.0
        weights = None
        if need_weights:
            scores = (q / math.sqrt(q.shape[-1])) @ k.mT
            weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            heads = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            heads = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        output = layer.out_proj(heads.transpose(1, 2).flatten(2))
        return output if layer.batch_first else output.transpose(0, 1), weights

    def _projected(self, *inputs: Tensor) -> list[Tensor]:
        layer: Any = self
        size = layer.embed_dim
        if layer._qkv_same_embed_dim:
            blocks = [(i * size, (i + 1) * size) for i in range(3)]
            parts = [part_of(self, DENSE, "in_proj_weight", rows=rows) for rows in blocks]
        else:
            parts = [part_of(self, DENSE, f"{name}_proj_weight") for name in "qkv"]
        found = [dense(part, x) for part, x in zip(parts, inputs, strict=True)]
        if layer.in_proj_bias is None:
            return found
        bias = copied(self, "in_proj_bias")
        return [y + bias[i * size : (i + 1) * size] for i, y in enumerate(found)]


def _merged(mask: Tensor | None, padding: Tensor | None, heads: int, more: int, dtype: torch.dtype) -> Tensor | None:
    """Both masks as one that is added to the scores (records, heads, queries, keys)."""
    parts = []
    if mask is not None:
        mask = _added(mask, dtype, more)
        parts.append(mask if mask.dim() == 2 else mask.unflatten(0, (-1, heads)))
    if padding is not None:
        parts.append(_added(padding, dtype, more)[:, None, None, :])
    return None if not parts else parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _added(mask: Tensor, dtype: torch.dtype, more: int) -> Tensor:
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)
    return F.pad(mask.to(dtype), (0, more))


FORMS[nn.MultiheadAttention] = _Attention
