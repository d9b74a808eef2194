"""The shape of a rule: what one operator does to norms, and the registry where rules are found.

A rule receives an :class:`Op` (one node of the model's graph, batch dimension removed) and the exponent ``p`` of the
chain, and returns an :class:`Effect`: one Lipschitz constant per incoming edge, and how l2 bounds pass forward.
SOUNDNESS Theorem 10 lists the built-in ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from weightclip.errors import CertificationError

Scalar = float | Tensor
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Edge:
    """Stands, inside ``Op.args``, for the i-th activation that flows into the operator."""

    index: int


@dataclass(frozen=True)
class Op:
    """One operator of the exported graph, as rules see it.

    Attributes:
        name: Name of the node (or path of the module) for error messages.
        kind: Printable operator type.
        args: Positional arguments; activations are :class:`Edge`, constant tensors are tensors.
        kwargs: Keyword arguments, likewise.
        shapes: Per-record shape of each incoming activation.
        out_shape: Per-record shape of the result.
        module: The module this operator is, for rules registered on a module type.
        path: ``named_modules()`` path of that module.
        floating: Whether the result is floating-point; integers (token ids) carry no norm and no gradient.
    """

    name: str
    kind: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shapes: tuple[Shape, ...]
    out_shape: Shape
    module: nn.Module | None = None
    path: str = ""
    floating: bool = True

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        """The argument at ``position`` or called ``name``, else ``default``."""
        if len(self.args) > position:
            return self.args[position]
        return self.kwargs.get(name, default)

    def refuse(self, why: str, fix: str) -> CertificationError:
        """An error that names this node and says how to fix it."""
        return CertificationError(f"node '{self.name}' ({self.kind}): {why}. Fix: {fix}.")


@dataclass(frozen=True)
class Effect:
    """What an operator does to norms.

    Attributes:
        gains: For each incoming edge, an upper bound of the operator's Lipschitz constant in the chain's p-norm;
            ``math.inf`` where there is none (allowed only where no bound passes through).
        offset: Upper bound of the l2 norm of the operator's value at zero.
        ceiling: Upper bound of the output's l2 norm whatever the input.
        root: True where input bounds combine as a root of squares (concatenation) instead of a sum.
    """

    gains: tuple[Scalar, ...]
    offset: Scalar = 0.0
    ceiling: Scalar = math.inf
    root: bool = False

    def output(self, inputs: Sequence[Scalar]) -> Scalar:
        """l2 bound of the output, from l2 bounds of the inputs; call on an effect computed with p = 2."""
        parts = [times(c, x) for c, x in zip(self.gains, inputs, strict=True)]
        total = root_sum(parts) if self.root else plus(*parts)
        return least(plus(total, self.offset), self.ceiling)


Rule = Callable[[Op, float], Effect]


def _infinite(value: Scalar) -> bool:
    # tensors are never infinite by construction: a bound that does not exist is the Python float inf
    return isinstance(value, float) and math.isinf(value)


def times(a: Scalar, b: Scalar) -> Scalar:
    """Product of bounds; no bound times anything is no bound, except that an exact Python zero blocks it."""
    if not (isinstance(a, Tensor) or a) or not (isinstance(b, Tensor) or b):
        return 0.0
    if _infinite(a) or _infinite(b):
        return math.inf
    return a * b


def plus(*terms: Scalar) -> Scalar:
    """Sum of bounds."""
    if any(_infinite(t) for t in terms):
        return math.inf
    some = [t for t in terms if isinstance(t, Tensor) or t]  # adding an exact zero would be a launch
    return functools.reduce(lambda a, b: a + b, some) if some else 0.0


def least(*terms: Scalar) -> Scalar:
    """The smallest bound."""
    floats = [float(t) for t in terms if not isinstance(t, Tensor)]
    tensors = [t for t in terms if isinstance(t, Tensor)]
    if not tensors:
        return min(floats)
    best = tensors[0]
    for t in tensors[1:]:
        best = torch.minimum(best, t)
    return best.clamp(max=min(floats)) if floats and not math.isinf(min(floats)) else best


def root(value: Scalar) -> Scalar:
    """Square root of a bound."""
    return value.sqrt() if isinstance(value, Tensor) else math.sqrt(value)


def root_sum(terms: Sequence[Scalar]) -> Scalar:
    """Root of the sum of squares."""
    return root(plus(*(times(t, t) for t in terms)))


@dataclass
class _Registry:
    operators: dict[Any, Rule] = field(default_factory=dict)
    modules: dict[type, Rule] = field(default_factory=dict)


_REGISTRY = _Registry()


def register_rule(target: Any, rule: Rule | None = None) -> Any:
    """Register the rule of an operator or of a parameter-free module type; usable as a decorator.

    Args:
        target: A module type, or a torch operator such as ``torch.ops.aten.relu`` (packet or overload).
        rule: ``rule(op, p) -> Effect``. The author vouches for three things: every gain is an upper bound of the
            Lipschitz constant in the p-norm, ``offset``/``ceiling`` bound the output, and no record's output depends
            on another record.

    Formal guarantees:
        The certificate is exactly as true as the registered rules. ``weightclip.audit`` tries to falsify them.

    Example:
        >>> import torch, weightclip as wc
        >>> class Halve(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x.sin() / 2
        >>> @wc.register_rule(Halve)
        ... def _(op, p):
        ...     return wc.Effect(gains=(0.5,))
    """
    if rule is None:
        return lambda function: register_rule(target, function)
    if isinstance(target, type) and issubclass(target, nn.Module):
        _REGISTRY.modules[target] = rule
    else:
        _REGISTRY.operators[target] = rule
    return rule


def register_rules(*targets: Any) -> Callable[[Rule], Rule]:
    """One rule for several operators, as a decorator."""

    def register(rule: Rule) -> Rule:
        for target in targets:
            register_rule(target, rule)
        return rule

    return register


_HARMLESS = {"__init__", "extra_repr", "reset_parameters", "__repr__"}


def computes_like(module: nn.Module, kind: type) -> bool:
    """Whether no subclass and no attribute of the instance replaces a method of ``kind`` (besides initialisation)."""
    actual = getattr(type(module), "_wc_native", type(module))  # a private layer stands for its native class
    methods = [n for n, f in vars(kind).items() if callable(f) and n not in _HARMLESS and not isinstance(f, type)]
    native = all(getattr(actual, n) is getattr(kind, n) for n in {"forward", "__call__", *methods})
    return native and not any(n in module.__dict__ for n in ("forward", *methods))


def module_rule(module: nn.Module) -> Rule | None:
    """The rule of a module's own type, if one is registered and the module computes what that type computes."""
    for kind in type(module).__mro__:
        if kind in _REGISTRY.modules:
            return _REGISTRY.modules[kind] if computes_like(module, kind) else None
    return None


def operator_rule(target: Any) -> Rule | None:
    """The rule of a torch operator: its overload first, then its packet."""
    return _REGISTRY.operators.get(target) or _REGISTRY.operators.get(getattr(target, "overloadpacket", None))
