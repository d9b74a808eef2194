"""What a collector asks of each kind of product: its two factors, the norm of the product, the sum of products.

A kind is one small object, beside the arithmetic of its product. Known of a use are the input, the cotangent and, for a
convolution, the numbers its forward pass went by. Whose product it is says a *part*: a private layer itself, or one
parameter of it (:class:`weightclip.factors._part.Part`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weightclip.factors._limits import BOUND, CAP, Counts, cap_scale, record_scale, wide
from weightclip.factors._own import Own

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
    def sums(self, part: Any, x: Tensor, d: Tensor, scales: Tensor | None, conf: Conf, wide: bool = False) -> Sums:
        """sum_i scale_i (gradient of record i) of weight and bias; None for one that is not trained.

        ``wide``: other uses may cancel this one, so that it is far larger than what is limited: float64 throughout.
        """

    @abstractmethod
    def gradients(self, part: Any, x: Tensor, d: Tensor, conf: Conf) -> list[Tensor]:
        """Each record's own gradient of weight and (times beta) bias, in float64: for small parameters."""

    def own(self, part: Any, x: Tensor, d: Tensor, conf: Conf, way: int) -> Own | None:
        """Each record's own gradient, where its norm comes cheapest from it: known from public shapes and settings."""
        return None

    def certified(self, part: Any, x: Tensor, d: Tensor, both: Factors, measure: Measure, conf: Conf) -> Tensor:
        """The bound of each record's gradient that a true certificate keeps below its limit (SOUNDNESS section 7).

        Chains in p = inf bound ||delta||_1 and the largest patch or position; a K-norm mechanism's bounds are
        entrywise. Each is a valid bound of the norm the noise is scaled for, and so is the smaller of two. By default
        from l2 norms.
        """
        return (1.0 if measure.entrywise is None else measure.size) * both[0] * both[1]


def one_norm(d: Tensor) -> Tensor:
    """||delta||_1 of each record."""
    return wide(d).flatten(1).abs().sum(1)


def entrywise_bound(product: Tensor, x: Tensor, d: Tensor, beta: float, by_one: bool, single: bool) -> Tensor:
    """The smaller of ``product`` and the entrywise bound for p = 1 or inf (SOUNDNESS section 3)."""
    flat = wide(x).flatten(1).abs()
    if by_one:
        return torch.minimum(product, one_norm(d) * (flat.sum(1) + beta))
    other = wide(d).flatten(1).abs().amax(1) if single else one_norm(d)
    return torch.minimum(product, other * flat.amax(1).clamp(min=beta))
