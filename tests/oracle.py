"""Released sums against an oracle: per-record gradients of the plain model, one at a time, clipped and summed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from weightclip._torch import tree_map_only
from weightclip.factors import Collector, Entry, Product, families, make_layer_private

Loss = Callable[[Any], Tensor]  # output of the model -> one number for each record


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters by name, each once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def pick(batch: Any, rows: Any) -> Any:
    """Some records of a batch."""
    return tree_map_only(Tensor, lambda t: t[rows], batch)


def call(model: nn.Module, batch: Any) -> Any:
    """A batch is a mapping of named inputs, a tuple of inputs, or one input."""
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def size_of(batch: Any) -> int:
    """Number of records."""
    first = next(iter(batch.values())) if isinstance(batch, dict) else batch[0] if isinstance(batch, tuple) else batch
    return len(first)


def record_gradients(model: nn.Module, batch: Any, loss: Loss) -> Tensor:
    """(records, all trainable parameters) in float64, from batches of one record."""
    rows, parameters = [], list(trainable(model).values())
    for i in range(size_of(batch)):
        value = loss(call(model, pick(batch, slice(i, i + 1)))).sum()
        found = torch.autograd.grad(value, parameters, allow_unused=True)
        rows.append(torch.cat([(torch.zeros_like(p) if g is None else g).flatten().double()
                               for g, p in zip(found, parameters, strict=True)]))  # fmt: skip
    return torch.stack(rows)


class Run:
    """A private copy of a model under one joint cap (or one cap for each layer), without noise."""

    def __init__(
        self, model: nn.Module, batch: Any, cap: float, each: bool = False, uses: int = 0, public: Any = None,
        shared: bool = False,
    ) -> None:  # fmt: skip
        self.model, self.found = copy.deepcopy(model), {}
        self.parameters = list(trainable(self.model).values())
        self.collector = Collector(self._add)
        places = {id(p): i for i, p in enumerate(self.parameters)}
        for layers in families(self.model).values():
            for layer in layers:
                product = Product(torch.float64)  # as the engine chooses under caps
                make_layer_private(layer, cap=cap if each else None, product=product, shared=shared or len(layers) > 1)
            joint = None if each else cap
            self.collector.enter(Entry.of(layers[0], places, uses, joint, tied=layers[1:]))
        self.collector.passes.watch(self.model, moved=True)
        self.collector.passes.watch_end(self.model)
        example = batch if public is None else public
        self.collector.discover(lambda n: call(self.model, pick(example, torch.arange(n) % size_of(example))))

    def _add(self, place: int, total: Tensor) -> None:
        assert total.shape == self.parameters[place].shape
        self.found[place] = self.found.get(place, 0) + total.double()

    def sums(self, batch: Any, loss: Loss) -> Tensor:
        """The sum of all records' limited gradients, flat."""
        self.found = {}
        value = loss(call(self.model, batch)).sum()
        with self.collector.collection(size_of(batch)):
            stray = torch.autograd.grad(value, [*self.parameters, self.collector.anchor], allow_unused=True)[:-1]
        assert all(g is None for g in stray), "a parameter reaches the loss outside its product"
        return torch.cat([torch.as_tensor(self.found.get(i, torch.zeros(p.shape, dtype=torch.float64))).flatten()
                          for i, p in enumerate(self.parameters)])  # fmt: skip


def check(model: nn.Module, batch: Any, loss: Loss | None = None, close: float = 1e-5, shared: bool = False) -> Run:
    """A joint cap at the median norm: forward equal to the plain model's, released sum equal to the oracle's."""
    loss = loss or wavy
    exact = record_gradients(model, batch, loss)
    norms = exact.norm(dim=1)
    cap = float(norms.median())
    assert cap > 0
    scales = (cap / norms).clamp(max=1.0)
    assert int((scales < 1 - 1e-6).sum()) >= len(norms) // 2 - 1
    run = Run(model, batch, cap, shared=shared)
    with torch.no_grad():
        torch.testing.assert_close(loss(call(run.model, batch)), loss(call(model, batch)), rtol=1e-4, atol=1e-5)
    want = (exact * scales[:, None]).sum(0)
    got = run.sums(batch, loss)
    assert float((got - want).norm()) <= close * float(want.norm()), float((got - want).norm() / want.norm())
    return run


def check_each(model: nn.Module, batch: Any, loss: Loss | None = None, close: float = 1e-5) -> None:
    """One cap for each layer (family of tied ones), at a small part of the median norm of the whole gradient."""
    loss = loss or wavy
    exact = record_gradients(model, batch, loss)
    cap = float(exact.norm(dim=1).median()) / 3
    owner = {id(p): path for path, layers in families(model).items() for m in layers
             for p in m.parameters(recurse=False)}  # fmt: skip
    parts = exact.split([p.numel() for p in trainable(model).values()], 1)
    paths = [owner[id(p)] for p in trainable(model).values()]
    want = []
    for path, own in zip(paths, parts, strict=True):
        whole = torch.cat([o for p, o in zip(paths, parts, strict=True) if p == path], 1).norm(dim=1)
        want.append((own * (cap / whole.clamp(min=1e-30)).clamp(max=1)[:, None]).sum(0))
    got, flat = Run(model, batch, cap, each=True).sums(batch, loss), torch.cat(want)
    assert float((got - flat).norm()) <= close * float(flat.norm()), float((got - flat).norm() / flat.norm())


def hostile(batch: Any) -> Any:
    """The batch with a huge, a tiny, a constant and a non-finite record, and one twice."""

    def change(t: Tensor) -> Tensor:
        t = t.clone()
        t[1] = t[0]
        if t.is_floating_point():
            t[2], t[3], t[4], t[5] = t[2] * 1e4, t[3] * 1e-8, 1.0, float("nan")
        return t

    return tree_map_only(Tensor, change, batch)


def moves(run: Run, batch: Any, loss: Loss | None = None) -> float:
    """By how much taking out one record moves the sum, at most."""
    loss, n = loss or wavy, size_of(batch)
    whole = run.sums(batch, loss)
    return max(
        float((whole - run.sums(pick(batch, torch.tensor([j for j in range(n) if j != i])), loss)).norm())
        for i in range(n)
    )


def wavy(output: Any) -> Tensor:
    """A loss that has a different slope at every entry of each record's output."""
    flat = output.flatten(1)
    return (flat * torch.sin(1.0 + torch.arange(flat.shape[1], dtype=flat.dtype)) + 0.3 * flat.square()).sum(1)
