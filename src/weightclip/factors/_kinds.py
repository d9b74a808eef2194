"""What a collector asks of each kind of product: its two factors, the norm of the product, the sum of products.

A kind is one small object. Known of a use are the input, the cotangent and, for a convolution, the numbers its forward
pass went by. Whose product it is says a *part*: a private layer itself, or one parameter of it
(:class:`weightclip.factors._part.Part`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weightclip.factors._affine import affine_factors, affine_record_norm, affine_scale, affine_sums, free_dims
from weightclip.factors._conv import Shape, conv_factors, conv_norm, conv_scale, conv_sums, patch_energies
from weightclip.factors._dense import dense_factors, dense_norm, dense_scale, dense_sums
from weightclip.factors._embedding import embedding_factors, embedding_norm, embedding_scale, embedding_sums
from weightclip.factors._limits import BOUND, CAP, Counts, cap_scale, masked, record_scale, squared_norm, wide
from weightclip.factors._record_norms import patches

Factors = tuple[Tensor, Tensor]
Sums = tuple[Tensor | None, Tensor | None]
Conf = Sequence[int]


@dataclass(frozen=True)
class Measure:
    """The norm in which a certified bound was found, where it is not the product of l2 norms.

    Attributes:
        entrywise: p of a K-norm mechanism, whose sensitivities are entrywise l_p norms; None for a chain in p = inf.
        size: What turns an l2 norm into a bound of the entrywise one.
    """

    entrywise: float | None = None
    size: float = 1.0


def beta_of(part: Any) -> float:
    """The weight of the bias in the input factor, zero if it is not trained."""
    return part._wc_beta if trains(part)[1] else 0.0


def trains(part: Any) -> tuple[bool, bool]:
    """Whether weight and bias are trained."""
    bias = getattr(part, "bias", None)
    return part.weight.requires_grad, bias is not None and bias.requires_grad


def shape_of(part: Any, conf: Conf) -> Shape:
    """The numbers of one use of a convolution, as its forward pass had them."""
    kernel = part.weight.shape[2:]
    return Shape.of((*kernel, *[1] * ((len(conf) - 2) // 4 - len(kernel))), conf)


def first_of(part: Any, x: Tensor) -> int:
    """The first dimension of an activation that a normalisation layer's parameters have."""
    return x.dim() - part.weight.dim() if hasattr(part, "normalized_shape") else 1


class Kind(ABC):
    """One kind of product. Records lie on dimension 0 of ``x`` and ``d``.

    Formal guarantees:
        ``norm`` is never below the norm of what ``sums`` adds for a record of scale one (weight and beta times bias),
        and ``factors`` multiply to no less; a subclass that understates either breaks the guarantee.
    """

    def grouped(self, x: Tensor, d: Tensor, conf: Conf, m: int) -> tuple[Tensor, Tensor, Conf]:
        """Rows i*m .. (i+1)*m - 1 of record i become positions of record i."""
        return x.unflatten(0, (-1, m)), d.unflatten(0, (-1, m)), conf

    @abstractmethod
    def factors(self, part: Any, x: Tensor, d: Tensor, conf: Conf) -> Factors:
        """Norms of both factors of each record, as the certificate bounds them for p = 2."""

    @abstractmethod
    def norm(self, part: Any, x: Tensor, d: Tensor, way: int, conf: Conf) -> Tensor:
        """Norm of each record's gradient (weight and beta times bias): exact, or a bound where ``way`` says so."""

    def scale(self, part: Any, x: Tensor, d: Tensor, counter: Counts | None, conf: Conf) -> Tensor | None:
        """Scale of each record where the limits are for this use alone."""
        limits, flags, both = part._wc_limits, part._wc_flags, self.factors(part, x, d, conf)
        if not flags & CAP or flags & BOUND:  # a certified bound meets the product of norms, as the certificate does
            return record_scale(*both, limits, flags, counter)
        scale = record_scale(*both, limits, flags & ~CAP, counter)
        return cap_scale(scale, self.norm(part, x, d, part._wc_kind, conf), *both, limits[2], counter)

    @abstractmethod
    def sums(self, part: Any, x: Tensor, d: Tensor, scales: Tensor | None, conf: Conf) -> Sums:
        """sum_i scale_i (gradient of record i) of weight and bias; None for one that is not trained."""

    @abstractmethod
    def gradients(self, part: Any, x: Tensor, d: Tensor, conf: Conf) -> list[Tensor]:
        """Each record's own gradient of weight and (times beta) bias, in float64: for small parameters."""

    def certified(self, part: Any, x: Tensor, d: Tensor, both: Factors, measure: Measure, conf: Conf) -> Tensor:
        """The bound of each record's gradient that a true certificate keeps below its limit (SOUNDNESS section 7).

        Chains in p = inf bound ||delta||_1 and the largest patch or position; a K-norm mechanism's bounds are
        entrywise. Each is a valid bound of the norm the noise is scaled for, and so is the smaller of two. By default
        from l2 norms.
        """
        return (1.0 if measure.entrywise is None else measure.size) * both[0] * both[1]


class _Dense(Kind):
    """y = Wx + bias over any number of positions."""

    def factors(self, part: Any, x: Tensor, d: Tensor, conf: Conf) -> Factors:
        return dense_factors(x, d, beta_of(part))

    def norm(self, part: Any, x: Tensor, d: Tensor, way: int, conf: Conf) -> Tensor:
        return dense_norm(_trained(part, x), d, beta_of(part), part._wc_product.dtype)

    def scale(self, part: Any, x: Tensor, d: Tensor, counter: Counts | None, conf: Conf) -> Tensor | None:
        limits, flags, beta, product = part._wc_limits, part._wc_flags, beta_of(part), part._wc_product.dtype
        return dense_scale(x, d, limits, flags, beta, product, counter)

    def sums(self, part: Any, x: Tensor, d: Tensor, scales: Tensor | None, conf: Conf) -> Sums:
        product = part._wc_product.dtype, part._wc_product.chunk
        return dense_sums(x, d, scales, part.weight, product, trains(part))

    def gradients(self, part: Any, x: Tensor, d: Tensor, conf: Conf) -> list[Tensor]:
        xs, ds = (t.double().reshape(t.shape[0], -1, t.shape[-1]) for t in (x, d))
        found = [ds.mT @ xs] if trains(part)[0] else []
        return [*found, beta_of(part) * ds.sum(1)] if trains(part)[1] else found

    def certified(self, part: Any, x: Tensor, d: Tensor, both: Factors, measure: Measure, conf: Conf) -> Tensor:
        product = super().certified(part, x, d, both, measure, conf)
        if measure.entrywise in (None, 2):
            return product
        single = math.prod(x.shape[1:-1]) == 1
        return _entrywise(product, x, d, beta_of(part), measure.entrywise == 1, single)


class _Outer(_Dense):
    """A dense layer on outer products of two inputs, whose weight has a dimension for each."""

    def sums(self, part: Any, x: Tensor, d: Tensor, scales: Tensor | None, conf: Conf) -> Sums:
        product = part._wc_product.dtype, part._wc_product.chunk
        weight, bias = dense_sums(x, d, scales, part.weight.flatten(1), product, trains(part))
        return weight if weight is None else weight.reshape(part.weight.shape), bias


class _Conv(Kind):
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
        return conv_norm(_trained(part, x), d, beta_of(part), shape_of(part, conf), way, part._wc_product.dtype)

    def scale(self, part: Any, x: Tensor, d: Tensor, counter: Counts | None, conf: Conf) -> Tensor | None:
        limits, flags, beta, product = part._wc_limits, part._wc_flags, beta_of(part), part._wc_product.dtype
        return conv_scale(x, d, limits, flags, beta, shape_of(part, conf), product, counter)

    def sums(self, part: Any, x: Tensor, d: Tensor, scales: Tensor | None, conf: Conf) -> Sums:
        product = part._wc_product.dtype, part._wc_product.chunk
        return conv_sums(x, d, scales, part.weight, shape_of(part, conf), product, trains(part))

    def gradients(self, part: Any, x: Tensor, d: Tensor, conf: Conf) -> list[Tensor]:
        shape = shape_of(part, conf)
        image, other = (d, x) if shape.transposed else (x, d)
        u = patches(image.double(), shape.geometry())  # records x groups x patch x positions
        e = other.double().flatten(2).unflatten(1, (shape.groups, -1))
        found = [e @ u.mT] if trains(part)[0] else []  # records x groups x out x patch, as the weight lies
        return [*found, beta_of(part) * d.double().flatten(2).sum(2)] if trains(part)[1] else found

    def certified(self, part: Any, x: Tensor, d: Tensor, both: Factors, measure: Measure, conf: Conf) -> Tensor:
        product, shape, beta = super().certified(part, x, d, both, measure, conf), shape_of(part, conf), beta_of(part)
        if measure.entrywise in (1, math.inf):
            return _entrywise(product, x, d, beta, measure.entrywise == 1, False)
        if measure.entrywise is None and not shape.transposed:
            largest = (patch_energies(x, shape).flatten(1).amax(1) + beta**2).sqrt()
            return torch.minimum(product, largest * _one(d))
        return product


class _Embedding(Kind):
    """Rows of a table."""

    def factors(self, part: Any, x: Tensor, d: Tensor, conf: Conf) -> Factors:
        return embedding_factors(x, d)

    def norm(self, part: Any, x: Tensor, d: Tensor, way: int, conf: Conf) -> Tensor:
        return embedding_norm(x, d, part.padding_idx, part._wc_product.dtype)

    def scale(self, part: Any, x: Tensor, d: Tensor, counter: Counts | None, conf: Conf) -> Tensor | None:
        limits, flags, product = part._wc_limits, part._wc_flags, part._wc_product.dtype
        return embedding_scale(x, d, limits, flags, part.padding_idx, product, counter)

    def sums(self, part: Any, x: Tensor, d: Tensor, scales: Tensor | None, conf: Conf) -> Sums:
        skip, rows = -1 if part.padding_idx is None else part.padding_idx, part.weight.shape[0]
        return embedding_sums(x, d, scales, rows, skip, part._wc_product.dtype) if trains(part)[0] else None, None

    def gradients(self, part: Any, x: Tensor, d: Tensor, conf: Conf) -> list[Tensor]:
        ids, ds = x.reshape(x.shape[0], -1), d.double().reshape(x.shape[0], -1, d.shape[-1])
        if part.padding_idx is not None:
            ds = ds * (ids != part.padding_idx)[..., None]
        table = ds.new_zeros(len(ids), part.weight.shape[0], ds.shape[-1])
        return [table.scatter_add_(1, ids[..., None].expand_as(ds), ds)]

    def certified(self, part: Any, x: Tensor, d: Tensor, both: Factors, measure: Measure, conf: Conf) -> Tensor:
        product = super().certified(part, x, d, both, measure, conf)
        return product if measure.entrywise == 2 else torch.minimum(product, _one(d))


class _Affine(Kind):
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
        return affine_record_norm(_trained(part, x), d, dims, beta_of(part))

    def scale(self, part: Any, x: Tensor, d: Tensor, counter: Counts | None, conf: Conf) -> Tensor | None:
        limits, flags, dims = part._wc_limits, part._wc_flags, free_dims(x, part.weight, first_of(part, x))
        return affine_scale(x, d, limits, flags, beta_of(part), dims, counter)

    def sums(self, part: Any, x: Tensor, d: Tensor, scales: Tensor | None, conf: Conf) -> Sums:
        return affine_sums(x, d, scales, part.weight, first_of(part, x), trains(part))

    def gradients(self, part: Any, x: Tensor, d: Tensor, conf: Conf) -> list[Tensor]:
        dims, ds = free_dims(x, part.weight, first_of(part, x)), d.double()
        both = [ds * x.double()] * trains(part)[0] + [beta_of(part) * ds] * trains(part)[1]
        return [g.sum(dims) if dims else g for g in both]


class _Copied(Kind):
    """A parameter of which every record has its own copy: the copy's gradient is the record's (SOUNDNESS 12)."""

    def grouped(self, x: Tensor, d: Tensor, conf: Conf, m: int) -> tuple[Tensor, Tensor, Conf]:
        raise NotImplementedError("copies are one for each record.")

    def factors(self, part: Any, x: Tensor, d: Tensor, conf: Conf) -> Factors:
        norm = self.norm(part, x, d, 0, conf)
        return torch.ones_like(norm), norm

    def norm(self, part: Any, x: Tensor, d: Tensor, way: int, conf: Conf) -> Tensor:
        return part._wc_beta * squared_norm(d).sqrt()

    def sums(self, part: Any, x: Tensor, d: Tensor, scales: Tensor | None, conf: Conf) -> Sums:
        return masked(d, scales, True).sum(0, dtype=torch.float64), None

    def gradients(self, part: Any, x: Tensor, d: Tensor, conf: Conf) -> list[Tensor]:
        return [part._wc_beta * d.double()]


def _trained(part: Any, x: Tensor) -> Tensor:
    """The input factor as far as it makes a gradient: where only the bias is trained, not at all."""
    return x if part.weight.requires_grad else torch.zeros_like(x)


def _one(d: Tensor) -> Tensor:
    """||delta||_1 of each record."""
    return wide(d).flatten(1).abs().sum(1)


def _entrywise(product: Tensor, x: Tensor, d: Tensor, beta: float, by_one: bool, single: bool) -> Tensor:
    """The smaller of ``product`` and the entrywise bound for p = 1 or inf (SOUNDNESS section 3)."""
    flat = wide(x).flatten(1).abs()
    if by_one:
        return torch.minimum(product, _one(d) * (flat.sum(1) + beta))
    other = wide(d).flatten(1).abs().amax(1) if single else _one(d)
    return torch.minimum(product, other * flat.amax(1).clamp(min=beta))


DENSE, OUTER, CONV, EMBEDDING, COPIED = _Dense(), _Outer(), _Conv(), _Embedding(), _Copied()
CHANNELS, TRAILING = _Affine(True), _Affine(False)
