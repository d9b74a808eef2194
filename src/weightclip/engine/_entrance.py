"""Before a pass of a private model: records projected, their public shape noted, the model as it was tested.

Which promise needs it: noise is added to the parameters the engine knows (SOUNDNESS section 7, iii), so none may be
frozen, cast or moved behind its back; and a buffer written by forward would carry earlier records into later products
(condition e) and into the saved model. Bounds need no watch: limits are enforced at the product.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from weightclip._torch import code_of, inputs_of, leaves_of, map_tensors, same_objects, version_of
from weightclip.engine._example import Call
from weightclip.errors import ContractError
from weightclip.factors import is_plain, transforming
from weightclip.factors.kernels import fits, project

if TYPE_CHECKING:
    from weightclip.engine._step import Training

Signature = tuple[Any, ...]
_HALF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def project_records(x: Tensor, radius: float, detach: bool = False) -> Tensor:
    """Each record's l2 projection on the ball of ``radius``; a record with a NaN or infinite entry becomes zeros.

    Args:
        x: Floating-point records on dimension 0.
        radius: Public radius; infinite: only non-finite records change.
        detach: Treat the scale as constant in the backward pass (non-expansive in every norm).

    Formal guarantees:
        l2 norm of each record at most ``radius`` up to float32 rounding, whatever its entries; l2 gain 1; records are
        never mixed.
    """
    if x.dim() < 2:
        return project_records(x.unsqueeze(1), radius, detach).squeeze(1) if x.dim() else x
    dims = tuple(range(1, x.dim()))
    wide = x.float() if x.dtype in _HALF else x
    if not x.requires_grad and wide.dtype == torch.float32 and not transforming():
        found = _project_values(wide, radius * (1 - _HALF.get(x.dtype, 0.0)), dims)
        return found if found.dtype == x.dtype else found.to(x.dtype)
    largest = torch.linalg.vector_norm(wide.detach(), math.inf, dims, keepdim=True)  # not finite if an entry is not
    finite = torch.isfinite(largest)
    clean = torch.where(finite, wide, torch.zeros((), dtype=wide.dtype, device=x.device))
    if math.isinf(radius):
        return clean.to(x.dtype)
    radius = radius * (1 - _HALF.get(x.dtype, 0.0))  # rounding to half precision must not lead out of the ball
    # entries are divided by the largest one first: squares neither overflow nor vanish
    tiny = torch.finfo(wide.dtype).tiny
    largest = torch.where(finite, largest, torch.full_like(largest, tiny)).clamp(min=tiny)
    unit = clean / largest
    norm = torch.linalg.vector_norm(unit.detach() if detach else unit, 2, dims, keepdim=True).clamp(min=0.5)
    inside = largest * norm.detach() <= radius  # norm is at least 1 but for a zero record
    return torch.where(inside, clean, unit * (radius / norm)).to(x.dtype)


def _project_values(x: Tensor, radius: float, dims: tuple[int, ...]) -> Tensor:
    """The same in few passes, where no derivative is asked for: squares of float32 fit into float64."""
    if x.device.type == "cpu" and radius >= 1e-10:  # smaller norms may be squares that vanish
        if math.isinf(radius) and math.isfinite(x.sum().item()):  # an entry that is not finite would show in the sum
            return x
        norm = torch.linalg.vector_norm(x, 2, dims, keepdim=True)
        scaled = x if math.isinf(radius) else x * _over(radius, norm).clamp_(max=1.0)
        if x.shape[0] == 0 or float(norm.max()) < 1e15:  # no NaN, and no square is infinite: float32 will do
            return scaled
        good = (norm < 1e15).flatten()
        # the way a record takes depends on itself alone: the others must not round differently because of it
        scaled = scaled.clone() if scaled is x else scaled
        scaled[~good] = _project_widely(x[~good], radius, dims)
        return scaled
    return project(x, radius) if fits(x) else _project_widely(x, radius, dims)


def _over(radius: float, norm: Tensor) -> Tensor:
    """``radius / norm`` as torch computes it, in fewer passes."""
    return norm.reciprocal() if radius == 1 else norm.reciprocal().mul_(radius)


def _project_widely(x: Tensor, radius: float, dims: tuple[int, ...]) -> Tensor:
    """For records of any size, by norms in float64."""
    norm = torch.linalg.vector_norm(x, 2, dims, keepdim=True, dtype=torch.float64)
    if math.isinf(radius):
        scaled = x
    else:  # in two steps: the scale of a huge record may be subnormal, and would round up to twice its value
        scale = (radius / norm).clamp(max=1.0)  # a zero record: min(inf, 1)
        scaled = (x * scale.clamp(min=2.0**-100).float()).mul_((scale * 2.0**100).clamp(max=1.0).float())
    return torch.where(torch.isfinite(norm), scaled, torch.zeros((), device=x.device))


class InputProjection:
    """Forward pre-hook: every floating-point tensor among the arguments, named or nested, is projected.

    Formal guarantees:
        Those of :func:`project_records`, for each argument on its own.
    """

    _weightclip = True

    def __init__(self, radius: float = math.inf, detach: bool = False) -> None:
        self.radius, self.detach = radius, detach

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if is_plain():
            return None
        if not kwargs and len(args) == 1 and isinstance(args[0], Tensor):  # the usual case
            return (self._project(args[0]),), kwargs
        return map_tensors(self._project, (args, kwargs))

    def _project(self, x: Tensor) -> Tensor:
        return project_records(x, self.radius, self.detach) if x.is_floating_point() else x


def signature(args: Any, kwargs: Any) -> Signature:
    """What is public of a call: names, shapes of one record, types, and arguments that choose a way (True, a word)."""
    if not kwargs and len(args) == 1 and isinstance(args[0], Tensor):  # the usual case
        return ((0, 0), args[0].shape[1:], args[0].dtype)
    found: list[Any] = []
    for path, leaf in leaves_of((args, kwargs)):
        if isinstance(leaf, Tensor):
            found += [path, leaf.shape[1:], leaf.dtype]
        elif leaf is None or isinstance(leaf, (bool, str)):
            found += [path, leaf]
    return tuple(found)


class Entrance:
    """Forward pre-hook of the model: notes the public shape of a pass under gradients, before it runs.

    Which promise needs it: rows of a product are records as the test of independence has seen it (condition b), and
    rounding is allowed for, at the shapes that were tested; integers where floats were declared would pass a projection
    unseen. Passes of other shapes are tested before their loss is admitted (``tested`` knows a signature), or refused
    where a certificate was made for one shape. An input that the model's own layers made outside of it is refused:
    gradients would reach these layers by a way that was not tested (assumption i).
    """

    _weightclip = True

    def __init__(self, call: Call, fixed: bool, anchor: Tensor | None = None) -> None:
        self.anchor = anchor
        self.look: Callable[[], None] | None = None  # at the model that is called, where nothing else does
        self.called = self.ahead = False  # whether the model saw the present batch; whether it missed one before
        self.first = signature(call.args, call.kwargs)
        self.fixed = fixed
        self.last: Signature = self.first
        self.calls: dict[Signature, Call] = {self.first: call.zeros()}  # one call of each signature, for the test
        self._floating = self._kinds(self.first)

    @staticmethod
    def _kinds(found: Signature) -> dict[Any, bool]:
        """Which inputs are floating-point."""
        paths = [i for i, part in enumerate(found) if isinstance(part, torch.dtype)]
        return {found[i - 2]: found[i].is_floating_point for i in paths}

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.called = True
        if is_plain() or not torch.is_grad_enabled():
            return
        if not torch.compiler.is_compiling():
            self._refuse_graphs(inputs_of(args, kwargs))
        self.last = found = signature(args, kwargs)
        if found != self.first and found not in self.calls:
            self._meet(found, args, kwargs)
        if self.look is not None and not torch.compiler.is_compiling():
            self.look()

    def next_batch(self, excused: bool) -> None:
        """Another batch was handed out; unless ``excused``, the model must have seen the one before."""
        self.ahead = not excused and (self.ahead or not self.called)
        self.called = False

    def refuse_ahead(self) -> None:
        """Raise where a batch was fetched before the model saw the one before."""
        if self.ahead:
            raise ContractError(
                "the loader was asked for a batch before the model saw the one before: one draw would count in several "
                "steps, or under the mask of another. Fetch no batch ahead, and leave none out."
            )

    def _refuse_graphs(self, inputs: Sequence[Tensor]) -> None:
        """What the model's own layers computed outside its forward pass was never tested for independence."""
        todo, seen = [t.grad_fn for t in inputs if t.grad_fn is not None], set[Any]()
        while todo:
            node = todo.pop()
            if getattr(node, "variable", None) is self.anchor:
                raise ContractError(
                    "an input of the private model was computed by its own layers, outside its forward pass, where "
                    "nothing tests that records stay apart: do that inside the model's forward, or detach() the input."
                )
            new = [after for after, _ in node.next_functions if after is not None and after not in seen]
            seen.update(new)
            todo += new

    def call(self, found: Signature) -> Call:
        """A call of this signature, without its values."""
        if found not in self.calls:
            if len(found) != 3:
                raise ContractError(
                    "a compiled model got inputs of a new shape: pass make_private an example= of it, or call the "
                    "model uncompiled once."
                )
            _, shape, dtype = found
            like = self.calls[self.first].tensors[0]
            self.calls[found] = Call((torch.zeros((2, *shape), dtype=dtype, device=like.device),), {})
        return self.calls[found]

    def _meet(self, found: Signature, args: Any, kwargs: Any) -> None:
        """A shape that was not seen before."""
        kinds = self._kinds(found)
        if any(kinds.get(path, kind) != kind for path, kind in self._floating.items()):
            raise ContractError(
                "the model got integers where make_private saw floating-point records (or the other way round): "
                "convert the records (x.float()), or give make_private an example= of this type."
            )
        if self.fixed and _shapes(found) != _shapes(self.first):
            raise ContractError(
                f"the model got records of shape {_shapes(found)} but is certified for {_shapes(self.first)}: bounds "
                "grow with the size of the input. Pass records of the certified shape, or give make_private an "
                "example= of this one."
            )
        if not torch.compiler.is_compiling():
            self.calls[found] = Call(args, kwargs).zeros()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _open_door  # copies and saved models leave the engine behind

    def __reduce__(self) -> tuple[Any, ...]:
        return _left_behind, ()


def _open_door(module: nn.Module, args: Any, kwargs: Any) -> None:
    """What is left of an entrance in a copy of the model."""


_open_door._weightclip = True  # type: ignore[attr-defined]


def _left_behind() -> Any:
    return _open_door


def _shapes(found: Signature) -> list[tuple[int, ...]]:
    return [tuple(part) for part in found if isinstance(part, torch.Size)]


class Watch:
    """Trainable parameters and modules as they were at ``make_private``.

    Formal guarantees:
        ``check`` and ``changed`` read types, places, flags and tables of hooks only, never values.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        self.parameters = list(model.named_parameters())
        self.kinds = [(p.dtype, p.device, p.requires_grad) for _, p in self.parameters]
        rows = any(hasattr(p, "device_mesh") for _, p in self.parameters)  # fully_shard puts others in their places
        tables = [(m, t) for m in self._modules for t in ((m._modules,) if rows else (m._modules, m._parameters))]
        self._parts = [(module, table, list(table.values())) for module, table in tables]
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
        before, self._code = self._code, code_of(self._modules)  # kept, so that no other can come to lie at its address
        return not same_objects(before, self._code)

    def same_code(self) -> bool:
        """Whether they are still those that ``changed`` has seen last."""
        return same_objects(self._code, code_of(self._modules))

    def check(self) -> None:
        """Raise one clear error for the first parameter that changed in kind, or part that came or went."""
        for module, table, known in self._parts:
            if not same_objects(list(table.values()), known):
                raise ContractError(
                    f"a part or parameter of {type(module).__name__} was added, replaced or removed after make_private "
                    "(by forward, it may hold records): change the model first, then make it private."
                )
        for (name, p), kind in zip(self.parameters, self.kinds, strict=True):
            if (p.dtype, p.device, p.requires_grad) != kind:
                raise ContractError(
                    f"parameter '{name}' was frozen, unfrozen, moved or cast after make_private: do that first, then "
                    "make the model private."
                )


class BufferGuard:
    """Forward pre-hook and hook of the model: a pass under gradients must leave buffers and parameters alone.

    Formal guarantees:
        What an uncompiled forward writes in place, or puts in the place of a buffer, is refused, so that no state
        travels that way from one batch to the next or into a saved model. Caches that grow while public random records
        are run, as they are before records of every new shape, are a model's own business. Buffers may be changed
        between passes by public rules (schedules). Writes through ``.data`` count no version and are not seen.
    """

    _weightclip = True

    def __init__(self, model: nn.Module, whole: bool = True) -> None:
        self._tables = [(path, module._buffers) for path, module in model.named_modules()]
        self._parameters = [(f"parameter '{name}'", p) for name, p in model.named_parameters() if whole]
        self._before: list[tuple[str, Tensor, int]] | None = None
        self.testing = False  # random records are at work: what they make a model keep for the first time is public

    def _held(self) -> list[tuple[str, Tensor]]:
        found = [
            (f"buffer '{path}.{name}'".replace("'.", "'"), buffer) for path, table in self._tables if table
            for name, buffer in table.items() if buffer is not None and not name.startswith("_wc_")
        ]  # fmt: skip
        return found + self._parameters if found else self._parameters

    def before(self, module: nn.Module, args: Any) -> None:
        """Note the state of all of them."""
        if not torch.compiler.is_compiling():
            guarded = torch.is_grad_enabled()
            self._before = [(name, t, version_of(t)) for name, t in self._held()] if guarded else None

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Compare."""
        if self._before is None or torch.compiler.is_compiling():
            return
        before, self._before = self._before, None
        changed = [name for name, t, version in before if version_of(t) != version]
        if not self.testing:
            held = self._held()
            changed += [name for (name, t), (_, known, _) in zip(held, before, strict=False) if t is not known]
            changed += [] if len(held) == len(before) else ["a new buffer"]
        if changed:
            raise ContractError(
                f"forward writes {changed[0]}: it would carry records of one batch into the next and into the saved "
                "model. Freeze such modules with eval(), use ones without running statistics, fill caches before "
                "make_private, or constrain weights after optimizer.step()."
            )

    before._weightclip = after._weightclip = True  # type: ignore[attr-defined] # hooks of ours, left out of copies

    def __deepcopy__(self, memo: dict[int, Any]) -> BufferGuard:
        return BufferGuard(nn.Module())  # a copied model is its owner's business

    def __reduce__(self) -> tuple[Any, ...]:
        return BufferGuard, (nn.Module(),)


@contextlib.contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """What random records write to buffers is gone afterwards. Buffers that are new stay: caches know of them."""
    before = [(b, b.clone()) for b in model.buffers() if type(b) is Tensor]
    try:
        yield
    finally:
        for buffer, value in before:
            if not torch.equal(buffer, value):
                buffer.data.copy_(value)


def look(owner: weakref.ref[Training]) -> None:
    """Before a pass of a traced model: if its hooks or forwards have changed it is tested anew, as it is now."""
    t = owner()
    if t is not None and t.forget_other_code():
        key = t.entrance.last, t.watch.modes()
        t.tested[key], t.grown = t.test(*key), True


def prepare(owner: weakref.ref[Training], module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Before a pass under gradients: records of its public shape must have passed the test; its signature.

    The forward pass itself goes by what the test has found: whose rows are whose, and what every record has a copy of.
    """
    t = owner()
    if t is None:
        return None
    t.forget_other_code()
    key = signature(args, kwargs), t.watch.modes()
    if key not in t.tested:
        t.entrance(module, args, kwargs)
        t.tested[key], t.grown = t.test(*key), True
    return key
