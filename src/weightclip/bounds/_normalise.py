"""Normalisation layers (safe and plain), projections and the other fixed maps of ``weightclip.nn``.

The gains and factors are those of SOUNDNESS Theorem 9.
"""

from __future__ import annotations

import math
import warnings

import torch
from torch import nn

from weightclip import nn as wnn
from weightclip.bounds._layer import LayerRule, Numerics, bias_norm, pythagoras, register_layer
from weightclip.bounds._rule import Effect, Op, Scalar, least, plus, register_rule, register_rules, times

aten = torch.ops.aten


class NormRule(LayerRule):
    """(x - mean)/divisor per group, gamma and b per channel: gain max|gamma|/alpha, output <= max|gamma| sqrt(n)."""

    in_product = True

    def floor(self, module: nn.Module) -> float:
        """Smallest divisor: alpha, or sqrt(eps) of a plain norm."""
        return module.alpha if hasattr(module, "alpha") else math.sqrt(module.eps)  # type: ignore[return-value]

    def check(self, module: nn.Module, op: Op) -> None:
        """A plain norm is allowed, at a price worth saying."""
        if not hasattr(module, "alpha"):
            warnings.warn(
                f"{type(module).__name__} '{op.path}' has gain 1/sqrt(eps) = {1 / self.floor(module):.0f}: every layer "
                "before it gets that much more noise. weightclip.nn.SafeGroupNorm or SafeLayerNorm avoid it.",
                stacklevel=2,
            )

    def group_size(self, module: nn.Module, op: Op) -> int:
        """n_g: entries normalised together."""
        shape = getattr(module, "normalized_shape", None)
        return math.prod(shape) if shape is not None else math.prod(op.shapes[0]) // module.num_groups  # type: ignore

    def shared(self, module: nn.Module, op: Op) -> int:
        """Entries of a record that share one gamma."""
        weight = getattr(module, "weight", None)
        return 1 if weight is None else math.prod(op.shapes[0]) // weight.numel()

    def rounding(self, module: nn.Module, op: Op, x: Scalar) -> Scalar:
        """By how much the computed (x - mean)/divisor may exceed sqrt(n): nothing for safe norms, which divide by the
        spread of the very values they return; a plain norm of nearly constant inputs divides rounding errors by
        sqrt(eps)."""
        if hasattr(module, "alpha"):
            return 0.0
        # errors of the mean, the variance and x * scale + shift, over sqrt(eps)
        return times(8 * (self.group_size(module, op) + 8) * 2.0**-24 / self.floor(module), x)

    def gain(self, module: nn.Module, op: Op, p: float, numerics: Numerics) -> Scalar:
        """1/alpha for p = 2; (1 + sqrt(n_g))/(2 alpha) for p = 1, inf; times max|gamma|."""
        n = self.group_size(module, op)
        base = 1 / self.floor(module) if p == 2 else (1 + math.sqrt(n)) / (2 * self.floor(module))
        weight = getattr(module, "weight", None)
        scale = 1.0 if weight is None else weight.detach().to(numerics.weights).abs().max().double()
        return times(base * numerics.inflate(8, 1), scale)

    def output(self, module: nn.Module, op: Op, gain: Scalar, x: Scalar) -> Scalar:
        """max|gamma| sqrt(numel) + sqrt(positions) ||b|| whatever the input (mean subtraction maps 0 to 0)."""
        weight = getattr(module, "weight", None)
        scale = 1.0 if weight is None else weight.detach().abs().max().double()
        free = times(scale, plus(math.sqrt(math.prod(op.out_shape)) * (1 + 1e-6), self.rounding(module, op, x)))
        shift = times(math.sqrt(self.shared(module, op)), bias_norm(module))
        return plus(least(free, times(gain, x)), shift)

    def factor(self, module: nn.Module, op: Op, x: Scalar, beta: float, p: float) -> Scalar:
        """sqrt(n over groups touching one gamma + beta^2 entries sharing it); p = 1 by the sqrt(numel) fallback."""
        touched = self.group_size(module, op)
        if hasattr(module, "normalized_shape"):
            # one gamma per place inside the group: every group touches it
            touched *= math.prod(op.shapes[0]) // touched
        largest = plus(math.sqrt(touched) * (1 + 1e-6), self.rounding(module, op, x))
        a2 = pythagoras(module, largest, beta * math.sqrt(self.shared(module, op)))
        return times(math.sqrt(math.prod(op.out_shape)), a2) if p == 1 else a2


for _kind in (nn.GroupNorm, nn.LayerNorm, wnn.SafeGroupNorm, wnn.SafeInstanceNorm, wnn.SafeLayerNorm):
    register_layer(_kind, NormRule())


@register_rules(wnn.Project, wnn.UnitNorm)
def _scaled_records(op: Op, p: float) -> Effect:
    module = op.module
    assert isinstance(module, (wnn.Project, wnn.UnitNorm))
    n = math.prod(op.out_shape)
    gain = 1.0 if p == 2 or module.detach else (1 + math.sqrt(n)) / 2
    radius, floor = (module.radius, 1.0) if isinstance(module, wnn.Project) else (1.0, module.floor)
    return Effect(gains=(gain / floor,), ceiling=radius * (1 + (n + 8) * 2.0**-24))


@register_rules(aten.group_norm, aten.layer_norm)
def _functional_norm(op: Op, p: float) -> Effect:
    layer = op.kind.startswith("aten.layer_norm")
    weight, bias, eps = op.arg(2, "weight"), op.arg(3, "bias"), op.arg(4, "eps", 1e-5)
    if weight is not None or bias is not None:
        raise op.refuse("a functional norm with weights has no rule", "use nn.GroupNorm / nn.LayerNorm modules")
    if eps <= 0:
        raise op.refuse("a norm with eps = 0 has no finite gain", "use a positive eps")
    if layer:
        n = math.prod(op.arg(1, "normalized_shape"))
        if n > math.prod(op.shapes[0]):
            raise op.refuse("it normalises over records", "keep records on dimension 0")
    else:
        n = math.prod(op.shapes[0]) // op.arg(1, "num_groups")
    gain = 1 / math.sqrt(eps) if p == 2 else (1 + math.sqrt(n)) / (2 * math.sqrt(eps))
    # sqrt(numel) is no bound of what is computed, see NormRule.rounding; the input's own bound is
    return Effect(gains=(gain,))


def _fixed(gain_of):
    def rule(op: Op, p: float) -> Effect:
        return Effect(gains=(gain_of(op.module, p),))

    return rule


register_rule(wnn.GroupSort, _fixed(lambda module, p: 1.0))
register_rule(wnn.MaxMin, _fixed(lambda module, p: 1.0))
register_rule(wnn.BlurPool2d, _fixed(lambda module, p: module.operator_norm(p)))
register_rule(wnn.NormPool2d, _fixed(lambda module, p: float(_side(module)) if math.isinf(p) else 1.0))
register_rule(
    wnn.ScaledAvgPool2d, _fixed(lambda module, p: {2: 1.0, 1: 1 / _side(module)}.get(p, float(_side(module))))
)
register_rule(wnn.Scattering2d, _fixed(lambda module, p: module.gain if p == 2 else math.inf))


def _side(module: nn.Module) -> float:
    """Root of the window's area."""
    size = module.kernel_size
    return float(size) if isinstance(size, int) else math.sqrt(math.prod(size))  # type: ignore[arg-type]
