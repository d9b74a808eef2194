"""Native layers become private ones by a change of class: same object, same state_dict keys, same isinstance.

The private class is made from the class that is there. Where that class computes what a known layer computes, its
forward becomes the private product; where it has a forward of its own, that forward runs as it is, on parameters that
every record has a copy of (:mod:`weightclip.factors._copies`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from weightclip._torch import transforms_active
from weightclip.factors._copies import Copied
from weightclip.factors._limits import BOUND, CAP, COTANGENT, KIND_SHIFT, RADIUS, Product, is_plain
from weightclip.factors._part import COPIED, part_of
from weightclip.factors._passes import Sink
from weightclip.factors._record_norms import CHEAPEST

_INF = float("inf")
_STATE = ("_wc_limits", "_wc_flags", "_wc_beta", "_wc_product", "_wc_kind", "_wc_sink", "_wc_counter", "_wc_lone")
_HARMLESS = {"__init__", "extra_repr", "reset_parameters", "__repr__"}
FORMS: dict[type, type] = {}  # native class -> the forward of its private form (factors._layers and others)


class Private:
    """State of a private layer; its limits are the engine's, not a buffer of the model."""

    _wc_native: type[nn.Module]
    _wc_whole: bool  # whether it runs its own forward on copied parameters
    _wc_form: Any = None  # kind of its products
    _wc_limits: Tensor
    _wc_flags: int
    _wc_beta: float
    _wc_product: Product
    _wc_kind: int
    _wc_token: Tensor
    _wc_sink: Sink | None = None
    _wc_counter: Any = None
    _wc_lone: bool = False

    def _get_name(self) -> str:
        return self._wc_native.__name__

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # the class is made at run time: a copy or a file names what it is made from
        kind = type(self)
        return _revive, (kind._wc_native, _names(self) if kind._wc_whole else None), self.__dict__


class _OwnForward(Private):
    """A layer that runs its own forward; its trainable parameters stand for one copy for each record."""


def is_active(layer: Any) -> bool:
    """Whether the layer runs in a pass of its engine whose products are collected (or that public records are in)."""
    sink: Sink | None = layer.__dict__.get("_wc_sink")
    passes = None if sink is None else sink.passes
    if sink is None or passes is None or not passes.running or not sink.on or is_plain() or transforms_active():
        return False
    return passes.noting is not None or torch.is_grad_enabled()


def copied(layer: Any, name: str) -> Any:
    """What stands for a parameter in an active layer: a copy for each record, or the parameter if it is not trained."""
    parameter = layer._parameters.get(name)
    if parameter is None or not parameter.requires_grad:
        return parameter
    sink = layer._wc_sink
    sink.check(parameter)
    part, passes = part_of(layer, COPIED, name), sink.passes
    place = passes.place("parameter", part)
    passes.names.setdefault(place, f"parameter '{name}' of a {layer._wc_native.__name__}")
    return Copied.of(parameter, passes, place, None, part)


def _parameter(name: str) -> property:
    """The parameter ``name``, or in the forward of a private model what stands for it."""

    def get(self: Any) -> Any:
        return copied(self, name) if is_active(self) else self._parameters.get(name)

    def put(self: Any, value: Any) -> None:
        nn.Module.__setattr__(self, name, value)

    return property(get, put)


@functools.cache
def _private_class(native: type[nn.Module], names: tuple[str, ...] | None) -> type:
    """The private form of a class; ``names``: the parameters that its own forward uses as copies."""
    if names is not None:
        body = {"_wc_native": native, "_wc_whole": True, **{name: _parameter(name) for name in names}}
        return type(native.__name__, (_OwnForward, native), body)
    known = known_form(native)
    assert known is not None
    return type(native.__name__, (FORMS[known], native), {"_wc_native": native, "_wc_whole": False})


def forget_private_classes() -> None:
    """Classes that were made before a form was known are made anew."""
    _private_class.cache_clear()


def known_form(native: type) -> type | None:
    """The known layer that a class computes like: itself or a base, of which it replaces no method."""
    for kind in native.__mro__:
        if kind in FORMS:
            methods = [n for c in kind.__mro__[:-2] if c is not nn.Module for n, f in vars(c).items() if callable(f)]
            same = all(getattr(native, n) is getattr(kind, n) for n in {"forward", *methods} - _HARMLESS)
            return kind if same else None
    return None


def _names(module: Any) -> tuple[str, ...]:
    return tuple(name for name in module._parameters)


def _revive(native: type[nn.Module], names: tuple[str, ...] | None) -> nn.Module:
    kind: Any = _private_class(native, names)
    return kind.__new__(kind)


def make_layer_private(
    module: nn.Module,
    *,
    radius: float | None = None,
    cotangent: float | None = None,
    cap: float | None = None,
    beta: float = 1.0,
    product: Product | None = None,
    caps: int = CHEAPEST,
    bound: bool = False,
    shared: bool = False,
) -> None:
    """Turn one native layer into its private form, in place, with the given limits (None: not enforced).

    ``bound``: the cap stands for a certified bound, which the engine moves with the weights; it meets the product of
    the factors' norms, and ``cap`` is only where it starts. ``shared``: another layer holds a parameter of this one.

    Formal guarantees:
        The layer's weight gradient, for each record, is the native one times a number in [0, 1] such that the input
        factor, the cotangent and their product respect the limits that are given. Its output and the gradient it passes
        to earlier layers are the native ones. (A layer with a forward of its own is limited by its engine's collector
        alone.)
    """
    native = getattr(type(module), "_wc_native", type(module))
    whole = shared or "forward" in module.__dict__ or known_form(native) is None or is_parametrized(module)
    module.__class__ = _private_class(native, _names(module) if whole else None)
    layer: Any = module
    device = next((q.device for q in module.parameters(recurse=False)), torch.device("cpu"))
    values = [_INF if v is None else float(v) for v in (radius, cotangent, cap)]
    # no buffer: casting or moving the model, or writing to its buffers, must not change what is enforced
    module.__dict__["_wc_limits"] = torch.tensor(values, dtype=torch.float32, device=device)
    bits = ((RADIUS, radius), (COTANGENT, cotangent), (CAP, cap))
    layer._wc_flags = sum(bit for bit, value in bits if value is not None)
    if cap is not None:
        layer._wc_flags |= BOUND if bound else int(caps) << KIND_SHIFT
    module.register_buffer("_wc_token", torch.zeros((), device=device), persistent=False)
    chosen = (product or Product()).resolve(module, device)
    layer._wc_beta, layer._wc_product, layer._wc_kind = float(beta), chosen, int(caps)
    layer._wc_sink = layer._wc_counter = None


def make_layer_plain(module: nn.Module) -> None:
    """Undo :func:`make_layer_private`."""
    if isinstance(module, Private):
        native = module._wc_native
        for name in _STATE:
            module.__dict__.pop(name, None)
        del module._wc_token
        module.__class__ = native  # type: ignore[assignment]


def limits_of(layer: Any) -> Tensor:
    """Limits in force of a private layer: radius, cotangent, cap. They may move: read them anew."""
    return layer._wc_limits


def limits_set(layer: Any) -> list[int]:
    """Places in :func:`limits_of` of the limits that were asked for, a certified bound not among them."""
    return [i for i in range(3) if layer._wc_flags & (1 << i) and not (i == 2 and layer._wc_flags & BOUND)]


def count_into(layer: Any, counter: Any) -> None:
    """Let a layer count how many records its limits change."""
    layer._wc_counter = counter


def know_parameters(layer: Any, tensors: Iterable[Tensor]) -> None:
    """These stand in the places of the layer's parameters while it runs (``fully_shard``), and nothing else."""
    layer._wc_sink.weights = {id(p): -1 for p in tensors}


@contextlib.contextmanager
def products_as_gradients(layers: Iterable[Any]) -> Iterator[None]:
    """Inside, layers give their products to autograd, without limits that stand for certified bounds (for audits)."""
    before = [(layer, layer._wc_flags) for layer in layers]
    for layer, flags in before:
        layer._wc_sink.on = False
        layer._wc_flags &= ~(CAP | BOUND) if flags & BOUND else -1
    try:
        yield
    finally:
        for layer, flags in before:
            layer._wc_sink.on, layer._wc_flags = True, flags


def is_private(module: nn.Module) -> bool:
    """Whether the layer has its private form."""
    return isinstance(module, Private)


def is_held(module: nn.Module) -> bool:
    """Whether an engine collects the layer's products."""
    return isinstance(module, Private) and module._wc_sink is not None


def families(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Modules that hold trainable parameters, by the path of the first; those that share one are one family."""
    found: dict[str, list[nn.Module]] = {}
    for path, module in model.named_modules():
        mine = {id(p) for p in module.parameters(recurse=False) if p.requires_grad}
        if not mine:
            continue
        kin = [k for k, f in found.items() if mine & {id(p) for m in f for p in m.parameters(recurse=False)}]
        if not kin:
            found[path] = [module]
            continue
        found[kin[0]] += [m for k in kin[1:] for m in found.pop(k)] + [module]
    return found


def trained(layers: Iterable[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """Trainable parameters of these modules with their own names, each parameter once."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for layer in layers:
        for name, p in layer.named_parameters(recurse=False):
            if p.requires_grad:
                found.setdefault(id(p), (name, p))
    return list(found.values())
