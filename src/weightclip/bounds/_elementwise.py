"""Rules of functions applied entry by entry: the same constant serves every p-norm."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from weightclip.bounds._rule import Edge, Effect, Op, register_rule, register_rules

aten = torch.ops.aten

# sup |f'|, rounded up in the last digit kept; tests/bounds/test_elementwise.py checks each on a fine grid
GELU = 1.12905
SILU = 1.09984
MISH = 1.08851
HARDSWISH = 1.5
HARDSIGMOID = 1 / 6 + 2.0**-24  # torch keeps 1/6 in float32


def _entrywise(names: str, gain: float, at_zero: float = 0.0, sup: float = math.inf) -> None:
    """Register sup |f'|, |f(0)| and sup |f| of operators."""

    def rule(op: Op, p: float) -> Effect:
        root_n = math.sqrt(math.prod(op.out_shape))
        return Effect(gains=(gain,), offset=abs(at_zero) * root_n, ceiling=sup * root_n)

    for name in names.split():
        register_rule(getattr(aten, name), rule)


_entrywise("relu relu_ abs neg", 1.0)
_entrywise("tanh tanh_ sin", 1.0, sup=1.0)
_entrywise("cos", 1.0, at_zero=1.0, sup=1.0)
_entrywise("sigmoid sigmoid_", 0.25, at_zero=0.5, sup=1.0)
_entrywise("log_sigmoid", 1.0, at_zero=math.log(2))
_entrywise("relu6 relu6_", 1.0, sup=6.0)
_entrywise("hardsigmoid hardsigmoid_", HARDSIGMOID, at_zero=0.5, sup=1.0)
_entrywise("hardswish hardswish_", HARDSWISH)
_entrywise("gelu", GELU)
_entrywise("silu silu_", SILU)
_entrywise("mish mish_", MISH)
_entrywise("erf", 2 / math.sqrt(math.pi), sup=1.0)
_entrywise("selu selu_", 1.7581)
# no finite constant, but entry by entry and so record by record: usable between layers whose factors are bounded
_entrywise("exp log sqrt rsqrt square reciprocal log1p expm1", math.inf, at_zero=math.inf)


@register_rules(aten.leaky_relu, aten.leaky_relu_)
def _leaky_relu(op: Op, p: float) -> Effect:
    return Effect(gains=(max(1.0, abs(op.arg(1, "negative_slope", 0.01))),))


@register_rules(aten.elu, aten.elu_)
def _elu(op: Op, p: float) -> Effect:
    alpha, scale, input_scale = op.arg(1, "alpha", 1.0), op.arg(2, "scale", 1.0), op.arg(3, "input_scale", 1.0)
    if input_scale <= 0:
        raise op.refuse("elu with input_scale <= 0 grows exponentially", "use a positive input_scale")
    return Effect(gains=(abs(scale) * max(1.0, abs(alpha * input_scale)),))


@register_rules(aten.celu, aten.celu_)
def _celu(op: Op, p: float) -> Effect:
    if op.arg(1, "alpha", 1.0) <= 0:
        raise op.refuse("celu with alpha <= 0 grows exponentially", "use a positive alpha")
    return Effect(gains=(1.0,))


@register_rule(aten.softplus)
def _softplus(op: Op, p: float) -> Effect:
    beta = op.arg(1, "beta", 1)
    if beta <= 0:
        raise op.refuse("softplus needs beta > 0", "use a positive beta")
    # torch switches to the identity above the threshold: a jump of at most log(2)/beta, covered by the offset alone
    return Effect(gains=(1.0,), offset=math.log(2) / beta * math.sqrt(math.prod(op.out_shape)))


@register_rules(aten.hardtanh, aten.hardtanh_, aten.clamp)
def _clamp(op: Op, p: float) -> Effect:
    low, high = op.arg(1, "min", None), op.arg(2, "max", None)
    if "hardtanh" in op.kind:
        low, high = op.arg(1, "min_val", -1.0), op.arg(2, "max_val", 1.0)
    low, high = (-math.inf if low is None else low), (math.inf if high is None else high)
    if isinstance(low, (Edge, Tensor)) or isinstance(high, (Edge, Tensor)):
        raise op.refuse("clamping by a tensor has no rule", "clamp by numbers")
    root_n = math.sqrt(math.prod(op.out_shape))
    at_zero = min(max(0.0, low), high)
    return Effect(gains=(1.0,), offset=abs(at_zero) * root_n, ceiling=max(abs(low), abs(high)) * root_n)


@register_rules(aten.dropout, aten.dropout_, aten.feature_dropout, aten.feature_dropout_)
def _dropout(op: Op, p: float) -> Effect:
    rate, training = op.arg(1, "p", 0.5), op.arg(2, "train", False)
    if not training or rate == 0:
        return Effect(gains=(1.0,))
    if rate >= 1:
        return Effect(gains=(0.0,), ceiling=0.0)
    return Effect(gains=(1 / (1 - rate),))


@register_rule(aten.pow)
def _pow(op: Op, p: float) -> Effect:
    exponent = op.arg(1, "exponent")
    if exponent == 1:
        return Effect(gains=(1.0,))
    return Effect(gains=(math.inf,) * len(op.shapes), offset=math.inf)
