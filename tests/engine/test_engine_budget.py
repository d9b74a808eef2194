"""Budgets: calibration, the end of the loader, and what get_epsilon says."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from tests.engine_kit import mlp, private, table
from torch.utils.data import DataLoader, TensorDataset

import weightclip as wc
from weightclip.accounting._accounting import Mechanism, epsilon


def budgeted(accountant: str = "rdp", target: float = 2.0, n: int = 40, batch: int = 8, epochs: float = 2, **settings):
    return private(
        mlp(), table(n), sigma=None, batch=batch, accountant=accountant, target_epsilon=target, target_delta=1e-4,
        epochs=epochs, **settings,
    )  # fmt: skip


@pytest.mark.parametrize(("accountant", "target"), [("pld", 2.0), ("rdp", 0.5), ("rdp", 4.0)])
def test_the_budget_holds_and_is_used(accountant: str, target: float) -> None:
    run = budgeted(accountant, target)
    assert run.engine.get_epsilon(1e-4) == 0
    run.train(2)
    assert run.engine.steps == 10
    spent = run.engine.get_epsilon(1e-4)
    assert 0.97 * target < spent <= target
    assert run.engine.get_epsilon(1e-3) < spent


def test_the_loader_ends_with_one_warning_and_step_raises() -> None:
    run = budgeted()
    with pytest.warns(UserWarning, match="budget spent") as caught:
        run.train(5)
    assert len([w for w in caught if "budget" in str(w.message)]) == 1
    assert run.engine.steps == 10
    assert list(run.loader) == []
    with pytest.raises(wc.BudgetSpent):
        run.optimizer.step()
    assert run.engine.get_epsilon(1e-4) <= 2.0
    assert issubclass(wc.BudgetSpent, wc.ContractError)


def test_the_budget_counts_draws_in_pieces_and_the_loss_refuses_after_it() -> None:
    run = budgeted(max_physical_batch_size=3, epochs=0.4)
    batches = iter(run.loader)
    held = None
    for x, y in batches:
        held = x, y
        run.criterion(run.model(x), y).backward()
        run.optimizer.step()
        if run.engine.steps == 2:
            break
    assert held is not None and run.engine.steps == 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert list(run.loader) == []
    with pytest.raises((wc.BudgetSpent, wc.ContractError)):
        run.criterion(run.model(held[0]), held[1]).backward()
        run.optimizer.step()


def test_report_and_get_epsilon_agree_with_the_accountant() -> None:
    run = private(mlp(), table(40), sigma=1.1, batch=8).train(2)
    exact = epsilon([Mechanism("gaussian", sigma=1.1, q=0.2, steps=10)], 1e-5)
    assert run.engine.get_epsilon(1e-5) == pytest.approx(exact, rel=1e-9)
    report = run.engine.report(delta=1e-5)
    assert report["epsilon"] == pytest.approx(exact, rel=1e-9)
    (mechanism,) = report["mechanisms"]
    assert (mechanism["kind"], mechanism["sigma"], mechanism["q"], mechanism["steps"]) == ("gaussian", 1.1, 0.2, 10)


def test_no_noise_is_reported_as_infinite() -> None:
    run = private(mlp(), table(8), sigma=0.0)
    assert run.engine.get_epsilon(1e-5) == 0
    run.train()
    assert run.engine.get_epsilon(1e-5) == math.inf
    assert run.engine.report(delta=1e-5)["epsilon"] == "inf"


def test_replace_one_costs_more_and_rdp_refuses_it() -> None:
    runs = {}
    for adjacency in wc.Adjacency:
        run = private(mlp(), table(40), sigma=1.0, batch=8, adjacency=adjacency).train()
        runs[adjacency] = run.engine.get_epsilon(1e-5)
        assert run.engine.report()["adjacency"] == adjacency.name
    assert runs[wc.Adjacency.REPLACE_ONE] > runs[wc.Adjacency.ADD_OR_REMOVE_ONE]
    with pytest.raises(wc.WeightclipError, match="(?i)replace"):
        private(mlp(), table(40), sigma=1.0, batch=8, accountant="rdp", adjacency=wc.Adjacency.REPLACE_ONE)
    text = private(mlp(), table(8), sigma=1.0, adjacency="replace_one")
    assert text.engine.report()["adjacency"] == "REPLACE_ONE"
    run = budgeted("pld", adjacency=wc.Adjacency.REPLACE_ONE, epochs=0.4)
    assert epsilon([Mechanism("gaussian", run.engine.noise_multiplier, 0.2, 2)], 1e-4, adjacency="replace_one") <= 2.0


def test_a_large_delta_warns() -> None:
    with pytest.warns(UserWarning, match="1/40"):
        private(mlp(), table(40), sigma=None, batch=8, target_epsilon=1.0, target_delta=0.1, epochs=1, accountant="rdp")


def test_sigma_shrinks_with_epsilon_and_grows_with_epochs() -> None:
    one, cheap, long = (budgeted(target=e, epochs=t).engine.noise_multiplier for e, t in ((1.0, 1), (3.0, 1), (1.0, 4)))
    assert cheap < one < long


def test_four_objects_in_order() -> None:
    x, y = table(8)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    for call in ("make_private", "make_private_with_epsilon"):
        engine = wc.PrivacyEngine(accountant="rdp")
        extra = (
            {"noise_multiplier": 1.0} if call == "make_private"
            else {"target_epsilon": 1.0, "target_delta": 1e-3, "epochs": 1}
        )  # fmt: skip
        parts = getattr(engine, call)(
            module=model, optimizer=optimizer, data_loader=loader, criterion=torch.nn.CrossEntropyLoss(), **extra
        )
        assert len(parts) == 4
        assert parts[0] is model and parts[1] is optimizer
        assert len(parts[2]) == 2
        engine.detach()
