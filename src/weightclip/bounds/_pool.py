"""Rules of pooling and of reductions inside a record."""

from __future__ import annotations

import math

import torch

from weightclip.bounds._conv_norms import overlap, per_axis
from weightclip.bounds._rule import Effect, Op, register_rule, register_rules
from weightclip.bounds._shape import axis

aten = torch.ops.aten


def _axes(op: Op) -> int:
    """Dimensions pooled over: the digit in the operator's name, whatever else a record's shape has in front."""
    return int(op.kind.split(".")[1][-2])


def _window(op: Op, rank: int, ceil_mode: int):
    """Kernel and stride; ``ceil_mode`` is the place of that argument, which is refused."""
    if op.arg(ceil_mode, "ceil_mode", False):
        raise op.refuse("ceil_mode pooling has no rule", "set ceil_mode=False")
    kernel = per_axis(op.arg(1, "kernel_size"), rank, "kernel_size")
    stride = per_axis(op.arg(2, "stride", None) or kernel, rank, "stride")
    return kernel, stride


@register_rules(aten.max_pool1d, aten.max_pool2d, aten.max_pool3d)
def _max_pool(op: Op, p: float) -> Effect:
    rank = _axes(op)
    kernel, stride = _window(op, rank, ceil_mode=5)
    dilation = per_axis(op.arg(4, "dilation", 1), rank, "dilation")
    m = overlap(kernel, stride, dilation)
    # an entry wins in at most m windows: p = 1 m, p = 2 sqrt(m), p = inf 1
    return Effect(gains=(m if p == 1 else (1.0 if math.isinf(p) else math.sqrt(m)),))


@register_rules(aten.avg_pool1d, aten.avg_pool2d, aten.avg_pool3d)
def _avg_pool(op: Op, p: float) -> Effect:
    rank = _axes(op)
    kernel, stride = _window(op, rank, ceil_mode=4)
    padding = per_axis(op.arg(3, "padding", 0), rank, "padding")
    if any(padding) and not op.arg(5, "count_include_pad", True):
        raise op.refuse("count_include_pad=False with padding has no rule", "set count_include_pad=True")
    area = math.prod(kernel)
    divisor = abs(op.arg(6, "divisor_override", None) or area)
    return Effect(gains=(_averaging(p, overlap(kernel, stride, (1,) * rank), area, divisor),))


def _averaging(p: float, m: int, area: int, divisor: float) -> float:
    """Windows of ``area`` entries, each entry in at most m of them: rows sum to area/divisor, columns to m/divisor."""
    if p == 1:
        return m / divisor
    return area / divisor if math.isinf(p) else math.sqrt(m * area) / divisor


@register_rules(aten.adaptive_avg_pool1d, aten.adaptive_avg_pool2d, aten.adaptive_avg_pool3d)
@register_rules(aten.adaptive_max_pool1d, aten.adaptive_max_pool2d, aten.adaptive_max_pool3d)
def _adaptive_pool(op: Op, p: float) -> Effect:
    axes = _axes(op)
    sizes = list(zip(op.shapes[0][-axes:], op.out_shape[-axes:], strict=True))
    if any(i % o for i, o in sizes):
        raise op.refuse("an adaptive pool whose output does not divide its input", "choose an output size that divides")
    area = math.prod(i // o for i, o in sizes)
    return Effect(gains=(1.0 if "max" in op.kind else _averaging(p, 1, area, area),))


def _reduced(op: Op) -> int:
    """Entries that one output entry gathers; refuses to reduce over records."""
    rank = len(op.shapes[0]) + 1
    dims = op.arg(2 if "vector_norm" in op.kind else 1, "dim", None)
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        raise op.refuse("it reduces over records", "reduce over the dimensions of one record only (dim=1 and up)")
    places = [axis(op, d, rank) for d in (dims if isinstance(dims, (list, tuple)) else [dims])]
    return math.prod(op.shapes[0][place - 1] for place in places)


@register_rule(aten.mean)
def _mean(op: Op, p: float) -> Effect:
    n = _reduced(op)
    return Effect(gains=(_averaging(p, 1, n, n),))


@register_rule(aten.sum)
def _sum(op: Op, p: float) -> Effect:
    return Effect(gains=(_averaging(p, 1, _reduced(op), 1),))


@register_rules(aten.amax, aten.amin)
def _amax(op: Op, p: float) -> Effect:
    _reduced(op)
    return Effect(gains=(1.0,))


@register_rules(aten.var, aten.std, aten.linalg_vector_norm)
def _spread(op: Op, p: float) -> Effect:
    _reduced(op)
    return Effect(gains=(math.inf,), offset=math.inf)


@register_rules(aten.batch_norm, aten.native_batch_norm)
def _batch_norm(op: Op, p: float) -> Effect:
    raise op.refuse("batch normalisation mixes records", "use weightclip.nn.SafeGroupNorm")
