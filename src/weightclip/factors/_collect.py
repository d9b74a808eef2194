"""The way of a product from a layer's backward to the engine (SOUNDNESS section 7, condition c).

A private layer of a running engine returns no weight gradient to autograd: its backward hands both factors of the
product to the engine's collector, which limits each record and adds the sum to the release. Nothing lies between the
product and the release that could multiply it: no chain to a parameter, no hook, no second derivative.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weightclip.errors import ContractError
from weightclip.factors._passes import Passes

_keys = itertools.count(1)
_sinks: weakref.WeakValueDictionary[int, Sink] = weakref.WeakValueDictionary()


class Sink:
    """Where the products of one layer go.

    Attributes:
        key: Its number; compiled graphs know it by that.
        on: Whether products are collected; audits switch it off to differentiate the limited product itself.
        anchor: What links the layer to a backward pass in place of its parameters, which autograd never sees.
        weights: The layer's parameters: nothing else may sit in their places.
        passes: What is known of the running pass.
    """

    def __init__(
        self, layer: nn.Module, anchor: Tensor, take: Callable[[Tensor, Tensor, bool, Sequence[int]], None],
        passes: Passes | None = None,
    ) -> None:  # fmt: skip
        self.key, self.on, self.anchor, self.take, self.passes = next(_keys), True, anchor, take, passes
        self.weights = {id(p): p.data_ptr() for p in layer.parameters(recurse=False)}
        self.parts: dict[Any, Any] = {}  # of a layer with several products, by what tells them apart
        self.attach: Callable[[Any], Sink] | None = None  # gives one more part its way to the collector
        _sinks[self.key] = self

    def know(self, weights: Iterable[Tensor]) -> None:
        """These stand in the places of the layer's parameters while it runs (``fully_shard``), and nothing else."""
        self.weights = {id(p): -1 for p in weights}

    def check(self, weight: Tensor) -> None:
        """Only the parameter itself may be multiplied with inputs here, not a multiple of it."""
        if id(weight) not in self.weights and weight.data_ptr() not in self.weights.values():
            raise ContractError(
                "a private layer runs with another tensor in place of its parameter (functional_call, a "
                "parametrisation, an assignment): the limited gradient belongs to the parameter. Call the model itself."
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copied model trains on its own

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()


def _nothing() -> None:
    return None


def collect(key: int, token: Tensor, x: Tensor, d: Tensor, conf: Sequence[int] = ()) -> None:
    """Hand the two factors of a product to the collector behind ``key``; called inside a layer's backward.

    Args:
        key: Number of the layer's sink.
        token: A scalar that compiled graphs take for what is written, so that the call stays where it is.
        x: Input factor, records on dimension 0.
        d: Cotangent of the layer's output.
        conf: Numbers of this use that the forward pass went by (a convolution's), whatever the layer says by now.
    """
    if torch.compiler.is_compiling():
        torch.ops.weightclip.take(token, x, d, key, list(conf))
        return
    if torch.is_grad_enabled():
        raise ContractError(
            "a derivative of a private layer's gradient was asked for (create_graph=True, a gradient penalty): its "
            "products are limited for first derivatives only. Remove that term, or leave the layer out of it."
        )
    _deliver(key, x, d, False, conf)


def _deliver(key: int, x: Tensor, d: Tensor, borrowed: bool, conf: Sequence[int]) -> None:
    sink = _sinks.get(key)
    if sink is not None:  # an engine that is gone collects nothing
        sink.take(x, d, borrowed, conf)


def _take(token: Tensor, x: Tensor, d: Tensor, key: int, conf: list[int]) -> None:
    """What a compiled backward calls: opaque to the compiler, which may use the memory of both factors again."""
    _deliver(key, x, d, True, conf)


# the plain way to define an operator: `custom_op` costs the host several times as much for every call
_LIBRARY = torch.library.Library("weightclip", "FRAGMENT")
_LIBRARY.define("take(Tensor(a!) token, Tensor x, Tensor d, int key, int[] conf) -> ()")
_LIBRARY.impl("take", _take, "CompositeExplicitAutograd")
torch.library.register_fake("weightclip::take", lambda token, x, d, key, conf: None, lib=_LIBRARY)
