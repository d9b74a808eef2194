"""Certified bounds of stacked dense layers: weight norms, sensitivities, noise scales, ClipWeights.

Everything here reads public values only: weights already released, and the settings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from weightclip.bounds import spectral_norm
from weightclip.noise import Allocation

_U = 2.0**-53
_ROOM = 1.0 - 2.0**-38
_RELATIVE_FLOOR, _ABSOLUTE_FLOOR = 1e-6, 1e-12  # as in weightclip.noise.floored


def gain(weight: Tensor) -> Tensor:
    """Certified ||W||_2 of each run, with room for the rounding of a float64 product.  # ... x out x in -> ..."""
    rows, columns = weight.shape[-2:]
    return spectral_norm(weight) * (1 + max(rows, columns) * _U * math.sqrt(min(rows, columns)))


def clip_(weight: Tensor, limit: Tensor, sphere: Tensor) -> Tensor:
    """ClipWeights in place; returns a certified norm of every run's weights afterwards.

    Args:
        weight: Stacked float64 weights.  # seeds x settings x out x in
        limit: C of each setting, infinite for none.  # settings
        sphere: Whether the setting rescales to C (Fix-Lip) rather than below it.  # settings

    Formal guarantees:
        The returned bound is at least the spectral norm of the stored weights, and at most `limit` where that is
        finite and the weights are.
    """
    norm = spectral_norm(weight)
    fro = torch.linalg.vector_norm(weight, dim=(-2, -1))
    moved = norm + 2 * _U * (norm + fro)  # rounding of the scaled entries
    scale = limit * _ROOM / moved
    change = torch.isfinite(scale) & (norm > 0) & ((norm > limit) | sphere)
    scale = torch.where(change, scale, torch.ones_like(scale))
    weight.mul_(scale[..., None, None])
    return torch.where(change, scale * moved * (1 + 2.0**-50), norm)


def sensitivities(
    norms: Sequence[Tensor],
    biases: Sequence[Tensor],
    loss_bound: Tensor,
    input_radius: Tensor,
    bias_scale: Tensor,
    layer_radius: Tensor,
    cotangent_radius: Tensor,
) -> Tensor:
    """Δ_k of every layer and run (SOUNDNESS sections 3 and 4).  # seeds x settings x layers

    Args:
        norms: ||W_k||_2 of every layer.  # each: seeds x settings
        biases: The biases.  # each: seeds x settings x out
        loss_bound: Bound of the gradient at the outputs.  # settings
        input_radius: X_1.  # settings
        bias_scale: β.  # settings
        layer_radius: X_k enforced in the product, or infinite.  # settings x layers
        cotangent_radius: R_k enforced in the product, or infinite.  # settings x layers

    Formal guarantees:
        One record's gradient of layer k (weights, and biases times β) has l2 norm at most Δ_k, for all layers at
        once, whatever the record: Δ_k = min(L_k, R_k)·min(√(X_k² + β²), X_k enforced), L_k = L_{k+1}||W_{k+1}||,
        X_{k+1} = ||W_k||X_k + ||bias_k||, activations being 1-Lipschitz with value 0 at 0.
    """
    layers = len(norms)
    x = input_radius.expand_as(norms[0])
    a = []
    for k in range(layers):
        a.append(torch.minimum((x.square() + bias_scale.square()).sqrt(), layer_radius[:, k]))
        x = norms[k] * x + torch.linalg.vector_norm(biases[k], dim=-1)
    bound = loss_bound.expand_as(norms[0])
    result: list[Tensor] = []
    for k in reversed(range(layers)):
        result.append(torch.minimum(bound, cotangent_radius[:, k]) * a[k])
        bound = bound * norms[k]
    return torch.stack(result[::-1], -1) * (1 + 1e-9)  # rounding of norms, scales and products in float64


def scales(delta: Tensor, dims: Tensor, sigma: Tensor, allocation: Allocation) -> Tensor:
    """s_k of every run with Σ_k Δ_k²/s_k² = 1/σ².  # seeds x settings x layers

    The allocation's formula, floors included, along the last dimension of a stack.
    """
    delta = torch.maximum(delta, _RELATIVE_FLOOR * delta.amax(-1, keepdim=True)).clamp_min(_ABSOLUTE_FLOOR)
    root = torch.sqrt(allocation.layer_weights(delta, dims) * dims)
    return sigma[:, None] * torch.sqrt(delta / root * (delta * root).sum(-1, keepdim=True))
