"""How a model is called: which part of a batch are its inputs, in which shapes, and public random records like them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from weightclip._torch import map_tensors, tensors_of
from weightclip.errors import WeightclipError

LABELS = ("label", "labels", "target", "targets", "y")
Draw = Callable[..., Tensor]  # (shape, generator=) -> random numbers


@dataclass(frozen=True)
class Call:
    """The arguments of one call of the model.

    Formal guarantees:
        Of private batches only shapes, types and values that are no tensors are kept; tensors hold zeros or random
        numbers of a fixed seed.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments."""
        return tensors_of((self.args, self.kwargs))

    def map(self, act: Callable[[Tensor], Tensor]) -> Call:
        """The same call with other tensors."""
        return Call(*map_tensors(act, (self.args, self.kwargs)))

    def zeros(self, device: torch.device | None = None) -> Call:
        """Zeros of the same shapes, which take no memory."""
        return self.map(lambda t: torch.zeros((), dtype=t.dtype, device=device or t.device).expand(t.shape))

    def random(self, n: int, seed: int, draw: Draw = torch.randn) -> Call:
        """n random records; integers are 0 or 1, which every table of tokens has."""
        generator = torch.Generator().manual_seed(seed)

        def fill(t: Tensor) -> Tensor:
            shape = (n, *t.shape[1:]) if t.dim() else ()
            floating = t.is_floating_point()
            new = draw(shape, generator=generator) if floating else torch.randint(0, 2, shape, generator=generator)
            return new.to(t.device, t.dtype)

        return self.map(fill)

    def with_ones(self, place: int) -> Call:
        """The same with ones in one of the tensors: a mask that hides nothing, which libraries leave out."""
        number = iter(range(len(self.tensors)))
        return self.map(lambda t: torch.ones_like(t) if next(number) == place else t)

    def with_bytes(self) -> Call | None:
        """The same with bytes of all sizes, as of pictures; None where there are none."""
        if all(t.dtype != torch.uint8 for t in self.tensors):
            return None
        generator = torch.Generator().manual_seed(3)

        def fill(t: Tensor) -> Tensor:
            return t if t.dtype != torch.uint8 else torch.randint(0, 256, t.shape, generator=generator).to(t)

        return self.map(fill)

    @property
    def masks(self) -> list[int]:
        """Numbers of the tensors that may be masks beside others: integers and truth values of each record."""
        tensors = self.tensors
        return [i for i, t in enumerate(tensors) if t.dim() and not t.is_floating_point()] if tensors[1:] else []

    def positional(self) -> tuple[Any, ...]:
        """The arguments of a model whose graph is traced, which takes tensors by position."""
        if self.kwargs or not all(isinstance(a, Tensor) for a in self.args):
            raise WeightclipError(
                "a certified bound needs a model whose inputs are tensors by position: pass example= (a batch of "
                "inputs, or a tuple of them), or limit every layer by a cap (Bounds()), which takes any call."
            )
        return self.args

    def __call__(self, model: nn.Module) -> Any:
        """The model's output."""
        return model(*self.args, **self.kwargs)


def zipped(a: Call, b: Call, act: Callable[[Tensor, Tensor], Tensor]) -> Call:
    """Tensors made of those of two calls."""
    others = iter(b.tensors)
    return a.map(lambda t: act(t, next(others)))


def put(a: Tensor, b: Tensor, i: int, size: float) -> Tensor:
    """``a`` with another record ``i``: that of ``b``, so many times as large; integers and truth values turned over."""
    if not a.dim():
        return a
    a = a.clone()
    a[i] = size * b[i] if a.is_floating_point() else 1 - a[i] if a.dtype != torch.bool else ~a[i]
    return a


def row_of(a: Tensor, b: Tensor, i: int) -> Tensor:
    """``a`` with the record ``i`` of ``b``."""
    if not a.dim():
        return a
    a = a.clone()
    a[i] = b[i]
    return a


def marked(t: Tensor, i: int, one: int) -> Tensor:
    """Integers and masks: all zero, but for record ``i``."""
    if not t.dim() or t.is_floating_point():
        return t
    t = torch.zeros_like(t)
    t[i] = one
    return t


def call_of(model: nn.Module, loader: DataLoader, example: Any, device: torch.device) -> Call:
    """The model's inputs in a batch of the loader, or the example that was given instead."""
    given = example is not None
    if not given:
        record = loader.dataset[0]  # only shapes are read
        example = loader.collate_fn([record, record])
        if isinstance(example, (tuple, list)):
            example = example[0] if example else None
    call = _arguments(model, example, given)
    if not call.tensors or (not given and not isinstance(example, (Tensor, Mapping))):
        raise WeightclipError(
            "the model's input is not the first element of a batch, nor a mapping: pass example= (a batch of inputs)."
        )
    return call.zeros(device)


def _arguments(model: nn.Module, example: Any, given: bool) -> Call:
    if isinstance(example, Mapping):
        inputs = {str(k): v for k, v in example.items() if given or k not in LABELS}
        return Call((), inputs) if _takes(model, inputs) else Call((example,), {})
    return Call(tuple(example) if isinstance(example, (tuple, list)) and given else (example,), {})


def _takes(model: nn.Module, names: Mapping[str, Any]) -> bool:
    """Whether the model's forward takes these arguments by name."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(q.kind is q.VAR_KEYWORD for q in parameters):
        return True
    return set(names) <= {q.name for q in parameters if q.kind is not q.VAR_POSITIONAL}
