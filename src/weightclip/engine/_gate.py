"""Where a private model ends: what it returns is cut off from it, and gradients come in through the private loss alone.

An optimiser that computes them again, or skips steps by them, is refused here as well.

Which promise needs it: record independence (SOUNDNESS section 7, i) is tested for the model and for the loss; between
them nothing may mix records. Sizes of gradients need no guard here: those are limited at the product.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from weightclip._torch import data_parallel_active, map_tensors, modes_active, same_memory, tensors_of, version_of
from weightclip.engine._entrance import Entrance, Signature
from weightclip.errors import ContractError
from weightclip.factors import Eager, is_plain

if TYPE_CHECKING:
    from weightclip.engine._step import Training

_VIEWS = ("View", "UnsafeView", "ReshapeAlias", "Alias", "AsStrided", "Squeeze", "Unsqueeze", "Transpose", "T",
          "Permute", "Select", "Slice")  # fmt: skip
_COPIES = ("Clone", "ToCopy")  # contiguous(), float()
# where the model ends: the wall; in a compiled model its graph, or a private layer that broke the graph
_ENDS = {"_WallBackward", "CompiledFunctionBackward", "_StashBackward"} | {
    f"Eager{kind}FunctionBackward" for kind in ("Dense", "Conv", "Affine", "Embedding")
}


@dataclass
class Passage:
    """One forward pass under gradients."""

    autocast: torch.dtype | None
    signature: Signature
    modes: tuple[bool, ...]
    batch: Any = None  # what the engine was told of the batch that the loader had given last
    compiled: bool = False
    ends: list[Tensor] = field(default_factory=list)  # of the model's own graph: every tensor that it returns
    versions: list[int] = field(default_factory=list)
    given: dict[int, Tensor] = field(default_factory=dict)  # the gradients that the private loss sends back to them

    def add(self, end: Tensor) -> int:
        """One more tensor that the model returns; its number."""
        self.ends.append(end)
        self.versions.append(version_of(end))
        return len(self.ends) - 1


@dataclass
class Argument:
    """A tensor the private loss is taken of: an output of the model, a view or a copy of one.

    Attributes:
        value: The tensor.
        passage: The pass that made it.
        end: Which of the pass's outputs it is made of.
        fold: Rows of it for each record (positions folded into the batch dimension).
        edge: Where it leaves the wall, if copies lie between.
    """

    value: Tensor
    passage: Passage
    end: int
    fold: int = 1
    edge: GradientEdge | None = None

    def lay_out(self, gradient: Tensor) -> Tensor:
        """``gradient``, at the argument, as a gradient at the model's output itself."""
        if self.edge is not None:
            return pulled_back(self.value, self.edge, gradient)
        end, value = self.passage.ends[self.end], self.value
        if _laid_alike(value, end):
            return gradient
        full = torch.empty_strided(end.shape, end.stride(), dtype=gradient.dtype, device=gradient.device).zero_()
        offset = value.storage_offset() - end.storage_offset()
        full.as_strided(value.shape, value.stride(), offset).copy_(gradient)
        return full


def _laid_alike(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one storage hold the same entries in the same places."""
    return a.shape == b.shape and a.stride() == b.stride() and a.storage_offset() == b.storage_offset()


class _Wall(Eager):
    """An output of the model, cut off from it: a backward pass ends here, and must bring the private loss alone."""

    @staticmethod
    def forward(ctx, anchor: Tensor, passage: Passage, end: int, owner: Any) -> Tensor:
        ctx.passage, ctx.end, ctx.owner = passage, end, owner
        return passage.ends[end].detach()

    @staticmethod
    def backward(ctx, gradient: Tensor):
        given, owner = ctx.passage.given.get(ctx.end), ctx.owner()
        if given is None or not (given is gradient or _same_place(given, gradient) or torch.equal(given, gradient)):
            if owner is not None:
                owner.drop()
            raise ContractError(
                "backward() reached the model's output with a gradient that is not the private loss's: use the "
                "criterion that make_private returned, alone, with no other term on the model's output (a loss that "
                "the model computes itself averages over the batch: take criterion(out.logits, labels) instead)."
            )
        return None, None, None, None


def _same_place(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype


def _source(node: Any) -> tuple[Any, int, bool]:
    """The wall or compiled graph a tensor descends from by views and copies alone, and whether there are copies."""
    copied, place = False, 0
    while node is not None:
        name = type(node).__name__
        if name in _ENDS:
            return node, place, copied
        kind = name.split("Backward")[0]
        if kind not in _VIEWS and kind not in _COPIES:
            break
        copied = copied or kind in _COPIES
        node, place = node.next_functions[0]
    return None, 0, copied


def draws_nothing(owner: weakref.ref[Training], inputs: tuple[Any, ...]) -> bool:
    """Whether a pass is sure to draw no random number: torch's own layers in a chain, as ``make_private`` found them.

    Formal guarantees:
        No code of the user's runs in such a pass, so that there is no mask (SOUNDNESS section 10): hooks and forwards
        that came since are seen here, a layer that was replaced is refused before a loss is taken of the pass.
    """
    t = owner()
    if t is None or not t.rowwise or t.draws or len(inputs) != 1 or type(inputs[0]) is not Tensor:
        return False
    return not modes_active() and t.watch.same_code()


class OutputGate:
    """Forward hook behind which the model's parameters are out of reach (SOUNDNESS section 1, step 2).

    Every tensor that the model returns, wherever in a tuple, mapping or dataclass, is cut off from the model: backward
    passes through it end there, and raise if they bring anything but the private loss. Only the private criterion knows
    the way on, for its own gradient, and only from tensors that :meth:`enter` recognises as the model's outputs.
    """

    _weightclip = True

    def __init__(self, owner: Training, device: torch.device, entrance: Entrance) -> None:
        self.owner: weakref.ref[Training] | None = weakref.ref(owner)
        self.device, self.entrance = device.type, entrance
        self.compiled: tuple[Any, torch.dtype | None] | None = None
        self.anchor = torch.zeros((), requires_grad=True)
        self._views: set[tuple[ViewLayout, ViewLayout]] = set()

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if is_plain() or not torch.is_grad_enabled():
            return None
        enabled = torch.is_autocast_enabled(self.device)
        autocast = torch.get_autocast_dtype(self.device) if enabled else None
        if torch.compiler.is_compiling():
            # traced as an assignment: outside the graph the criterion meets these very tensors
            self.compiled = output, autocast
            return None
        owner = None if self.owner is None else self.owner()
        if owner is None:
            return None
        if module is not owner.model:
            raise ContractError("the private model runs as a replica (DataParallel): use one process and one device.")
        if data_parallel_active():
            raise ContractError("DistributedDataParallel averages raw gradients before the noise: use the plain model.")
        passage = Passage(autocast, self.entrance.last, owner.watch.modes(), owner.info)

        def cut(end: Tensor) -> Tensor:
            place = passage.add(end)
            return _Wall.apply(self.anchor, passage, place, self.owner) if end.requires_grad else end

        return cut(output) if isinstance(output, Tensor) else map_tensors(cut, output)

    def clear(self) -> None:
        """Forget a compiled pass over an earlier batch."""
        self.compiled = None

    def enter(
        self, values: list[Tensor], records: int, views: int, modes: tuple[bool, ...], folds: bool
    ) -> list[Argument]:
        """The arguments of a loss, all of one forward pass; raises unless each is an output of it or a view or copy.

        Args:
            values: What the loss is taken of.
            records: Rows of the batch, those of all views of its records.
            views: How many each record has.
            modes: Which modules train now, where the pass itself could not tell (a compiled one).
            folds: Whether several rows may belong to one record.
        """
        compiled = None
        if self.compiled is not None:
            output, autocast = self.compiled
            compiled = Passage(autocast, self.entrance.last, modes, compiled=True)
            for end in tensors_of(output):
                compiled.add(end)
        if not values:
            raise ContractError("the loss got no output of the model that has a row for each record.")
        found = [self._enter(value, records, views, compiled, folds) for value in values]
        if any(argument.passage is not found[0].passage for argument in found):
            raise ContractError("the loss was taken of outputs of several calls of the model: call it once a batch.")
        if len({argument.fold for argument in found}) > 1:
            raise ContractError("the loss got outputs with different numbers of rows: fold positions into all or none.")
        return found

    def _enter(self, value: Tensor, records: int, views: int, compiled: Passage | None, folds: bool) -> Argument:
        node, place, copied = _source(value.grad_fn)
        passage: Passage | None = getattr(node, "passage", None)
        end = getattr(node, "end", None)
        if node is not None and passage is None and compiled is not None:
            same = [i for i, t in enumerate(compiled.ends) if same_memory(t, value)]
            passage, end = compiled, same[0] if same else None
        if node is None or passage is None or end is None or not (copied or same_memory(passage.ends[end], value)):
            raise ContractError(
                "the private criterion must get the output of the private model, called as model(x) (views of it are "
                "fine): move other operations into the model, where they can be certified."
            )
        output = passage.ends[end]
        if passage.versions[end] != version_of(output) or (copied and version_of(value) != 0):
            raise ContractError("the model's output was changed in place before the loss: use a new tensor.")
        fold = value.shape[0] // records if value.dim() and folds and value.shape[0] % records == 0 else 1
        if output.shape[:1] != (records,) or value.shape[:1] != (records * fold,):
            raise ContractError(
                f"the loss got {tuple(value.shape)} of an output of shape {tuple(output.shape)} for {records // views} "
                f"records{'' if views == 1 else f' of {views} views each'}: pass the loader's batch unchanged, and "
                "keep records on dimension 0 of what the model returns."
            )
        if copied:
            edge = GradientEdge(node, place)
            if passage.compiled or not copies_records(value, edge, fold):
                raise ContractError(_MIXED.format(tuple(value.shape)))
            return Argument(value, passage, end, fold, edge)
        if not _laid_alike(value, output):
            pair = ViewLayout.of(value), ViewLayout.of(output)
            if pair not in self._views:
                if not keeps_records(pair[0] if fold == 1 else pair[0].grouped(fold), pair[1]):
                    raise ContractError(_MIXED.format(tuple(value.shape)))
                self._views = {*list(self._views)[:63], pair}
        return Argument(value, passage, end, fold)

    def __getstate__(self) -> dict[str, Any]:
        # copies and saved models leave the engine behind
        return {"owner": None, "device": self.device, "entrance": None, "compiled": None, "anchor": None,
                "_views": set()}  # fmt: skip

    def __deepcopy__(self, memo: dict[int, Any]) -> OutputGate:
        copy = OutputGate.__new__(OutputGate)
        copy.__dict__.update(self.__getstate__())
        return copy


_MIXED = (
    "the loss got a view of shape {} that mixes or repeats records of the model's output: keep records on dimension 0."
)


def evaluate_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A closure runs once, here, before anything is released; the optimiser gets its value in place of it.

    An optimiser that called it again would recompute gradients without noise. One whose ``step`` is not torch's own
    gets NaN: it may step by the loss (Polyak's rule), which has no noise either.
    """
    closures = [f for f in (*args[1:], *kwargs.values()) if callable(f)]
    if not closures:
        return None
    with torch.enable_grad():
        value = closures[0]()
    if not type(args[0]).step.__module__.startswith("torch.optim."):
        value = torch.full((), float("nan"))

    def known(given: Any) -> Any:
        return (lambda: value) if given is closures[0] else given

    return (args[0], *map(known, args[1:])), {name: known(given) for name, given in kwargs.items()}


def refuse_strangers(optimizer: torch.optim.Optimizer, trained: set[int]) -> None:
    """A parameter the engine does not noise (its ids are not ``trained``) must bring no gradient into a step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in trained and parameter.grad is not None:
                raise ContractError(
                    "the optimizer holds a parameter with a gradient that is not private: freeze it, or make the "
                    "model private with it."
                )


def refuse_scaler(optimizer: torch.optim.Optimizer) -> None:
    """A gradient scaler skips steps by the data."""
    scaler = [name for name in ("grad_scale", "found_inf") if getattr(optimizer, name, None) is not None]
    for name in scaler:
        delattr(optimizer, name)
    if scaler:
        raise ContractError("GradScaler skips steps depending on the data: use bfloat16 autocast without a scaler.")


def pulled_back(value: Tensor, edge: GradientEdge, gradient: Tensor) -> Tensor:
    """A gradient through the copies and views between an argument of the loss and the wall."""
    (found,) = torch.autograd.grad(value, [edge], gradient.to(value.dtype), retain_graph=True)  # type: ignore[list-item]
    return found


@dataclass(frozen=True)
class ViewLayout:
    """Where a tensor's entries lie in its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> ViewLayout:
        """The layout of ``tensor``."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))

    def grouped(self, fold: int) -> ViewLayout:
        """With ``fold`` rows of each record on a dimension of their own."""
        (n, *shape), (step, *stride) = self.shape, self.stride
        return ViewLayout((n // fold, fold, *shape), (step * fold, step, *stride), self.offset)

    def places(self) -> Tensor:
        """Storage places of the first record's entries, sorted."""
        place = torch.full((1,) * (len(self.shape) - 1), self.offset)
        for axis, (size, step) in enumerate(zip(self.shape[1:], self.stride[1:], strict=True)):
            steps = step * torch.arange(size)
            place = place + steps.view(-1, *(1,) * (len(self.shape) - 2 - axis))
        return place.flatten().sort().values


def keeps_records(view: ViewLayout, output: ViewLayout) -> bool:
    """Whether row i of ``view`` consists of entries of row i of ``output``, each at most once."""
    if view == output:
        return True
    if not view.shape or view.shape[0] != output.shape[0]:
        return False
    if view.shape[0] > 1 and view.stride[0] != output.stride[0]:
        return False
    mine, theirs = view.places(), output.places()
    return bool((mine.diff() > 0).all()) and bool(torch.isin(mine, theirs).all())


def copies_records(value: Tensor, edge: GradientEdge, fold: int) -> bool:
    """The same through copies, by what gradients become: ones, and the digits of each row's record number.

    Digits, because half precision on the way holds no larger number: 128 is exact in all types.
    """
    ones = pulled_back(value, edge, torch.ones_like(value)).double()
    if not bool(((ones == 0) | (ones == 1)).all()):
        return False
    record = torch.arange(value.shape[0], device=value.device).div(fold, rounding_mode="floor")
    mine = torch.arange(ones.shape[0], device=value.device)
    while True:
        given, kept = (_on_rows(1.0 + i % 128, t) for i, t in ((record, value), (mine, ones)))
        if not bool((pulled_back(value, edge, given).double() == ones * kept).all()):
            return False
        record, mine = record // 128, mine // 128
        if not bool(mine.any()):
            return True


def _on_rows(numbers: Tensor, like: Tensor) -> Tensor:
    """One number for each row."""
    return numbers.view(-1, *(1,) * (like.dim() - 1)).expand_as(like)
