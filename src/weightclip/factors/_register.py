"""A user's own layer, taught in a few lines: which products its parameters enter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from weightclip.errors import ContractError, WeightclipError
from weightclip.factors._dense import DENSE
from weightclip.factors._embedding import EMBEDDING, EmbeddingFunction
from weightclip.factors._layers import apply
from weightclip.factors._part import part_of
from weightclip.factors._routes import dense
from weightclip.factors._swap import FORMS, Private, copied, forget_private_classes, is_active


class Products:
    """The limited products of one layer, by the names of its parameters."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def linear(self, weight: str, x: Tensor, bias: str | None = None) -> Tensor:
        """``F.linear(x, weight, bias)``; x: records on a dimension of their own, features last."""
        return dense(part_of(self._layer, DENSE, self._known(weight), None if bias is None else self._known(bias)), x)

    def embedding(self, weight: str, ids: Tensor) -> Tensor:
        """``F.embedding(ids, weight)``."""
        part = part_of(self._layer, EMBEDDING, self._known(weight), padding_idx=None)
        return apply(EmbeddingFunction, part, ids, part.weight, None, part._wc_flags, None, part._wc_product.dtype)

    def copy(self, name: str) -> Any:
        """The parameter for any other use, of which every record gets a copy (at most 2^20 entries)."""
        return copied(self._layer, self._known(name))

    def _known(self, name: str) -> str:
        if self._layer._parameters.get(name) is None:
            raise ContractError(f"a {self._layer._wc_native.__name__} has no parameter '{name}' of its own.")
        return name


class _Taught(Private):
    """A layer whose forward was taught."""

    _wc_form = DENSE
    _wc_taught: Callable[..., Any]

    def forward(self, *args: Any, **named: Any) -> Any:
        """What was taught while products are collected; the native forward otherwise."""
        if not is_active(self):
            return self._wc_native.forward(self, *args, **named)  # type: ignore[arg-type]
        return type(self)._wc_taught(self, Products(self), *args, **named)


def register_layer(kind: type[nn.Module]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Teach a layer of your own: a function (layer, products, *inputs) that computes what its forward computes.

    Needed only where the layer's parameters are too large for a copy for each record (2^20 entries) and enter by other
    operators than ``F.linear``, ``@``, ``F.embedding`` and convolutions, which are known wherever they stand.

    Example::

        >>> class Mixed(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.weight = nn.Parameter(torch.ones(3, 5))
        ...     def forward(self, x):
        ...         return torch.einsum("btf,of->bto", x, self.weight)
        >>> @register_layer(Mixed)
        ... def mixed(layer, products, x):
        ...     return products.linear("weight", x)

    Formal guarantees:
        Whatever the function computes, each record's gradient is limited over all products of the layer; where a
        parameter reaches the loss past them, the layer runs its own forward on copies instead. A function that computes
        something else than the layer's forward trains something else; it breaks no guarantee.
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)) or kind in FORMS:
        raise WeightclipError(f"register_layer takes a module class of your own that is not known yet, got {kind!r}.")

    def teach(function: Callable[..., Any]) -> Callable[..., Any]:
        FORMS[kind] = type(f"_{kind.__name__}", (_Taught,), {"_wc_taught": staticmethod(function)})
        forget_private_classes()
        return function

    return teach
