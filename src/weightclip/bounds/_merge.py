"""Rules of operators in which several activations, or an activation and a constant, meet."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from weightclip.bounds._rule import Edge, Effect, Op, register_rules
from weightclip.bounds._shape import axis, copies

aten = torch.ops.aten


def _operands(op: Op):
    return op.arg(0, "self"), op.arg(1, "other")


def _broadcast(op: Op, edge: Edge, p: float) -> float:
    """Gain of broadcasting one activation to the output's shape, refusing shapes where records would be mixed."""
    shape = op.shapes[edge.index]
    if len(shape) != len(op.out_shape):
        raise op.refuse("activations of different rank meet, so records would be mixed", "unsqueeze to the same rank")
    return copies(p, math.prod(op.out_shape) / max(1, math.prod(shape)))


def _constant_norm(op: Op, value: Tensor) -> float:
    """l2 norm of a constant broadcast to one record; a constant with a record dimension is refused."""
    if value.dim() > len(op.out_shape) and value.shape[0] != 1:
        raise op.refuse("a constant tensor has a record dimension", "use a constant of one record's shape")
    copies_ = math.prod(op.out_shape) / max(1, value.numel())
    return float(value.double().norm()) * math.sqrt(copies_)


@register_rules(aten.add, aten.add_, aten.sub, aten.sub_, aten.rsub, aten.maximum, aten.minimum)
def _sum(op: Op, p: float) -> Effect:
    # an extremum moves by no more than the sum of its operands' moves, and is at most their sum in size
    alpha = abs(float(op.arg(2, "alpha", 1)))
    weights = (alpha, 1.0) if op.kind.startswith("aten.rsub") else (1.0, alpha)  # rsub: other - alpha * self
    gains, offset = [], 0.0
    for operand, weight in zip(_operands(op), weights, strict=True):
        if isinstance(operand, Edge):
            gains.append(weight * _broadcast(op, operand, p))
        elif isinstance(operand, Tensor):
            offset += weight * _constant_norm(op, operand)
        else:
            offset += weight * abs(float(operand)) * math.sqrt(math.prod(op.out_shape))
    return Effect(gains=tuple(gains), offset=offset)


def _largest(value: Tensor | float) -> float:
    return float(value.detach().abs().max()) if isinstance(value, Tensor) else abs(float(value))


@register_rules(aten.mul, aten.mul_)
def _mul(op: Op, p: float) -> Effect:
    a, b = _operands(op)
    edges = [o for o in (a, b) if isinstance(o, Edge)]
    if len(edges) == 2:
        for edge in edges:
            _broadcast(op, edge, p)
        return Effect(gains=(math.inf, math.inf), offset=math.inf)
    constant = b if isinstance(a, Edge) else a
    if isinstance(constant, Tensor):
        _constant_norm(op, constant)
    return Effect(gains=(_largest(constant) * _broadcast(op, edges[0], p),))


@register_rules(aten.div, aten.div_)
def _div(op: Op, p: float) -> Effect:
    a, b = _operands(op)
    if op.arg(2, "rounding_mode") is not None:
        raise op.refuse("division with rounding keeps no norm", "divide without rounding_mode")
    if isinstance(b, Edge):
        for edge in (o for o in (a, b) if isinstance(o, Edge)):
            _broadcast(op, edge, p)
        return Effect(gains=(math.inf,) * len(op.shapes), offset=math.inf)
    if isinstance(b, Tensor):
        _constant_norm(op, b)
        smallest = float(b.detach().abs().min())
    else:
        smallest = abs(float(b))
    if smallest == 0:
        raise op.refuse("division by zero", "divide by a non-zero constant")
    return Effect(gains=(_broadcast(op, a, p) / smallest,))


@register_rules(aten.matmul, aten.scaled_dot_product_attention, aten.masked_fill, aten.where)
def _bilinear(op: Op, p: float) -> Effect:
    """Attention and its parts: no finite gain. Batched over records as long as every operand has them in front."""
    rank = len(op.out_shape)
    if any(len(shape) != rank for shape in op.shapes):
        raise op.refuse("activations of different rank meet, so records may be mixed", "keep records on dimension 0")
    if op.kind.startswith(("aten.matmul", "aten.scaled_dot_product_attention")) and rank < 2:
        raise op.refuse("a product of two batches of vectors mixes records", "keep records on dimension 0")
    return Effect(gains=(math.inf,) * len(op.shapes), offset=math.inf)


@register_rules(aten.softmax, aten._softmax)
def _softmax(op: Op, p: float) -> Effect:
    place = axis(op, op.arg(1, "dim"), len(op.out_shape) + 1)
    groups = math.prod(op.out_shape) / op.out_shape[place - 1]
    # J = diag(s) - s sT has row sums 2 s(1-s) <= 1/2, so 1/2 in every p-norm; each group lies in the unit ball
    return Effect(gains=(0.5,), offset=math.sqrt(groups / op.out_shape[place - 1]), ceiling=math.sqrt(groups))


@register_rules(aten.log_softmax, aten._log_softmax)
def _log_softmax(op: Op, p: float) -> Effect:
    size = op.out_shape[axis(op, op.arg(1, "dim"), len(op.out_shape) + 1) - 1]
    # J = I - 1 sT: an oblique projection of l2 norm sqrt(n)|s| <= sqrt(n); row sums <= 2; column sums <= max(1, n-1)
    gain = 2.0 if math.isinf(p) else (max(1.0, size - 1.0) if p == 1 else math.sqrt(size))
    return Effect(gains=(gain,), offset=math.log(size) * math.sqrt(math.prod(op.out_shape)))
