"""Record independence, tested on public random numbers before training (SOUNDNESS section 7, assumption i).

Limits at the product make one record's own contribution small. That a record changes nobody else's contribution is a
property of the user's model: a mean over the batch, a running statistic or a branch on the batch size breaks it. Where
a graph was traced, its rules show it; everywhere it is tested here, on the model as it will be trained.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weightclip._torch import AnyDropout
from weightclip.errors import ContractError

_SIZES = (7, 2, 1)
_CLOSE = 1e-3  # of the largest entry: kernels round rows differently at different batch sizes

Facts = list[Tensor]  # sketches of the output, then of both factors of every product: one row for each record


class Probe:
    """Runs the private model on public batches and notes its output and the factors of all its products.

    Args:
        model: The model, as it is trained; called under gradients.
        collector: Where its layers send their factors.
        cut: Inside this context the model's output has its graph behind it, and its random numbers are those of the
            given number.
        again: Around the backward pass, where activations that are computed again may draw again.
    """

    def __init__(
        self, model: nn.Module, collector: Any, cut: Callable[[int], contextlib.AbstractContextManager],
        again: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    ) -> None:  # fmt: skip
        self.model, self.collector, self.cut, self.again = model, collector, cut, again

    def __call__(self, inputs: Sequence[Any], masks: int = 0) -> Facts:
        """Output and factors for one batch; the same random numbers for every call with the same ``masks``."""
        facts: Facts = []
        rows = next(t.shape[0] for t in inputs if isinstance(t, Tensor))

        def look(entry: Any, x: Tensor, d: Tensor) -> None:
            for factor in (x, d):
                if factor.shape[0] != rows:
                    raise ContractError(
                        f"a {type(entry.layer)._wc_native.__name__} layer runs on {factor.shape[0]} rows in a batch of "
                        f"{rows} records: keep records on dimension 0 (positions behind it)."
                    )
                facts.append(_sketch(factor.detach()))

        with self.cut(masks):
            output = self.model(*inputs)
            if not isinstance(output, Tensor) or output.dim() == 0 or output.shape[0] != rows:
                raise ContractError("the model must return one tensor with records on dimension 0.")
            if not output.requires_grad:
                return [_sketch(output.detach())]
            gradient = _waves(output)
            self.collector.probe = look
            try:
                with self.collector.collection(rows), self.again():
                    self.collector.backward(output, gradient, [])
            finally:
                self.collector.probe = None
        return [_sketch(output.detach()), *facts]


def _wave(n: int, device: torch.device, pitch: float = 1.0) -> Tensor:
    """n numbers of norm below 1 that follow no pattern a model could have."""
    return torch.sin(1 + pitch * torch.arange(n, device=device, dtype=torch.float32)) / max(1.0, n**0.5)


def _waves(output: Tensor) -> Tensor:
    """A cotangent that is the same for every record and different for every entry."""
    return _wave(output[0].numel(), output.device).view(output.shape[1:]).expand_as(output).to(output.dtype)


def _sketch(value: Tensor) -> Tensor:
    """Three numbers of each record: two projections and the norm. Whole factors of a large batch would not fit."""
    flat = value.reshape(value.shape[0], -1).float()
    parts = [(flat * _wave(flat.shape[1], flat.device, pitch)).sum(1) for pitch in (1.0, 2.3)]
    return torch.stack([*parts, flat.norm(dim=1) / max(1.0, flat.shape[1] ** 0.5)], 1)


@contextlib.contextmanager
def _quiet_modules(model: nn.Module, still: bool) -> Iterator[None]:
    """With ``still``, modules that draw random numbers in training (dropout) stand still."""
    drawing = [m for m in model.modules() if isinstance(m, AnyDropout) and m.training]
    try:
        for module in drawing if still else ():
            module.training = False
        yield
    finally:
        for module in drawing:
            module.training = True


def check_independence(probe: Probe, example: Sequence[Any], size: int) -> bool:
    """Refuse a model in which one record changes another's output or product.

    On random public records, at batch sizes 1, 2, 7 and ``size``: one record is changed, one is taken away, records
    change places, and another batch comes before. Nobody else's output, input factor or cotangent may move.

    Formal guarantees:
        Reads shapes and types of ``example`` only. A test, no proof: a branch on values that random records never take
        is not found. Returns whether random records could be run at all; the report says which it was.
    """
    model, tested = probe.model, False
    for n in dict.fromkeys((*_SIZES, max(1, size))):
        here, there = _records(example, n, 1), _records(example, n, 2)
        with _quiet_modules(model, False):
            base = _run(probe, here)
            if base is None:
                continue  # values or a batch size the model does not take
            tested = True
            if n > 1:
                changed = [_put(a, b, n // 2) for a, b in zip(here, there, strict=True)]
                _compare(base, probe(changed), [i for i in range(n) if i != n // 2], None, "changing one record")
        with _quiet_modules(model, True):
            base = probe(here)
            if not _alike(base, probe(here, masks=1)):
                continue  # random numbers of the model's own: places in the stream move with the records
            probe(there)
            _compare(base, probe(here), list(range(n)), None, "a batch that came before (state kept in the model)")
            if n == 1:
                continue
            kept = [i for i in range(n) if i != n // 2]
            fewer = [t[kept] if isinstance(t, Tensor) else t for t in here]
            _compare(base, probe(fewer), kept, list(range(n - 1)), "removing one record")
            order = list(range(n))[::-1]
            moved = [t[order] if isinstance(t, Tensor) else t for t in here]
            _compare(base, probe(moved), order, list(range(n)), "moving records to other places")
    return tested


def _run(probe: Probe, inputs: Sequence[Any]) -> Facts | None:
    try:
        return probe(inputs)
    except (RuntimeError, IndexError) as error:
        if isinstance(error, ContractError):
            raise
        return None


def _records(example: Sequence[Any], n: int, seed: int) -> list[Any]:
    """Random records shaped like the example; integers are 0 or 1, which every table of tokens has."""
    generator = torch.Generator().manual_seed(seed)
    found: list[Any] = []
    for value in example:
        if not isinstance(value, Tensor):
            found.append(value)
            continue
        shape = (n, *value.shape[1:])
        if value.is_floating_point():
            new = torch.randn(shape, generator=generator)
        else:
            new = torch.randint(0, 2, shape, generator=generator)
        found.append(new.to(value.device, value.dtype))
    return found


def _put(a: Any, b: Any, i: int) -> Any:
    if not isinstance(a, Tensor):
        return a
    a = a.clone()
    a[i] = 3 * b[i] if a.is_floating_point() else 1 - a[i] if a.dtype != torch.bool else ~a[i]
    return a


def _compare(base: Facts, other: Facts, rows: list[int], places: list[int] | None, what: str) -> None:
    """Rows of ``base`` must be those at ``places`` of ``other`` (the same rows by default)."""
    if not _alike([a[rows] for a in base], [b[rows if places is None else places] for b in other]):
        raise ContractError(
            f"the model mixes records: {what} changed another record's output or gradient. Batch statistics, means "
            "over the batch, state kept between batches and branches on the batch size cannot be made private."
        )


def _alike(base: Facts, other: Facts) -> bool:
    return len(base) == len(other) and all(map(_close, base, other))


def _close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or not a.numel():
        return a.shape == b.shape
    a, b = a.double(), b.double()
    near = (a - b).abs() <= _CLOSE * a.abs().max().clamp(min=1e-30)
    return bool((near | ~torch.isfinite(a)).all())
