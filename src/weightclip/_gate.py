"""Doors of a private model: what enters is projected, and gradients come in through the certified loss alone."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weightclip._graph import refuse_other_shapes
from weightclip._row_kernels import fits, project
from weightclip._torch import data_parallel_active, same_memory, tree_leaves, tree_map_only, version_of
from weightclip.errors import ContractError
from weightclip.factors import is_plain
from weightclip.factors._limits import Eager, transforming

_HALF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
_VIEWS = ("View", "UnsafeView", "ReshapeAlias", "Alias", "AsStrided", "Squeeze", "Unsqueeze", "Transpose", "T",
          "Permute", "Select", "Slice")  # fmt: skip
# where the model ends: the wall; in a compiled model its graph, or a private layer that broke the graph
_ENDS = {"_WallBackward", "CompiledFunctionBackward", "_StashBackward"} | {
    f"Eager{kind}FunctionBackward" for kind in ("Dense", "Conv", "Affine", "Embedding")
}


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
        return _project_values(wide, radius * (1 - _HALF.get(x.dtype, 0.0)), dims).to(x.dtype)
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
        return tree_map_only(Tensor, self._project, (args, kwargs))

    def _project(self, x: Tensor) -> Tensor:
        return project_records(x, self.radius, self.detach) if x.is_floating_point() else x


class ShapeGuard:
    """Forward pre-hook of the model: under gradients, records must have the shape that was certified.

    Which promise needs it: the rounding of norms and sums was allowed for at these sizes; and integers where floats
    were declared would pass the projection unseen.
    """

    _weightclip = True

    def __init__(self, shapes: list[tuple[int, ...]], example: Any = ()) -> None:
        self.shapes = shapes
        self.floating = [t.is_floating_point() for t in tree_leaves(example) if isinstance(t, Tensor)]

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not is_plain() and torch.is_grad_enabled():
            usual = not kwargs and len(args) == 1 and isinstance(args[0], Tensor)
            leaves = args if usual else tree_leaves((args, kwargs))
            refuse_other_shapes(self.shapes, leaves)
            floating = [t.is_floating_point() for t in leaves if isinstance(t, Tensor)]
            if self.floating and floating != self.floating:
                raise ContractError(
                    "the model got integers where make_private saw floating-point records (or the other way round): "
                    "convert the records (x.float()), or give make_private an example= of this type."
                )


@dataclass
class Passage:
    """One forward pass under gradients."""

    output: Tensor  # the end of the model's own graph
    version: int
    autocast: torch.dtype | None
    compiled: bool = False
    given: Tensor | None = None  # the gradient that the private loss sends back to the output

    def lay_out(self, logits: Tensor, gradient: Tensor) -> Tensor:
        """``gradient``, at a view of the output, as a gradient at the output itself."""
        output = self.output
        if _laid_alike(logits, output):
            return gradient
        full = torch.empty_strided(output.shape, output.stride(), dtype=gradient.dtype, device=gradient.device).zero_()
        offset = logits.storage_offset() - output.storage_offset()
        full.as_strided(logits.shape, logits.stride(), offset).copy_(gradient)
        return full


def _laid_alike(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one storage hold the same entries in the same places."""
    return a.shape == b.shape and a.stride() == b.stride() and a.storage_offset() == b.storage_offset()


class _Wall(Eager):
    """The model's output, cut off from the model: a backward pass ends here, and must bring the private loss alone."""

    @staticmethod
    def forward(ctx, anchor: Tensor, passage: Passage, engine: Any) -> Tensor:
        ctx.passage, ctx.engine = passage, engine
        return passage.output.detach()

    @staticmethod
    def backward(ctx, gradient: Tensor):
        given, engine = ctx.passage.given, ctx.engine()
        if given is None or not (_same_place(given, gradient) or torch.equal(given, gradient)):
            if engine is not None:
                engine._drop_sum()
            raise ContractError(
                "backward() reached the model's output with a gradient that is not the private loss's: use the "
                "criterion that make_private returned, alone, with no other term on the model's output."
            )
        return None, None, None


def _same_place(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype


@dataclass(frozen=True)
class Layout:
    """Where a tensor's entries lie in its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        """The layout of ``tensor``."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))

    def places(self) -> Tensor:
        """Storage places of the first record's entries, sorted."""
        place = torch.full((1,) * (len(self.shape) - 1), self.offset)
        for axis, (size, step) in enumerate(zip(self.shape[1:], self.stride[1:], strict=True)):
            steps = step * torch.arange(size)
            place = place + steps.view(-1, *(1,) * (len(self.shape) - 2 - axis))
        return place.flatten().sort().values


def keeps_records(view: Layout, output: Layout) -> bool:
    """Whether row i of ``view`` consists of entries of row i of ``output``, each at most once."""
    if view == output:
        return True
    if not view.shape or view.shape[0] != output.shape[0]:
        return False
    if view.shape[0] > 1 and view.stride[0] != output.stride[0]:
        return False
    mine, theirs = view.places(), output.places()
    return bool((mine.diff() > 0).all()) and bool(torch.isin(mine, theirs).all())


def _source(node: Any) -> Any:
    """The wall or compiled graph from which a tensor descends by views alone; None after any other operation."""
    while node is not None:
        name = type(node).__name__
        if name in _ENDS:
            return node
        if name.split("Backward")[0] not in _VIEWS:
            return None
        node = node.next_functions[0][0]
    return None


class OutputGate:
    """Forward hook behind which the model's parameters are out of reach (SOUNDNESS section 1, step 2).

    The output it hands out is cut off from the model: backward passes through it end there, and raise if they bring
    anything but the private loss. Only the private criterion knows the way on, for its own gradient, and only from a
    tensor that :meth:`enter` recognises as the model's output.

    Which promise needs it: record independence (SOUNDNESS section 7, i) covers the model and the loss; between them
    nothing may mix records. Sizes of gradients it need not guard: those are limited at the product.
    """

    _weightclip = True

    def __init__(self, engine: Any, device: torch.device) -> None:
        self.engine: weakref.ref[Any] | None = weakref.ref(engine)
        self.device = device.type
        self.compiled_output: Tensor | None = None
        self.compiled_autocast: torch.dtype | None = None
        self.anchor = torch.zeros((), requires_grad=True)
        self._views: set[tuple[Layout, Layout]] = set()

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if is_plain() or not (isinstance(output, Tensor) and output.requires_grad):
            return None
        enabled = torch.is_autocast_enabled(self.device)
        autocast = torch.get_autocast_dtype(self.device) if enabled else None
        if torch.compiler.is_compiling():
            # traced as an assignment: outside the graph the criterion meets this very tensor
            self.compiled_output, self.compiled_autocast = output, autocast
            return None
        engine = None if self.engine is None else self.engine()
        if engine is None:
            return None
        if module is not engine.model:
            raise ContractError("the private model runs as a replica (DataParallel): use one process and one device.")
        if data_parallel_active():
            raise ContractError("DistributedDataParallel averages raw gradients before the noise: use the plain model.")
        return _Wall.apply(self.anchor, Passage(output, version_of(output), autocast), self.engine)

    def clear(self) -> None:
        """Forget a compiled pass over an earlier batch."""
        self.compiled_output = None

    def enter(self, logits: Tensor) -> Passage:
        """The forward pass that made ``logits``; raises unless it is the private model's output or a view of it."""
        node = _source(logits.grad_fn)
        passage: Passage | None = getattr(node, "passage", None)
        if node is not None and passage is None and self.compiled_output is not None:
            passage = Passage(self.compiled_output, version_of(logits), self.compiled_autocast, compiled=True)
        if passage is None or not same_memory(passage.output, logits):
            raise ContractError(
                "the private criterion must get the output of the private model, called as model(x) (views of it are "
                "fine): move other operations into the model, where they can be certified."
            )
        if passage.version != version_of(logits):
            raise ContractError("the model's output was changed in place before the loss: use a new tensor.")
        if _laid_alike(logits, passage.output):  # the usual case
            return passage
        pair = Layout.of(logits), Layout.of(passage.output)
        if pair not in self._views:
            if not keeps_records(*pair):
                raise ContractError(
                    f"the loss got a view of shape {tuple(logits.shape)} that mixes or repeats records of the model's "
                    "output: keep records on dimension 0."
                )
            self._views = {*list(self._views)[:63], pair}
        return passage

    def __getstate__(self) -> dict[str, Any]:
        # copies and saved models leave the engine behind
        return {"engine": None, "device": self.device, "compiled_output": None, "compiled_autocast": None,
                "anchor": None, "_views": set()}  # fmt: skip

    def __deepcopy__(self, memo: dict[int, Any]) -> OutputGate:
        copy = OutputGate.__new__(OutputGate)
        copy.__dict__.update(self.__getstate__())
        return copy
