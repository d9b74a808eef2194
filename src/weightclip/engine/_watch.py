"""What a release must find as it was: the trainable parameters. And what a pass over private records must not write.

Which promise needs it: noise is added to the parameters the engine knows (SOUNDNESS section 7, iii), so none may be
frozen, cast or moved behind its back; and a buffer written by forward would carry earlier records into later products
(condition e) and into the saved model. Bounds need no watch: limits are enforced at the product.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from weightclip._torch import code_of, code_of_all_modules, version_of
from weightclip.errors import ContractError


class Watch:
    """Trainable parameters and modules as they were at ``make_private``.

    Formal guarantees:
        ``check`` and ``changed`` read types, places, flags and tables of hooks only, never values.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        self.parameters = list(model.named_parameters())
        self.kinds = [(p.dtype, p.device, p.requires_grad) for _, p in self.parameters]
        self._children = [(m, list(m._modules.values())) for m in self._modules]
        self._code: list[Any] = []
        self._tensors = [p for _, p in self.parameters] + list(model.buffers())

    def addresses(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Where parameters and buffers lie, and in which order of entries: what recorded work depends on."""
        return tuple([(t.data_ptr(), t.stride()) for t in self._tensors])

    def modes(self) -> tuple[bool, ...]:
        """Which modules are in training mode."""
        return tuple([m.training for m in self._modules])

    def changed(self) -> bool:
        """Whether hooks, or the ``forward`` of a module, are others than when this was asked before."""
        found = code_of_all_modules()
        for module in self._modules:
            found += code_of(module)
        before, self._code = self._code, found  # kept, so that no other object can come to lie at the same address
        return len(before) != len(found) or not all(map(operator.is_, before, found))

    def check(self) -> None:
        """Raise one clear error for the first parameter that changed in kind, or module that came or went."""
        for module, children in self._children:
            if list(module._modules.values()) != children:
                raise ContractError(
                    f"a part of {type(module).__name__} was added, replaced or removed after make_private, which has "
                    "not tested the model that is there now: change the model first, then make it private."
                )
        for (name, p), kind in zip(self.parameters, self.kinds, strict=True):
            if (p.dtype, p.device, p.requires_grad) != kind:
                raise ContractError(
                    f"parameter '{name}' was frozen, unfrozen, moved or cast after make_private: do that first, then "
                    "make the model private."
                )


@contextlib.contextmanager
def in_modes(model: nn.Module, modes: tuple[bool, ...]) -> Iterator[None]:
    """Every module in the mode it had in some pass (:meth:`Watch.modes`)."""
    modules = list(model.modules())
    before = [module.training for module in modules]
    try:
        for module, training in zip(modules, modes, strict=True):
            module.training = training
        yield
    finally:
        for module, training in zip(modules, before, strict=True):
            module.training = training


@contextlib.contextmanager
def in_double(model: nn.Module) -> Iterator[None]:
    """The model in double precision, the same parameters and buffers; their memory is theirs again afterwards."""
    tensors = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
    before = [t.data for t in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.double()
        yield
    finally:
        for tensor, data in zip(tensors, before, strict=True):
            tensor.data = data


class BufferGuard:
    """Forward pre-hook and hook of the model: a pass under gradients must leave every buffer as it is.

    Formal guarantees:
        Buffers written in place by an uncompiled forward are refused, so that no state travels from one batch to the
        next that way. Buffers may be changed between passes by public rules (schedules).
    """

    _weightclip = True

    def __init__(self, model: nn.Module) -> None:
        self.buffers = [(k, b) for k, b in model.named_buffers() if not k.rpartition(".")[2].startswith("_wc_")]
        self._before: list[int] | None = None

    def before(self, module: nn.Module, args: Any) -> None:
        """Note the state of all buffers."""
        if self.buffers and not torch.compiler.is_compiling():
            self._before = [version_of(b) for _, b in self.buffers] if torch.is_grad_enabled() else None

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Compare."""
        if self._before is None or torch.compiler.is_compiling():
            return
        versions, self._before = self._before, None
        for (name, buffer), version in zip(self.buffers, versions, strict=True):
            if version_of(buffer) != version:
                raise ContractError(
                    f"forward writes buffer '{name}': it would carry records of one batch into the next and into the "
                    "saved model. Freeze such modules with eval(), or use ones without running statistics."
                )

    before._weightclip = after._weightclip = True  # type: ignore[attr-defined] # hooks of ours, left out of copies

    def __deepcopy__(self, memo: dict[int, Any]) -> BufferGuard:
        return BufferGuard(nn.Module())  # a copied model is its owner's business

    def __reduce__(self) -> tuple[Any, ...]:
        return BufferGuard, (nn.Module(),)


def refuse_stray_gradients(optimizer: torch.optim.Optimizer, ours: set[int]) -> None:
    """A parameter the engine does not noise must bring no gradient into a step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in ours and parameter.grad is not None:
                raise ContractError(
                    "the optimizer holds a parameter with a gradient that is not private: freeze it, or make the model "
                    "private with it."
                )


def evaluate_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A closure runs once, here, before anything is released; the optimiser gets its value in place of it.

    An optimiser that called it again would recompute gradients without noise.
    """
    closures = [f for f in (*args[1:], *kwargs.values()) if callable(f)]
    if not closures:
        return None
    with torch.enable_grad():
        value = closures[0]()

    def known(given: Any) -> Any:
        return (lambda: value) if given is closures[0] else given

    return (args[0], *map(known, args[1:])), {name: known(given) for name, given in kwargs.items()}


def refuse_scaler(optimizer: torch.optim.Optimizer) -> None:
    """A gradient scaler skips steps by the data."""
    scaler = [name for name in ("grad_scale", "found_inf") if getattr(optimizer, name, None) is not None]
    for name in scaler:
        delattr(optimizer, name)
    if scaler:
        raise ContractError("GradScaler skips steps depending on the data: use bfloat16 autocast without a scaler.")
