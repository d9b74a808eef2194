"""Parts: one parameter (or weight and bias together) of a private layer, as one kind of product sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weightclip.factors._kind import Conf, Factors, Kind, Sums
from weightclip.factors._limits import masked, record_norm
from weightclip.factors._passes import Sink


@dataclass(eq=False)
class Part:
    """What one product of a layer with several parameters is of; stands where a simple layer stands for itself.

    Attributes:
        layer: The private layer.
        kind: Kind of the product.
        name: Of the parameter that is the weight of the product.
        bias_name: Of the one that is its bias, or None.
        rows: First and last row (exclusive) of a block of both that the product is of; blocks never overlap in part.
        turned: Whether the parameter is the transposed weight.
        padding_idx: Of an embedding.
    """

    layer: Any
    _wc_form: Kind
    name: str
    bias_name: str | None = None
    rows: tuple[int, int] | None = None
    turned: bool = False
    padding_idx: int | None = None
    _wc_sink: Sink | None = None
    _wc_lone: bool = False  # whether its input holds no records

    @property
    def parameter(self) -> Tensor:
        """The whole parameter."""
        return self.layer._parameters[self.name]

    @property
    def weight(self) -> Tensor:
        """The product's weight."""
        value = self.parameter if self.rows is None else self.parameter[slice(*self.rows)]
        return value.t() if self.turned else value

    @property
    def bias(self) -> Tensor | None:
        """The product's bias."""
        value = None if self.bias_name is None else self.layer._parameters[self.bias_name]
        return value if value is None or self.rows is None else value[slice(*self.rows)]

    @property
    def _wc_beta(self) -> float:
        # the release divides the noise on what is called "bias" by beta, and on nothing else
        return self.layer._wc_beta if "bias" in (self.bias_name, self.name) else 1.0

    @property
    def _wc_token(self) -> Tensor:
        return self.layer._wc_token

    @property
    def _wc_limits(self) -> Tensor:
        return self.layer._wc_limits

    @property
    def _wc_flags(self) -> int:
        return self.layer._wc_flags

    @property
    def _wc_product(self) -> Any:
        return self.layer._wc_product

    @property
    def _wc_kind(self) -> int:
        return self.layer._wc_kind

    @property
    def _wc_counter(self) -> Any:
        return self.layer._wc_counter

    def laid(self, total: Tensor, name: str) -> Tensor:
        """A sum over records as it lies in the whole parameter ``name``."""
        total = total.t() if self.turned and name == self.name else total
        whole = self.layer._parameters[name]
        if self.rows is None:
            return total.reshape(whole.shape)
        full = torch.zeros(whole.shape, dtype=total.dtype, device=total.device)
        full[slice(*self.rows)] = total.reshape(full[slice(*self.rows)].shape)
        return full

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copied model trains on its own

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()


def part_of(layer: Any, kind: Kind, name: str, bias: str | None = None, **more: Any) -> Part:
    """The part of a private layer that makes this product: the same object in every pass."""
    sink = layer._wc_sink
    key = (kind, name, bias, *more.items())
    if key not in sink.parts:
        part = sink.parts[key] = Part(layer, kind, name, bias, **more)
        part._wc_sink = sink.attach(part)
    return sink.parts[key]


def _nothing() -> None:
    return None


class Copies(Kind):
    """A parameter of which every record has its own copy: the copy's gradient is the record's (SOUNDNESS 12)."""

    def grouped(self, x: Tensor, d: Tensor, conf: Conf, m: int) -> tuple[Tensor, Tensor, Conf]:
        raise NotImplementedError("copies are one for each record.")

    def factors(self, part: Any, x: Tensor, d: Tensor, conf: Conf) -> Factors:
        norm = self.norm(part, x, d, 0, conf)
        return torch.ones_like(norm), norm

    def norm(self, part: Any, x: Tensor, d: Tensor, way: int, conf: Conf) -> Tensor:
        return part._wc_beta * record_norm(d)

    def sums(self, part: Any, x: Tensor, d: Tensor, scales: Tensor | None, conf: Conf, wide: bool = False) -> Sums:
        return masked(d, scales, True).sum(0, dtype=torch.float64), None

    def gradients(self, part: Any, x: Tensor, d: Tensor, conf: Conf) -> list[Tensor]:
        return [part._wc_beta * d.double()]


COPIED = Copies()
