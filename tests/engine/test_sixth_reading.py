"""What a sixth, hostile reading found around the engine; each is closed here, with mutants in test_reading_mutants.

Judged as in the third reading: one record must not move what is released by more than its cap, or the code is refused.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engine.test_third_reading import Net, made, usual
from tests.engine_kit import mlp, private, table
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

import weightclip as wc

# -- parameters that forward writes or puts in the place of others -----------------------------------------------------


class Centers(Net):
    """Keeps a mean of its activations among its parameters, which nothing but eval() reads."""

    how, on = "replaced", True

    def __init__(self, trained: bool = False) -> None:
        super().__init__()
        self.center = nn.Parameter(torch.zeros(8), requires_grad=trained)

    def between(self, h: Tensor) -> Tensor:
        h = torch.tanh(self.inner(h))
        if self.training and self.on:
            mean = h.detach().mean(0)
            if self.how == "replaced":
                self.center = nn.Parameter(mean, requires_grad=False)
            elif self.how == "new":
                self.more = nn.Parameter(mean, requires_grad=False)
            else:
                with torch.no_grad():
                    self.center.copy_(mean)
        return h + 0 * self.center if self.how == "trained" else h


def check_parameters() -> None:
    """Refused before anything is released, whether it is so from the start or begins later."""
    for how in ("replaced", "new", "trained"):
        for late in (False, True):
            model = Centers(how == "trained")
            model.how, model.on = how, not late
            if how == "trained" and not late:
                with pytest.raises(wc.ContractError, match="forward writes"):
                    made(model)
                continue
            run = made(model)
            batch = next(iter(run.loader))
            model.on = True
            with pytest.raises(wc.ContractError, match=r"forward writes parameter 'center'|or parameter of Centers"):
                usual(run, batch)
            assert run.engine.steps == 0


def test_parameters_that_forward_writes_or_replaces_are_refused() -> None:
    check_parameters()


# -- optimisers that step by the loss ----------------------------------------------------------------------------------


class Polyak(torch.optim.Optimizer):
    """The length of a step follows from the loss."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        loss = closure()
        for p in self.param_groups[0]["params"]:
            p.sub_(float(loss.detach()) * p.grad)
        return loss


class Named(torch.optim.SGD):
    """A name of the user's own for what torch does."""


def check_optimisers() -> None:
    """Torch's own steps hand the loss back; any other gets none, and cannot step by it."""
    for kind, known in ((Polyak, False), (torch.optim.SGD, True), (Named, True)):
        run = private(mlp(), table(9), optimizer=kind)
        (x, y), shown = next(iter(run.loader)), []

        def closure(run: Any = run, x: Tensor = x, y: Tensor = y, shown: list[float] = shown) -> Tensor:
            loss = run.criterion(run.model(x), y)
            loss.backward()
            shown.append(float(loss.detach()))
            return loss

        returned = run.optimizer.step(closure)
        assert len(shown) == 1 and (float(returned.detach()) == shown[0]) is known
        weights = torch.cat([p.flatten() for p in run.model.parameters()])
        assert bool(torch.isfinite(weights).all()) is known and run.engine.steps == 1


def test_an_optimiser_cannot_step_by_a_loss_that_has_no_noise() -> None:
    check_optimisers()


# -- batches that are fetched ahead ------------------------------------------------------------------------------------


def check_ahead() -> None:
    """A draw that comes again, because nothing was released of it yet, must not be released twice."""
    run = private(nn.Linear(6, 3), table(24), sigma=1.0, batch=1)
    batches = iter(run.loader)
    batch = next(batches)
    next(batches)
    with pytest.raises(wc.ContractError, match="Fetch no batch ahead"):
        usual(run, batch)
    assert run.engine.steps == 0
    for batch in run.loader:
        usual(run, batch)
        if run.engine.steps == 3:
            break
    assert run.engine.steps == 3


def test_no_loop_fetches_batches_ahead() -> None:
    check_ahead()


@pytest.mark.parametrize("strict", [False, True])
def test_recorded_steps_have_seen_their_batch(strict: bool) -> None:
    """As on a GPU, where a graph that is launched again calls no model."""
    run = private(mlp(), table(24), batch=6, strict=strict)
    for _ in run.loader:
        run.engine.training.admit_batch()
        run.engine.training.spend(lambda step: None)
    assert run.engine.steps == 4


# -- what the report says ----------------------------------------------------------------------------------------------


def test_the_report_says_that_a_collate_function_is_not_tested() -> None:
    for collate in (None, lambda records: default_collate(records)):
        model = mlp()
        engine = wc.PrivacyEngine()
        data = torch.utils.data.TensorDataset(*table(8))
        engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), noise_multiplier=1.0,
            data_loader=DataLoader(data, batch_size=4, collate_fn=collate), criterion=nn.CrossEntropyLoss(),
        )  # fmt: skip
        gaps = [line for line in engine.report()["not_covered"] if line.startswith("collate_fn")]
        assert len(gaps) == (collate is not None)


# -- padding and rows folded into the batch ----------------------------------------------------------------------------


class Folded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.relu(self.first(x.reshape(-1, 3)))
        return self.last(rows.view(len(x), 2, 8).mean(1))


def test_padding_has_no_say_in_quantiles_where_records_have_several_rows() -> None:
    counts = []
    for strict in (False, True):
        bounds = wc.Bounds(layer_cap=0.1, adaptive=wc.Adaptive(quantile=0.5))
        run = made(Folded(), bounds=bounds, strict=strict)
        x, y = next(iter(run.loader))
        run.criterion(run.model(x), y).backward()
        quantiles = run.engine.training.quantiles
        assert quantiles is not None
        counts.append(torch.stack([c.clone() for c in quantiles.counts()]))
        run.optimizer.step()
    assert torch.equal(*counts) and bool(counts[0].any())
