"""Rules of operators that move, drop, copy or pad entries within a record."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

from weightclip.bounds._rule import Edge, Effect, Op, register_rule, register_rules

aten = torch.ops.aten


def axis(op: Op, dim: int, rank: int) -> int:
    """``dim`` counted from the front, in a tensor whose rank includes the record dimension; refuses dimension 0."""
    place = dim + rank if dim < 0 else dim
    if place == 0:
        raise op.refuse(
            "it works along the record dimension", "keep records on dimension 0 and act on each record alone"
        )
    return place


def copies(p: float, factor: float) -> float:
    """Gain of copying every entry ``factor`` times: p = 2 root, p = 1 linear, p = inf one."""
    return factor if p == 1 else (1.0 if math.isinf(p) else math.sqrt(factor))


def _isometry(op: Op, p: float) -> Effect:
    return Effect(gains=(1.0,) * len(op.shapes))


# a reshape that keeps the record dimension (checked on every node by the graph walk) acts on each record alone;
# detach passes no gradient, but norms: a gain of one is an upper bound for both
for _packet in [
    aten.view, aten.reshape, aten.flatten, aten.unflatten, aten._unsafe_view, aten.contiguous, aten.clone, aten.alias,
    aten.detach, aten.detach_, aten.to, aten._to_copy, aten.type_as, aten.lift_fresh_copy,
]:  # fmt: skip
    register_rule(_packet, _isometry)
register_rule(operator.getitem, _isometry)


@register_rule(aten.view.dtype)
def _reinterpret(op: Op, p: float) -> Effect:
    raise op.refuse("it reads the bits of numbers as other numbers", "use .to(dtype)")


@register_rules(aten.squeeze, aten.unsqueeze, aten.select, aten.slice, aten.narrow, aten.unbind)
@register_rules(aten.split, aten.split_with_sizes, aten.chunk, aten.flip, aten.roll)
def _along(op: Op, p: float) -> Effect:
    rank = len(op.shapes[0]) + 1
    where = {"slice": 1, "squeeze": 1, "unsqueeze": 1, "select": 1, "narrow": 1, "unbind": 1, "flip": 1, "roll": 2}
    short = op.kind.split(".")[1]
    if short == "squeeze" and len(op.args) < 2 and "dim" not in op.kwargs:
        raise op.refuse("squeeze() without a dimension drops the record dimension of a batch of one", "name the dim")
    dims: Any = op.arg(where.get(short, 2), "dims" if short in ("flip", "roll") else "dim", 0)
    if short == "slice" and _whole(op) and dims == 0:
        return Effect(gains=(1.0,))
    if short == "roll" and dims == []:
        dims = 0  # rolls the flattened batch
    for dim in dims if isinstance(dims, (list, tuple)) else [dims]:
        axis(op, dim, rank + (1 if short == "unsqueeze" else 0))
    return Effect(gains=(1.0,))


def _whole(op: Op) -> bool:
    start, end, step = op.arg(2, "start", None), op.arg(3, "end", None), op.arg(4, "step", 1)
    return start in (None, 0) and step == 1 and (end is None or (isinstance(end, int) and end >= 2**62))


@register_rule(aten.permute)
def _permute(op: Op, p: float) -> Effect:
    dims = list(op.arg(1, "dims"))
    if dims[0] not in (0, -len(dims)):
        raise op.refuse("it moves the record dimension", "keep records on dimension 0")
    return Effect(gains=(1.0,))


@register_rules(aten.transpose, aten.movedim, aten.swapaxes)
def _transpose(op: Op, p: float) -> Effect:
    rank = len(op.shapes[0]) + 1
    for dims in (op.arg(1, "dim0"), op.arg(2, "dim1")):
        for dim in dims if isinstance(dims, (list, tuple)) else [dims]:
            axis(op, dim, rank)
    return Effect(gains=(1.0,))


@register_rules(aten.expand, aten.repeat, aten.repeat_interleave, aten.expand_as, aten.broadcast_to)
def _expand(op: Op, p: float) -> Effect:
    if "repeat_interleave" in op.kind:
        axis(op, op.arg(2, "dim", 0) or 0, len(op.shapes[0]) + 1)
        if not isinstance(op.arg(1, "repeats"), int):
            raise op.refuse("repeat_interleave by a tensor copies some entries more often than others", "use an int")
    elif len(op.out_shape) != len(op.shapes[0]):
        raise op.refuse("it adds dimensions in front of the records", "keep records on dimension 0")
    gain = copies(p, math.prod(op.out_shape) / max(1, math.prod(op.shapes[0])))
    return Effect(gains=(gain,) + (0.0,) * (len(op.shapes) - 1))  # expand_as reads only the shape of its second tensor


@register_rules(aten.pad, aten.constant_pad_nd)
def _pad(op: Op, p: float) -> Effect:
    amounts = op.arg(1, "pad")
    mode, value = "constant", op.arg(2, "value", 0)
    if op.kind.startswith("aten.pad"):
        mode, value = op.arg(2, "mode", "constant"), op.arg(3, "value", 0)
    if mode != "constant":
        raise op.refuse(f"{mode} padding has no rule", "pad with zeros (mode='constant')")
    if len(amounts) // 2 > len(op.shapes[0]):
        raise op.refuse("it pads the record dimension", "pad only the dimensions of one record")
    kept = list(op.shapes[0])  # negative amounts crop: what remains of the input is not out - in
    for place, (before, after) in enumerate(zip(amounts[::2], amounts[1::2], strict=True)):
        kept[-1 - place] += min(0, before) + min(0, after)
    added = math.prod(op.out_shape) - math.prod(max(0, k) for k in kept)
    return Effect(gains=(1.0,), offset=abs(value) * math.sqrt(added) if value and added else 0.0)


@register_rules(aten.reflection_pad1d, aten.reflection_pad2d, aten.reflection_pad3d)
@register_rules(aten.replication_pad1d, aten.replication_pad2d, aten.replication_pad3d)
def _refused_padding(op: Op, p: float) -> Effect:
    raise op.refuse("reflect and replicate padding have no rule", "pad with zeros")


@register_rules(aten.cat, aten.stack, aten.concat)
def _cat(op: Op, p: float) -> Effect:
    axis(op, op.arg(1, "dim", 0), len(op.out_shape) + 1)
    parts = op.args[0] if op.args else op.kwargs["tensors"]
    # parts that are constants shift the output; only activations have edges
    constant = sum(float(t.double().pow(2).sum()) for t in parts if isinstance(t, torch.Tensor))
    edges = sum(isinstance(t, Edge) for t in parts)
    return Effect(gains=(1.0,) * edges, offset=math.sqrt(constant), root=True)


@register_rules(aten.upsample_nearest1d, aten.upsample_nearest2d, aten.upsample_nearest3d)
def _nearest(op: Op, p: float) -> Effect:
    axes = int(op.kind.split(".")[1][-2])
    sizes = list(zip(op.shapes[0][-axes:], op.out_shape[-axes:], strict=True))
    scales = [a for a in (*op.args[2:], *op.kwargs.values()) if a is not None]
    scales = [float(s) for a in scales for s in (a if isinstance(a, (list, tuple)) else [a])]
    whole = [o // i for i, o in sizes]
    if any(o % i for i, o in sizes) or (scales and scales != [float(w) for w in whole]):
        raise op.refuse("nearest upsampling by a factor that is not whole", "use a whole scale factor")
    return Effect(gains=(copies(p, math.prod(_most_copies(i, o) for i, o in sizes)),))


def _most_copies(size: int, out: int) -> int:
    """How often one entry is copied at most: torch finds sources by a float32 product, which can round down."""
    source = (torch.arange(out, dtype=torch.float32) * (torch.tensor(float(size)) / out)).floor().long()
    return max(out // size, int(source.clamp(max=size - 1).bincount().max()))
