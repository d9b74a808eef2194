"""Record independence, tested on public random numbers before training (SOUNDNESS section 7, assumption i).

Limits at the product make one record's own contribution small. That a record changes nobody else's contribution is a
property of the user's model: a mean over the batch, a running statistic or a branch on the batch size breaks it. It is
tested here, on the model as it will be trained, and once more for every public shape of records that comes later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from weightclip._torch import AnyDropout, DispatchMode, hooked, tensors_of
from weightclip.certificate import LayerUse, exact_products
from weightclip.engine._compatible import explain
from weightclip.engine._example import Call, Draw, marked, put, row_of, zipped
from weightclip.errors import ContractError
from weightclip.factors import Collector

_SIZES = (7, 2, 1)
_CLOSE, _HALF = 1e-3, 5e-2  # of the largest entry: kernels round rows differently at different batch sizes
_LARGE, _HUGE = 3.0, 1e30  # of one record, next to which the others must stay what they are
_MASKS = 12  # further outcomes of a model's own random numbers, among which it may choose a way that mixes


@dataclass
class Facts:
    """What one pass over a public batch showed, as sketches with one row for each record.

    Attributes:
        outputs: Of what the model returns, by place; None for a tensor that has no row for each record.
        factors: Of both factors of every product.
        uses: The products of each layer, by its entry's number.
    """

    outputs: list[Tensor | None] = field(default_factory=list)
    factors: list[Tensor] = field(default_factory=list)
    uses: dict[int, list[LayerUse]] = field(default_factory=dict)
    shapes: list[tuple[int, ...]] = field(default_factory=list)  # of one record of each output
    half: bool = False  # whether the model computes in half precision of its own


class MixesRecords(ContractError):
    """A record's output or product was another at another place or batch size, which rounding may do as well."""


class Probe:
    """Runs the private model on public batches and notes its outputs and the factors of all its products.

    Args:
        model: The model, as it is trained; called under gradients.
        collector: Where its layers send their factors.
        cut: Inside this context the model's output has its graph behind it, and its random numbers are those of the
            given number.
        again: Around the backward pass, where activations that are computed again may draw again.
        parameters: Of which ``stray`` names those that autograd reached, by their numbers: used past their layers.
        draws: Whether the model is known to draw random numbers.
    """

    def __init__(
        self, model: nn.Module, collector: Collector, cut: Callable[[int], contextlib.AbstractContextManager],
        again: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
        parameters: Sequence[Tensor] = (), draws: bool = False,
    ) -> None:  # fmt: skip
        self.model, self.collector, self.cut, self.again = model, collector, cut, again
        self.parameters, self.stray, self.draws = parameters, set[int](), draws
        self.failure: Exception | None = None  # why a batch could not be run

    def __call__(self, call: Call, masks: int = 0) -> Facts:
        """Outputs and factors for one batch; the same random numbers for every call with the same ``masks``."""
        facts = Facts()
        rows = next(t.shape[0] for t in call.tensors if t.dim())
        numbers = {id(entry): i for i, entry in enumerate(self.collector.entries)}

        def look(entry: Any, x: Tensor, d: Tensor) -> None:
            # the collector has refused rows that are nobody's, and laid each record's together
            facts.factors += [_sketch(t.detach()) for t in (x, d)]
            facts.half = facts.half or d.dtype.itemsize < 4
            facts.uses.setdefault(numbers[id(entry)], []).append(LayerUse(tuple(x.shape[1:]), tuple(d.shape[1:])))

        with self.cut(masks):
            outputs = tensors_of(call(self.model))
            kept = [t.dim() > 0 and t.shape[0] == rows for t in outputs]
            if not any(kept):
                raise ContractError("the model must return a tensor with records on dimension 0.")
            facts.outputs = [_sketch(t.detach()) if k else None for t, k in zip(outputs, kept, strict=True)]
            facts.shapes = [tuple(t.shape[1:]) for t in outputs]
            facts.half = any(t.is_floating_point() and t.dtype.itemsize < 4 for t in outputs)
            ends = [t for t, k in zip(outputs, kept, strict=True) if k and t.requires_grad]
            if ends:
                self.collector.probe = look
                try:
                    with self.collector.collection(rows), self.again():
                        self.stray.update(self.collector.backward(ends, [_waves(end) for end in ends], self.parameters))
                finally:
                    self.collector.probe = None
        return facts


def _wave(n: int, device: torch.device, pitch: float = 1.0) -> Tensor:
    """n numbers of norm below 1 that follow no pattern a model could have."""
    return torch.sin(1 + pitch * torch.arange(n, device=device, dtype=torch.float32)) / max(1.0, n**0.5)


def _waves(output: Tensor) -> Tensor:
    """A cotangent that is different for every entry, and for every record by what the model returns for it.

    As a loss's is: one that all records have in common would not show a backward pass that mixes them.
    """
    wave = _wave(output[0].numel(), output.device).view(output.shape[1:])
    own = torch.tanh(output.detach().float()).nan_to_num(0.0)
    return (wave * (1 + 0.5 * own)).to(output.dtype)


def _sketch(value: Tensor) -> Tensor:
    """Three numbers of each record: two projections and the norm. Whole factors of a large batch would not fit."""
    flat = value.reshape(value.shape[0], -1).float()
    parts = [(flat * _wave(flat.shape[1], flat.device, pitch)).sum(1) for pitch in (1.0, 2.3)]
    return torch.stack([*parts, flat.norm(dim=1) / max(1.0, flat.shape[1] ** 0.5)], 1)


@contextlib.contextmanager
def _quiet_modules(model: nn.Module, still: bool) -> Iterator[None]:
    """With ``still``, modules that draw random numbers in training (dropout) stand still; torch's nn.RReLU always does.

    It draws for negative numbers alone, so that a record decides which of a stream's numbers the next one gets. They
    are independent of the records all the same, and secret, which is all that is asked of them (SOUNDNESS section 10).
    Only its own forward is known to do no more: subclasses, other forwards and hooks run as they are.
    """
    drawing = [m for m in model.modules() if m.training and (_is_rrelu(m) or (still and isinstance(m, AnyDropout)))]
    try:
        for module in drawing:
            module.training = False
        yield
    finally:
        for module in drawing:
            module.training = True


def _is_rrelu(module: nn.Module) -> bool:
    return type(module) is nn.RReLU and "forward" not in vars(module) and not hooked(module)


def refuse_mixing(model: nn.Module) -> None:
    """Refuse, by name and all at once, modules that cannot be trained privately."""
    explain(model).refuse()


_ROWWISE = (
    nn.Sequential, nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU,
    nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.Hardtanh, nn.Softplus, nn.Identity, nn.MaxPool1d, nn.MaxPool2d,
    nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.GroupNorm,
)  # fmt: skip


def acts_on_rows(model: nn.Module) -> bool:
    """Whether a model is a chain of torch's own layers that act on each row alone, with nothing hung on them.

    Formal guarantees:
        Such a model runs for any number of rows, and what it computes for a row is a function of that row: where it
        takes two different numbers of records, records are the rows.
    """
    for module in model.modules():
        kind = type(module)
        if hooked(module) or "forward" in module.__dict__ or list(module.buffers(recurse=False)):
            return False
        flat = kind is nn.Flatten and module.start_dim == 1  # type: ignore[union-attr]
        if not (kind in _ROWWISE or flat or kind.__dict__.get("_wc_rowwise", False)):
            return False
    return True


def check_independence(probe: Probe, call: Call, size: int, rowwise: bool = False, places: bool = True) -> Facts | None:
    """Refuse a model in which one record changes another's output or product.

    On random public records, at batch sizes 1, 2, 7 and ``size``: one record is changed (also to one of 1e30, next to
    which a weight of zero is no protection; of a model that draws random numbers, for some of their outcomes), one is
    taken away, records change places, all are equal, and another batch comes before. Nobody else's output, input factor
    or cotangent may move.

    Formal guarantees:
        Reads shapes and types of ``call`` only. A test, no proof: a branch on values that random records never take is
        not found. Returns what was seen; None where random records could not be run at all. With ``rowwise`` (the model
        :func:`acts_on_rows`) there is nothing to find but how its layers are used. Without ``places`` records keep
        theirs. A change of others' values alone is a :class:`ContractError`; where place or batch size changed too, it
        is :class:`MixesRecords`.
    """
    seen: Facts | None = None
    if rowwise:
        with exact_products(call.tensors[0].device):
            runs = [_run(probe, call.random(n, 1, torch.randn)) for n in (max(_SIZES), 2)]
        if all(run is not None for run in runs):
            return runs[0]
    for n in dict.fromkeys((*_SIZES, max(1, size))):
        with exact_products(call.tensors[0].device):
            base = _check_size(probe, call, n, places)
        if base is not None:
            seen = base if seen is None else _both(seen, base)
    return seen


def _uniform(shape: Any, generator: torch.Generator) -> Tensor:
    return 0.05 + 0.9 * torch.rand(shape, generator=generator)


def _above_one(shape: Any, generator: torch.Generator) -> Tensor:
    return 1 + torch.randn(shape, generator=generator).abs()


_DRAWS: tuple[Draw, ...] = (torch.randn, _uniform, _above_one)  # the latter for models that take logarithms or roots


def _draw_for(probe: Probe, call: Call, n: int) -> Draw | None:
    """Random numbers of which the model makes finite ones, as far as there are any; None: n records do not run."""
    best, most = None, -1
    for draw in _DRAWS:
        facts = _run(probe, call.random(n, 1, draw))
        if facts is None:
            continue
        sketches = [t for t in (*facts.outputs, *facts.factors) if t is not None and len(t) == n]
        fine = int(torch.stack([torch.isfinite(t).all(1).cpu() for t in sketches]).all(0).sum())
        if fine > most:
            best, most = draw, fine
        if fine == n:
            break
    if best is not None and n == max(_SIZES) and not most:
        raise ContractError(
            "the model returns NaN or infinity for random records (standard normal, in (0, 1), and above 1; integers 0 "
            "or 1), so that it cannot be seen whether it mixes them: clean its inputs inside the model (clamp, "
            "nan_to_num), or do what needs special values (logarithms, roots) in the data set."
        )
    return best


def _check_size(probe: Probe, call: Call, n: int, places: bool) -> Facts | None:
    """All comparisons at one batch size; None where the model does not take it."""
    with _quiet_modules(probe.model, False):
        draw = _draw_for(probe, call, n)
        if draw is None:
            return None
        here, there = call.random(n, 1, draw), call.random(n, 2, draw)
        seen = probe(here)
        if n > 1:
            _check_changes(probe, here, there, seen)
        if n == max(_SIZES) and probe.draws:
            for masks in range(2, 2 + _MASKS):
                _check_changes(probe, here, there, probe(here, masks), masks)
        if n == max(_SIZES) and (wide := _bytes(probe, here)) is not None:
            facts = _run_bytes(probe, zipped(here, wide, lambda a, b: row_of(a, b, n // 2)))
            if facts is not None:
                _compare(seen, facts, [i for i in range(n) if i != n // 2], None, "changing one record")
        if n == max(_SIZES):  # masks that hide nothing are often left out: another way through the model
            for i in call.masks:
                if (facts := _run(probe, here.with_ones(i))) is not None:
                    _check_changes(probe, here.with_ones(i), there.with_ones(i), facts)
                    seen = _both(seen, facts)
    with _quiet_modules(probe.model, True):
        base = probe(here)
        still: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        # random numbers of the model's own: their places are the records'. Two draws may do the same by chance
        if probe.draws or not _alike(base, probe(here, masks=1)):
            still = _StillDraws()
        with still:
            _check_places(probe, here, there, places)
    return seen


def _check_changes(probe: Probe, here: Call, there: Call, seen: Facts, masks: int = 0) -> None:
    """One record becomes another one, or huge; of integers and masks, the only one that is not zero becomes zero.

    With ``masks``, a number of other random outcomes, it becomes huge, and that is all.
    """
    n = len(here.tensors[0])
    others = [i for i in range(n) if i != n // 2]
    for size in (_HUGE,) if masks else (_LARGE, _HUGE):
        changed = zipped(here, there, lambda a, b, size=size: put(a, b, n // 2, size))
        _compare(seen, probe(changed, masks), others, None, "changing one record")
    if masks or all(t.is_floating_point() for t in here.tensors):
        return
    alone, none = (_run(probe, here.map(lambda t, one=one: marked(t, n // 2, one))) for one in (1, 0))
    if alone is not None and none is not None:  # lengths of zero run nowhere
        _compare(alone, none, others, None, "changing one record")


def _check_places(probe: Probe, here: Call, there: Call, places: bool) -> None:
    """Another batch before; with ``places``, one record less, other places, and a batch of equal records."""
    n = len(here.tensors[0])
    everyone, others = list(range(n)), [i for i in range(n) if i != n // 2]
    base = probe(here)
    if not _alike(base, probe(here, masks=1)):
        return  # draws that cannot be held still
    probe(there)
    _compare(base, probe(here), everyone, None, "a batch that came before (state kept in the model)")
    if n > 1 and places:
        fewer = here.map(lambda t: t[others] if t.dim() else t)
        _compare(base, probe(fewer), others, everyone[:-1], "removing one record")
        moved = here.map(lambda t: t.flip(0) if t.dim() else t)
        _compare(base, probe(moved), everyone[::-1], everyone, "moving records to other places")
        for i in (0, n - 1):  # all take the same way through the model: one with room for few would show
            equal = here.map(lambda t, i=i: t[i : i + 1].expand_as(t).clone() if t.dim() else t)
            _compare(base, probe(equal), [i] * n, everyone, "a batch of equal records")


class _StillDraws(DispatchMode):
    """Inside, random numbers are constants: what a record gets does not depend on its place in the batch."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return out
        name = func.overloadpacket.__name__
        if name == "native_dropout":
            out[1].fill_(True)
            return out[0].copy_(args[0] / (1 - args[1])), out[1]
        if isinstance(out, Tensor) and "attention" not in name:
            if name.startswith("randperm"):
                return out.copy_(torch.arange(len(out)))
            out.fill_(1 if name.startswith("bernoulli") else 0.5 if out.is_floating_point() else 0)
        return out


def _both(seen: Facts, more: Facts) -> Facts:
    """The first facts, less the outputs that have no row for each record at another batch size."""
    pairs = zip(seen.outputs, more.outputs, strict=False)
    return Facts([a if b is not None else None for a, b in pairs], [], seen.uses, seen.shapes)


def _run(probe: Probe, call: Call) -> Facts | None:
    try:
        return probe(call)
    except (RuntimeError, IndexError, ValueError) as error:
        if isinstance(error, ContractError):
            raise
        probe.failure = error
        return None


def _bytes(probe: Probe, here: Call) -> Call | None:
    """Bytes of all sizes, where they can be no places in a table: on a GPU one beyond its end would end the process."""
    modules = list(probe.model.modules())
    pictures = here.tensors[0].device.type == "cpu" or any(
        isinstance(m, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) for m in modules
    )
    tables = any(isinstance(m, (nn.Embedding, nn.EmbeddingBag)) for m in modules)
    return here.with_bytes() if pictures and not tables else None


def _run_bytes(probe: Probe, call: Call) -> Facts | None:
    """What it showed; None for a model that takes no such bytes, whatever it says of them."""
    try:
        return probe(call)
    except ContractError:
        raise
    except Exception:
        return None


def _compare(base: Facts, other: Facts, rows: list[int], places: list[int] | None, what: str) -> None:
    """Rows of ``base`` must be those at ``places`` of ``other`` (the same rows by default)."""
    if not _alike(base, other, rows, rows if places is None else places):
        raise (ContractError if places is None else MixesRecords)(
            f"the model mixes records: {what} changed another record's output or gradient. Batch statistics, means "
            "over the batch, state kept between batches and branches on the batch size cannot be made private."
        )


def _alike(base: Facts, other: Facts, rows: Any = slice(None), places: Any = slice(None)) -> bool:
    if len(base.outputs) != len(other.outputs) or len(base.factors) != len(other.factors):
        return False
    pairs = [*zip(base.outputs, other.outputs, strict=True), *zip(base.factors, other.factors, strict=True)]
    share = _HALF if base.half else _CLOSE
    return all(_close(a[rows], b[places], share) for a, b in pairs if a is not None and b is not None)


def _close(a: Tensor, b: Tensor, share: float) -> bool:
    if a.shape != b.shape or not a.numel():
        return a.shape == b.shape
    a, b = a.double(), b.double()
    near = (a - b).abs() <= share * a.abs().max().clamp(min=1e-30)
    return bool((near | ~torch.isfinite(a)).all())
