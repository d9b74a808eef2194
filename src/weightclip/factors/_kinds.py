"""What a collector asks of each kind of private layer: its two factors, the norm of their product, the sum of products.

One place where kinds are told apart. Known of a use are the layer's input, its cotangent and, for a convolution, the
numbers its forward pass went by.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weightclip._torch import ConvNd, ConvTransposeNd
from weightclip.factors._affine import affine_factors, affine_record_norm, affine_scale, affine_sums, free_dims
from weightclip.factors._conv import Shape, conv_factors, conv_norm, conv_scale, conv_sums, patch_energies
from weightclip.factors._dense import dense_factors, dense_norm, dense_scale, dense_sums
from weightclip.factors._embedding import embedding_factors, embedding_sums
from weightclip.factors._limits import Counts, record_scale, wide

Factors = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Measure:
    """The norm in which a certified bound was found, where it is not the product of l2 norms.

    Attributes:
        entrywise: p of a K-norm mechanism, whose sensitivities are entrywise l_p norms; None for a chain in p = inf.
        size: What turns an l2 norm into a bound of the entrywise one.
    """

    entrywise: float | None = None
    size: float = 1.0


def beta_of(layer: Any) -> float:
    """The weight of the bias in the layer's input factor, zero if it is not trained."""
    return layer._wc_beta if trains(layer)[1] else 0.0


def trains(layer: Any) -> tuple[bool, bool]:
    """Whether weight and bias are trained."""
    bias = getattr(layer, "bias", None)
    return layer.weight.requires_grad, bias is not None and bias.requires_grad


def shape_of(layer: Any, conf: Sequence[int]) -> Shape:
    """The numbers of one use of a convolution, as its forward pass had them."""
    return Shape.of(layer.weight.shape[2:], conf)


def first_of(layer: Any, x: Tensor) -> int:
    """The first dimension of an activation that a normalisation layer's parameters have."""
    return x.dim() - layer.weight.dim() if hasattr(layer, "normalized_shape") else 1


def factors(layer: Any, x: Tensor, d: Tensor, conf: Sequence[int] = ()) -> Factors:
    """Norms of both factors of each record, as the certificate bounds them for p = 2."""
    if isinstance(layer, nn.Linear):
        return dense_factors(x, d, beta_of(layer))
    if isinstance(layer, nn.Embedding):
        return embedding_factors(x, d)
    if isinstance(layer, ConvNd):
        return conv_factors(x, d, beta_of(layer), shape_of(layer, conf))
    return affine_factors(x, d, beta_of(layer), free_dims(x, layer.weight, first_of(layer, x)))


def norm(layer: Any, x: Tensor, d: Tensor, kind: int, conf: Sequence[int] = ()) -> Tensor:
    """Norm of each record's gradient (weight and beta times bias): exact, or a bound where ``kind`` says so."""
    beta, product = beta_of(layer), layer._wc_product.dtype
    if isinstance(layer, nn.Linear):
        return dense_norm(x, d, beta, product)
    if isinstance(layer, nn.Embedding):
        x_norm, d_norm = embedding_factors(x, d)
        return x_norm * d_norm
    if isinstance(layer, ConvNd):
        return conv_norm(x, d, beta, shape_of(layer, conf), kind, product)
    return affine_record_norm(x, d, free_dims(x, layer.weight, first_of(layer, x)), beta)


def scale(layer: Any, x: Tensor, d: Tensor, counter: Counts | None, conf: Sequence[int] = ()) -> Tensor | None:
    """Scale of each record for a layer that is used once and has its limits for itself."""
    limits, flags, beta, product = layer._wc_limits, layer._wc_flags, beta_of(layer), layer._wc_product.dtype
    if isinstance(layer, nn.Linear):
        return dense_scale(x, d, limits, flags, beta, product, counter)
    if isinstance(layer, nn.Embedding):
        return record_scale(*embedding_factors(x, d), limits, flags, counter)
    if isinstance(layer, ConvNd):
        return conv_scale(x, d, limits, flags, beta, shape_of(layer, conf), product, counter)
    return affine_scale(x, d, limits, flags, beta, free_dims(x, layer.weight, first_of(layer, x)), counter)


def sums(
    layer: Any, x: Tensor, d: Tensor, scales: Tensor | None, conf: Sequence[int] = ()
) -> tuple[Tensor | None, Tensor | None]:
    """sum_i scale_i (gradient of record i) of weight and bias; None for one that is not trained."""
    wanted, product = trains(layer), (layer._wc_product.dtype, layer._wc_product.chunk)
    if isinstance(layer, nn.Linear):
        return dense_sums(x, d, scales, layer.weight, product, wanted)
    if isinstance(layer, nn.Embedding):
        skip = -1 if layer.padding_idx is None else layer.padding_idx
        return embedding_sums(x, d, scales, layer.weight.shape[0], skip, product[0]) if wanted[0] else None, None
    if isinstance(layer, ConvNd):
        return conv_sums(x, d, scales, layer.weight, shape_of(layer, conf), product, wanted)
    return affine_sums(x, d, scales, layer.weight, first_of(layer, x), wanted)


def certified(
    layer: Any, x: Tensor, d: Tensor, both: Factors, measure: Measure | None, conf: Sequence[int] = ()
) -> Tensor:
    """The bound of each record's gradient norm that a true certificate keeps below its limit (SOUNDNESS section 7).

    Chains in p = inf bound ||delta||_1 and the largest patch or position; a K-norm mechanism's bounds are entrywise.
    Each is a valid bound of the norm the noise is scaled for, and so is the smaller of two.
    """
    product = both[0] * both[1]
    if measure is None:
        return product
    beta = beta_of(layer)
    one = wide(d).flatten(1).abs().sum(1)
    if measure.entrywise is None:
        if isinstance(layer, nn.Embedding):
            return torch.minimum(product, one)
        if isinstance(layer, ConvNd) and not isinstance(layer, ConvTransposeNd):
            largest = (patch_energies(x, shape_of(layer, conf)).flatten(1).amax(1) + beta**2).sqrt()
            return torch.minimum(product, largest * one)
        return product
    product = measure.size * product
    if measure.entrywise == 2:
        return product
    if isinstance(layer, nn.Embedding):
        return torch.minimum(product, one)
    if not isinstance(layer, (nn.Linear, ConvNd)):
        return product
    flat = wide(x).flatten(1).abs()
    if measure.entrywise == 1:
        return torch.minimum(product, one * (flat.sum(1) + beta))
    single = isinstance(layer, nn.Linear) and math.prod(x.shape[1:-1]) == 1
    other = wide(d).flatten(1).abs().amax(1) if single else one
    return torch.minimum(product, other * flat.amax(1).clamp(min=beta))
