"""What must stay as it was certified while a model is private."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from weightclip._torch import backward_hooks, forward_hooks, gradient_hooks, post_accumulate_hooks, version_of
from weightclip.errors import ContractError

_TABLES = ("_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks",
           "_backward_pre_hooks")  # fmt: skip
_attributes = operator.attrgetter("__dict__")


class _Held:
    """The objects that modules hold, and their names: while they are the same ones, no check comes out differently.

    Numbers, words and tuples cannot change in place; lists can, and are compared with copies.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules, self.kinds = modules, [type(m) for m in modules]
        self.attributes = [m.__dict__ for m in modules]
        self.tables = [*self.attributes, *(getattr(m, name) for m in modules for name in _TABLES)]
        self.names = [*chain.from_iterable(self.tables)]
        self.values = [*chain.from_iterable(map(dict.values, self.tables))]
        self.lists = [(found, found.copy()) for value in self.values for found in _lists(value)]

    def unchanged(self) -> bool:
        """Whether nothing was added, removed or replaced; at C speed, since this runs in every step."""
        return (
            [*map(type, self.modules)] == self.kinds
            and all(map(operator.is_, map(_attributes, self.modules), self.attributes))
            and [*chain.from_iterable(self.tables)] == self.names
            and all(map(operator.is_, chain.from_iterable(map(dict.values, self.tables)), self.values))
            and all(len(now) == len(then) and all(map(operator.is_, now, then)) for now, then in self.lists)
        )


class Watch:
    """Compares a model with what it was at ``make_private``: after a change the certificate speaks of another model.

    Args:
        model: The model.
        limits_move: Whether limits follow private quantiles.
        ruled: Modules with a rule of their own: their numbers, like those of torch's modules (alpha, p, eps, stride),
            are part of the bounds.

    Formal guarantees:
        ``check`` reads structure, public constants and flags only, never records.
    """

    def __init__(self, model: nn.Module, limits_move: bool = False, ruled: Iterable[nn.Module] = ()) -> None:
        self.modules = [(path, m, _members(m)) for path, m in model.named_modules()]
        self.parameters = list(model.named_parameters())
        self.kinds = [(p.dtype, p.device, p.requires_grad) for _, p in self.parameters]
        fixed = [(k, b) for k, b in model.named_buffers() if not (limits_move and k.endswith("_wc_limits"))]
        leaves = [m for m in model.modules() if not m._modules]  # users may note what they like on a container
        known = [m for m in leaves if type(m).__module__.partition(".")[0] in ("torch", "weightclip")]
        self.numbers = [(m, _numbers(m)) for m in dict.fromkeys([*known, *ruled])]
        self._held: _Held | None = None  # as at the last full check
        self.buffers = [(name, b, version_of(b), b.detach().clone()) for name, b in fixed]

    def versions(self) -> list[int]:
        """In-place changes of every parameter so far."""
        return [version_of(p) for _, p in self.parameters]

    def addresses(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Where parameters and buffers lie, and in which order of entries."""
        tensors = [p for _, p in self.parameters] + [b for _, b, _, _ in self.buffers]
        return tuple([(t.data_ptr(), t.stride()) for t in tensors])

    def modes(self) -> tuple[bool, ...]:
        """Which modules are in training mode."""
        return tuple(m.training for _, m, _ in self.modules)

    def check(self) -> None:
        """Raise one clear error for the first thing that changed."""
        if self._held is None or not self._held.unchanged():
            self._check_modules()
            self._held = _Held([*dict.fromkeys([*(m for _, m, _ in self.modules), *(m for m, _ in self.numbers)])])
        self._check_tensors()

    def _check_modules(self) -> None:
        for path, module, members in self.modules:
            if _members(module) != members:
                raise ContractError(
                    f"module '{path}' got other parts after make_private: build the model first, then make it private."
                )
            if backward_hooks(module) or _foreign(module):
                raise ContractError(
                    f"module '{path}' got a hook after make_private, which the certificate cannot see: remove the hook."
                )
        for module, numbers in self.numbers:
            if _numbers(module) != numbers:
                now, path = _numbers(module), next((path for path, m, _ in self.modules if m is module), "")
                names = dict.fromkeys(n for a, b in ((now, numbers), (numbers, now)) for n, v in a if (n, v) not in b)
                raise ContractError(
                    f"'{', '.join(names)}' of module '{path}' changed after make_private: bounds hold for the old one."
                )

    def _check_tensors(self) -> None:
        for (name, p), kind in zip(self.parameters, self.kinds, strict=True):
            if (p.dtype, p.device, p.requires_grad) != kind:
                raise ContractError(
                    f"parameter '{name}' was frozen, unfrozen, moved or cast after make_private: do that first, then "
                    "make the model private."
                )
            if gradient_hooks(p):
                raise ContractError(f"parameter '{name}' got a gradient hook after make_private: remove the hook.")
        for i, (name, buffer, version, value) in enumerate(self.buffers):
            if version_of(buffer) == version:
                continue
            if not _same(buffer, value):
                raise ContractError(f"buffer '{name}' changed after make_private: bounds hold for its old value.")
            self.buffers[i] = (name, buffer, version_of(buffer), value)


def _lists(value: Any) -> Iterator[list[Any]]:
    """Lists in a value, those inside of lists and tuples too."""
    if isinstance(value, (list, tuple)):
        if isinstance(value, list):
            yield value
        for part in value:
            yield from _lists(part)


def _frozen(value: Any) -> Any:
    return tuple([_frozen(part) for part in value]) if isinstance(value, (list, tuple)) else value


def _members(module: nn.Module) -> tuple[int, ...]:
    parts = (module._modules, module._parameters, module._buffers)
    return (id(type(module)), *(id(part) for table in parts for part in table.values()))


def _numbers(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """Public numbers and words among a module's attributes."""
    return tuple([
        (name, _frozen(value)) for name, value in module.__dict__.items()
        if isinstance(value, (int, float, str, tuple, list)) and name[0] != "_" and name != "training"
    ])  # fmt: skip


def _foreign(module: nn.Module) -> bool:
    return any(not getattr(hook, "_weightclip", False) for hook in forward_hooks(module))


def _same(a: Tensor, b: Tensor) -> bool:
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def refuse_early_hooks(model: nn.Module) -> None:
    """Hooks may change what is certified, and those on accumulation see gradients before the noise."""
    for path, module in model.named_modules():
        if _foreign(module):
            raise ContractError(f"module '{path}' has a forward hook, which may change what is certified: remove it.")
    for name, parameter in model.named_parameters():
        if post_accumulate_hooks(parameter):
            raise ContractError(
                f"parameter '{name}' has a post-accumulate hook, which would see gradients before the noise: remove it."
            )


def refuse_gradient_hooks(output: Tensor, parameters: Iterable[Tensor]) -> None:
    """Nobody may change certified gradients on their way: not at the output of a compiled model, nor at parameters."""
    if gradient_hooks(output) or any(gradient_hooks(p) for p in parameters):
        raise ContractError(
            "a gradient hook was registered on the model's output or on a parameter, which the certificate cannot see: "
            "remove the hook."
        )


def refuse_stray_gradients(optimizer: torch.optim.Optimizer, ours: set[int]) -> None:
    """A parameter the engine does not noise must bring no gradient into a step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in ours and parameter.grad is not None:
                raise ContractError(
                    "the optimizer holds a parameter with a gradient that is not private: freeze it, or make the model "
                    "private with it."
                )
