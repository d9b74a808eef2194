"""Stock models through the engine: what it releases without noise against per-record gradients of the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tests.oracle import pick, size_of, trainable
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import weightclip as wc

RECORDS = 8


def per_record(output: Any, target: Tensor) -> Tensor:
    """Cross-entropy of each record, averaged over its positions."""
    logits = output.logits if hasattr(output, "logits") else output
    return F.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="none").view(len(target), -1).mean(1)


@dataclass
class Case:
    """A model, records for it, and how its loss is written.

    Attributes:
        model: In training mode, without dropout.
        inputs: A mapping of named inputs, or one tensor.
        target: A label, or a vector, for each record.
        loss: (output, target) -> a number for each record: what the oracle differentiates.
        criterion: What make_private gets for it.
        double: Whether float32 is too short for the oracle itself (norms of one pixel a channel: it errs by 1e-3).
    """

    model: nn.Module
    inputs: Any
    target: Tensor
    loss: Callable[[Any, Any], Tensor] = per_record
    criterion: Any = None
    double: bool = False


class Records(Dataset):
    """Records of a case, as a user's data set has them."""

    def __init__(self, case: Case, rows: list[int]) -> None:
        self.case, self.rows = case, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        record = pick(self.case.inputs, self.rows[i])
        if isinstance(record, dict):
            return {**record, "labels": self.case.target[self.rows[i]]}
        return record, self.case.target[self.rows[i]]


def released(case: Case, cap: float, rows: list[int] | None = None, product: wc.Product | None = None) -> Tensor:
    """The noiseless release of one step over these records, times b: an ordinary loop on a private model."""
    rows = list(range(RECORDS)) if rows is None else rows
    model = copy.deepcopy(case.model)
    engine = wc.PrivacyEngine()
    model, optimizer, loader, criterion = engine.make_private(
        module=model, optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.0),
        data_loader=DataLoader(Records(case, rows), batch_size=len(rows)),
        criterion=case.criterion or nn.CrossEntropyLoss(), noise_multiplier=0.0, sample_rate=1.0,
        expected_batch_size=RECORDS, bounds=wc.Bounds(max_grad_norm=cap, product=product or wc.Product()),
    )  # fmt: skip
    for batch in loader:
        target = batch.pop("labels") if isinstance(batch, dict) else batch[1]
        output = model(**batch) if isinstance(batch, dict) else model(batch[0])
        optimizer.zero_grad()
        if target.dim() == 2 and case.criterion is None:  # a label for every position: the idiom of language models
            output, target = getattr(output, "logits", output).flatten(0, 1), target.flatten()
        criterion(output, target).backward()
        optimizer.step()
    found = [p.grad if p.grad is not None else torch.zeros_like(p) for p in trainable(model).values()]
    return torch.cat([g.flatten().double() for g in found]) * RECORDS


def shaken(model: nn.Module, seed: int = 1) -> nn.Module:
    """Weights of ordinary size everywhere: scales of one, biases of zero and tiny tokens would hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                size = p[0].numel() if p.dim() > 1 else 4
                p.copy_(torch.randn(p.shape, generator=generator) * (1.5 / size**0.5) + (p == 1).float())
    return model.train()


def check(case: Case, close: float = 1e-5) -> None:
    """Half of the records are clipped; the release is the oracle's; no record moves it by more than the cap."""
    exact = oracle_gradients(case)
    norms = exact.norm(dim=1)
    cap = float(norms.sort().values[RECORDS // 2 - 1 : RECORDS // 2 + 1].mean())
    scales = (cap / norms).clamp(max=1.0)
    assert int((scales < 1).sum()) >= RECORDS // 2
    want = (exact * scales[:, None]).sum(0)
    got = released(case, cap, product=wc.Product(torch.float64))
    error = float((got - want).norm() / want.norm())
    assert error <= close, error
    # by default convolutions are multiplied in float32, and room for its rounding is part of a record's norm
    usual = released(case, cap)
    assert float((usual - want).norm()) <= 1e-3 * float(want.norm())
    loudest = int(norms.argmax())
    less = released(case, cap, [i for i in range(RECORDS) if i != loudest])
    assert 0.99 * cap <= float((usual - less).norm()) <= cap * (1 + 1e-4)


def check_hostile(case: Case, cap: float = 0.05) -> None:
    """Records that are huge, constant or not finite move the release by no more than the cap, whoever else is there."""
    inputs = copy.deepcopy(case.inputs)
    for value in inputs.values() if isinstance(inputs, dict) else [inputs]:
        if value.is_floating_point():
            value[0], value[1], value[2] = value[0] * 1e4, 1.0, float("inf")
        else:
            value[0], value[1] = value[0].flatten()[0], value[2]
    worse = Case(case.model, inputs, case.target, case.loss, case.criterion)
    whole = released(worse, cap)
    for i in range(3):
        less = released(worse, cap, [j for j in range(RECORDS) if j != i])
        assert float((whole - less).norm()) <= cap * (1 + 1e-4)


def oracle_gradients(case: Case) -> Tensor:
    """Exact gradients of each record."""
    rows, parameters = [], list(trainable(case.model).values())
    for i in range(size_of(case.inputs)):
        record = pick(case.inputs, slice(i, i + 1))
        output = case.model(**record) if isinstance(record, dict) else case.model(record)
        value = case.loss(output, case.target[i : i + 1]).sum()
        found = torch.autograd.grad(value, parameters, allow_unused=True)
        rows.append(torch.cat([(torch.zeros_like(p) if g is None else g).flatten().double()
                               for g, p in zip(found, parameters, strict=True)]))  # fmt: skip
    return torch.stack(rows)
