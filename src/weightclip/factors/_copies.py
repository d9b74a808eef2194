"""Parameters of which every record has its own copy (SOUNDNESS section 12).

Class tokens, learned positions, layer scale, scales of somebody's own norm, tables of relative positions: in the
forward of a private model such a parameter is a :class:`Copied` tensor. It looks like the parameter, but operators on
it run once for each record (``torch.func.vmap``), on copies that share their memory. As soon as it meets a tensor that
holds records the result is an ordinary tensor. The gradient of record i's copy is record i's exact gradient.

Which tensors hold records is known from runs on public records (:mod:`weightclip.factors._passes`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weightclip._torch import reshaped_copy_of, tree_flatten, tree_unflatten, without_overrides
from weightclip.errors import ContractError
from weightclip.factors._part import Part
from weightclip.factors._passes import NONE, Passes, collect

LARGEST = 2**20  # entries of a parameter that is copied for every record
ROUTES: dict[Any, Any] = {}  # operators with products of their own (factors._routes)
_TENSORS = {"T", "mT", "H", "mH", "real", "imag"}  # attributes that are tensors
_ASKS = {
    "size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "is_floating_point", "is_complex",
    "data_ptr", "storage_offset", "element_size", "get_device", "__len__", "__repr__", "__format__", "__hash__",
    "detach", "type", "is_tensor", "is_same_size", "untyped_storage", "has_names", "is_signed", "is_pinned",
}  # fmt: skip


class CopyFunction(torch.autograd.Function):
    """One copy of a parameter for each record, in no memory; backward hands their gradients to the collector."""

    @staticmethod
    def forward(ctx, weight, token, key, anchor, records):
        """(records, *shape)."""
        ctx.key = key
        ctx.save_for_backward(token)
        return reshaped_copy_of(weight.unsqueeze(0).expand(records, *weight.shape))

    @staticmethod
    def backward(ctx, d):
        """The gradient of each copy is that record's."""
        collect(ctx.key, ctx.saved_tensors[0], d.new_empty(d.shape[0], 0), d)
        return None, None, None, None, None


class Copied(Tensor):
    """A tensor without records of which every record has its own copy; shows the values they have in common.

    Its private attributes: ``_wc_passes``; ``_wc_place``, its name among what public runs have noted; ``_wc_inner``,
    the copies (records, *shape); ``_wc_part``, of a parameter.
    """

    _wc_passes: Passes
    _wc_place: int
    _wc_inner: Tensor | None
    _wc_part: Part | None

    @staticmethod
    def of(value: Tensor, passes: Passes, place: int, inner: Tensor | None, part: Part | None = None) -> Copied:
        """``value`` as a tensor of which every record has a copy."""
        copied = plain(value).detach().as_subclass(Copied)
        copied._wc_passes, copied._wc_place, copied._wc_inner, copied._wc_part = passes, place, inner, part
        return copied

    def copies(self) -> Tensor:
        """The copies: (records, *shape)."""
        if self._wc_inner is None:
            part = self._wc_part
            assert part is not None and part._wc_sink is not None
            if self.numel() > LARGEST:
                raise ContractError(
                    f"{self._wc_passes.names[self._wc_place]} has {self.numel()} entries and is used outside a layer "
                    f"weightclip knows, where every record needs its own copy (at most {LARGEST} entries): use it "
                    "through nn.Linear, nn.Embedding or a convolution, or freeze it with requires_grad_(False)."
                )
            sink = part._wc_sink
            whole = part.weight.detach()
            self._wc_inner = CopyFunction.apply(whole, part._wc_token, sink.key, sink.anchor, self._wc_passes.records)  # type: ignore[assignment]
        assert self._wc_inner is not None
        return self._wc_inner

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Operators run on every record's copy."""
        kwargs, name = kwargs or {}, func.__name__
        getter = name == "__get__"
        name = getattr(func.__self__, "__name__", "") if getter else name
        if (getter and name not in _TENSORS) or name in _ASKS:
            with without_overrides():
                return func(*args, **kwargs)
        if func in ROUTES:
            result = ROUTES[func](*args, **kwargs)
            if result is not NotImplemented:
                return result
        usual = _IN_PLACE.get(name, name[:-1] if name.endswith("_") and not name.endswith("__") else None)
        if usual is not None and not isinstance(args[0], Copied):
            return _in_place(args[0], args[1] if name == "copy_" else getattr(Tensor, usual)(*args, **kwargs), name)
        return operate(func, name, args, kwargs)


_IN_PLACE = {"__iadd__": "__add__", "__imul__": "__mul__", "__isub__": "__sub__", "__itruediv__": "__truediv__"}


def _in_place(target: Tensor, result: Tensor, name: str) -> Tensor:
    """``target`` overwritten by what the operator gives out of place."""
    if isinstance(result, Copied):
        if result._wc_passes.noting is None:
            raise ContractError(
                f"'{name}' writes {result._wc_passes.names[result._wc_place]} into a tensor without records: use the "
                "operator that returns a new tensor."
            )
        result = plain(result)
    return target.copy_(result)


def operate(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """One operator on copies and other tensors."""
    leaves, tree = tree_flatten((_sizes_as_tuples(args), kwargs))
    copied = [leaf for leaf in leaves if isinstance(leaf, Copied)]
    passes = copied[0]._wc_passes
    op = passes.place(name, *[c._wc_place for c in copied])
    label = f"operator '{name}' on {passes.names[copied[0]._wc_place]}"
    if passes.noting is not None:
        return _noted(func, leaves, tree, passes, op, label)
    tensors, dims, slots, met = [], [], [], False
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Copied):
            tensors.append(leaf.copies())
            dims.append(0)
            slots.append(i)
        elif isinstance(leaf, Tensor):
            layout = passes.layout(passes.place(op, i), leaf.shape)
            slots.append(i)
            if layout == NONE:
                tensors.append(leaf)
                dims.append(None)
                continue
            tensors.append(leaf.unflatten(layout.dim, (passes.records, layout.m)))
            dims.append(layout.dim)
            met = True
        elif type(leaf) is int:
            layout = passes.layout(passes.place(op, i), (leaf,))
            if layout != NONE:  # a number of rows: those of one record here
                leaves[i], met = layout.m, True

    if name == "prelu":  # autocast casts its weight outside of transforms only
        tensors = [t.to(tensors[0].dtype) for t in tensors]

    def one(*values: Tensor) -> Any:
        for slot, value in zip(slots, values, strict=True):
            leaves[slot] = value
        arguments, named = tree_unflatten(leaves, tree)
        return func(*arguments, **named)

    result = torch.func.vmap(one, in_dims=tuple(dims), randomness="different")(*tensors)
    outputs, form = tree_flatten(result)
    return tree_unflatten([_back(out, passes, op, j, met, label) for j, out in enumerate(outputs)], form)


def _back(out: Any, passes: Passes, op: int, j: int, met: bool, label: str) -> Any:
    """One result of an operator: an ordinary tensor if it met records, else copies again."""
    if not isinstance(out, Tensor):
        return out
    place, table = passes.place(op, "out", j), passes.table
    known = () if table is None else table.layouts.get((place, out.dim() - 1), ())
    if not met:
        if NONE in known:
            return Copied.of(out.detach()[0], passes, place, out)
    else:
        for layout in known:
            if layout.m and out.shape[1 + layout.dim] == layout.m:
                return out.movedim(0, layout.dim).flatten(layout.dim, layout.dim + 1)
    raise ContractError(
        f"{label} gives a result in which records cannot be told apart (or that the test on public records has not "
        "seen): records must stay on a dimension of their own. Use a layer weightclip knows, or freeze the parameter."
    )


def _noted(func: Any, leaves: list[Any], tree: Any, passes: Passes, op: int, label: str) -> Any:
    """A public run: the operator on plain values; a deep one notes all shapes and follows results further."""
    if not passes.deep:
        arguments, named = tree_unflatten([plain(leaf) for leaf in leaves], tree)
        return func(*arguments, **named)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Copied):
            leaves[i] = plain(leaf)
        elif isinstance(leaf, Tensor):
            passes.note(passes.place(op, i), leaf.shape, label)
        elif type(leaf) is int:
            passes.note(passes.place(op, i), (leaf,), label)
    arguments, named = tree_unflatten(leaves, tree)
    outputs, form = tree_flatten(func(*arguments, **named))
    for j, out in enumerate(outputs):
        if isinstance(out, Tensor):
            place = passes.place(op, "out", j)
            passes.note(place, out.shape, label)
            known = () if passes.table is None else passes.table.layouts.get((place, out.dim()), ())
            if not known or NONE in known:
                outputs[j] = Copied.of(out, passes, place, None)
    return tree_unflatten(outputs, form)


def _sizes_as_tuples(value: Any) -> Any:
    if isinstance(value, torch.Size):
        return tuple(value)
    return type(value)(map(_sizes_as_tuples, value)) if type(value) in (tuple, list) else value


def plain(value: Any) -> Any:
    """A public run's value without what follows it through operators."""
    if not isinstance(value, Copied):
        return value
    with without_overrides():
        return value.as_subclass(Tensor)
