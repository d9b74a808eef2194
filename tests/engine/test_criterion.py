"""The private criterion: summed per record, averaged over a record's own positions, never normalised by the data."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from tests.engine_kit import mlp, private, table, tokens
from torch import nn

import weightclip as wc


def sequences(n: int = 8):
    g = torch.Generator().manual_seed(0)
    return torch.randint(0, 5, (n, 4), generator=g), torch.randint(0, 3, (n, 4), generator=g)


CRITERIA = {
    "plain": nn.CrossEntropyLoss(),
    "smoothed": nn.CrossEntropyLoss(label_smoothing=0.2),
    "weighted": nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0])),
    "summed": nn.CrossEntropyLoss(reduction="sum"),
    "margin": nn.MultiMarginLoss(),
    "ours": wc.losses.CrossEntropy(temperature=2.0),
    "function": F.cross_entropy,
}


@pytest.mark.parametrize("name", CRITERIA)
def test_under_no_grad_it_is_the_users_criterion(name: str) -> None:
    x, y = table(8)
    run = private(mlp(), (x, y), criterion=CRITERIA[name])
    with torch.no_grad():
        z = run.model(x)
        assert torch.equal(run.criterion(z, y), CRITERIA[name](z, y))
    assert torch.equal(run.criterion(z.detach(), y), CRITERIA[name](z, y))


@pytest.mark.parametrize("b", [8, 5])
def test_the_displayed_value_is_the_sum_over_the_expected_batch_size(b: int) -> None:
    x, y = table(8)
    run = private(mlp(), (x, y), batch=b, sample_rate=1.0)
    for a, target in run.loader:
        z = run.model(a)
        shown = run.criterion(z, target)
        torch.testing.assert_close(shown.detach(), F.cross_entropy(z, target, reduction="sum").detach() / b)


def test_class_weights_multiply_and_never_normalise() -> None:
    weight = torch.tensor([0.2, 1.0, 3.0])
    x, y = table(8)
    run = private(mlp(), (x, y), criterion=nn.CrossEntropyLoss(weight=weight))
    assert run.engine.report()["public"]["loss_bound"] == pytest.approx(3 * math.sqrt(2), rel=1e-9)
    run.train()
    plain = mlp()
    inside = x / x.norm(dim=1, keepdim=True).clamp(min=1)
    (F.cross_entropy(plain(inside), y, weight=weight, reduction="sum") / 8).backward()
    for name, p in plain.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(run.grads()[name], p.grad, rtol=1e-4, atol=1e-6)


def test_positions_are_averaged_with_a_fixed_count_also_where_labels_are_ignored() -> None:
    ids, labels = sequences()
    labels[0, :3] = -100
    labels[1] = -100
    run = private(tokens(), (ids, labels))
    for a, target in run.loader:
        z = run.model(a).transpose(1, 2)
        shown = run.criterion(z, target)
        shown.backward()
        run.optimizer.step()
    per_position = F.cross_entropy(tokens()(ids).transpose(1, 2), labels, reduction="none")  # 0 where ignored
    torch.testing.assert_close(shown.detach(), per_position.mean(1).sum().detach() / 8)
    plain = tokens()
    (F.cross_entropy(plain(ids).transpose(1, 2), labels, reduction="none").mean(1).sum() / 8).backward()
    for name, p in plain.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(run.grads()[name], p.grad, rtol=1e-3, atol=1e-6)


def test_unknown_callables_need_a_declared_bound_and_get_it_enforced() -> None:
    data = table(8)
    with pytest.raises(wc.ContractError, match="PerRecordLoss"):
        private(mlp(), data, criterion=lambda z, y: z.sum())
    with pytest.raises(wc.ContractError, match="unbounded"):
        private(mlp(), data, criterion=nn.MSELoss())
    loss = wc.PerRecordLoss(lambda z, y: 50 * z.square().sum(1), bound=0.3)
    run = private(mlp(), data, criterion=loss)
    run.train()
    assert run.engine.report()["public"]["loss_bound"] == pytest.approx(0.3, rel=1e-3)
    last = run.grads()["2.bias"] * 8
    assert float(last.norm()) <= 8 * 0.3


def test_a_failed_loss_leaves_the_batch_usable() -> None:
    run = private(mlp(), table(8))
    for x, y in run.loader:
        with pytest.raises(wc.ContractError, match="labels of shape"):
            run.criterion(run.model(x), y[:3])
        run.criterion(run.model(x), y).backward()
        run.optimizer.step()
    assert run.engine.steps == 1


def test_it_shows_its_loss_and_is_a_module() -> None:
    run = private(mlp(), table(8))
    assert "CrossEntropy" in repr(run.criterion)
    assert isinstance(run.criterion, nn.Module)


def test_the_certified_loss_cannot_be_replaced() -> None:
    """Its bound is part of the noise: another loss under the old bound would get too little."""
    run = private(mlp(), table(8), criterion=wc.losses.CrossEntropy(temperature=2.0))
    with pytest.raises(AttributeError):
        run.criterion.loss = wc.losses.CrossEntropy(temperature=0.01)
    assert run.criterion.loss == wc.losses.CrossEntropy(temperature=2.0)
