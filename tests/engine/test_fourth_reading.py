"""What a fourth, hostile reading found around the engine; each is closed here, with mutants in test_reading_mutants.

Judged as in the third reading: one record must not move the release by more than its cap, or the code is refused; and
what an engine says of its epsilon is about the noise that was added.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.test_third_reading import Net, made, usual
from tests.engine_kit import mlp, private, table
from torch import Tensor, nn

import weightclip as wc
from weightclip.noise import GridSums

# -- outputs, buffers, frozen parameters -------------------------------------------------------------------------------


def check_copies() -> None:
    """A copy of the output that was written to before the loss."""
    run = made(Net())
    x, y = next(iter(run.loader))
    z = run.model(x).double()
    with torch.no_grad():
        z.div_(z.abs().max())
    with pytest.raises(wc.ContractError, match="changed in place"):
        run.criterion(z, y)
    run.criterion(run.model(x).double().clone(), y).backward()
    run.optimizer.step()
    assert run.engine.steps == 1


def test_copies_of_the_output_that_were_changed_are_refused() -> None:
    check_copies()


class Mean(Net):
    """Keeps a mean of its activations, which nothing but eval() reads."""

    how = "rebound"

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.codes = nn.Parameter(torch.zeros(8), requires_grad=False)
        self.on = True

    def between(self, h: Tensor) -> Tensor:
        h, mean = torch.tanh(self.inner(h)), None
        if self.training and self.on:
            mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        if mean is not None and self.how == "rebound":
            self.mean = mean
        elif mean is not None and self.how == "frozen":
            with torch.no_grad():
                self.codes.copy_(mean)
        elif mean is not None and self.how == "late":
            self.register_buffer("late", mean)
        elif mean is not None:
            self.mean.copy_(mean)
        return h


def check_state() -> None:
    """Refused, from the start where it is written in place, and before a release where a buffer is replaced."""
    for how in ("rebound", "frozen", "late", "in place"):
        model = Mean()
        model.how = how
        if how in ("frozen", "in place"):
            with pytest.raises(wc.ContractError, match="forward writes"):
                made(model)
            assert not bool(model.mean.any()), "what random records wrote is gone"
        else:
            run = made(model)
            with pytest.raises(wc.ContractError, match="forward writes"):
                usual(run, next(iter(run.loader)))
            assert run.engine.steps == 0
        model = Mean()
        model.how, model.on = how, False
        run = made(model)
        usual(run, next(iter(run.loader)))
        model.on = True
        with pytest.raises(wc.ContractError, match="forward writes"):
            usual(run, next(iter(run.loader)))


class Cached(Net):
    """Makes a constant when it is first needed, and remembers beside it that it is there."""

    there = False

    def between(self, h: Tensor) -> Tensor:
        if not self.there:
            self.register_buffer("cached", torch.linspace(0, 1, h.shape[1]), persistent=False)
            self.there = True
        return torch.relu(self.inner(h * self.cached))


def check_caches() -> None:
    """What depends on shapes alone may be kept from the first pass on, which is one of random records."""
    run = made(Cached())
    usual(run, next(iter(run.loader)))
    assert run.engine.steps == 1 and torch.equal(run.model.cached, torch.linspace(0, 1, 8))


def test_caches_of_public_constants_are_no_state() -> None:
    check_caches()


def test_state_that_forward_writes_is_refused_however_it_is_kept() -> None:
    check_state()


# -- independence ------------------------------------------------------------------------------------------------------


class Sometimes(Net):
    """Mixes records in some passes only, as an augmentation inside the model may."""

    rate = 0.5

    def between(self, h: Tensor) -> Tensor:
        if self.training and float(torch.rand(())) < self.rate:
            h = h + h.roll(1, 0)
        return torch.relu(self.inner(F.dropout(h, 0.1, self.training)))


def check_sometimes() -> None:
    for _ in range(3):
        with pytest.raises(wc.ContractError, match="mixes records"):
            made(Sometimes())


def test_mixing_by_chance_is_refused() -> None:
    check_sometimes()
    model = Sometimes()
    model.rate = 0.0
    run = made(model)
    usual(run, next(iter(run.loader)))
    assert run.engine.steps == 1


class Scaled(Net):
    """Bytes of pictures become numbers below one, if any of the batch is above."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x / 255.0 if bool(x.max() > 1) else x.float())


def check_bytes() -> None:
    data = torch.randint(0, 256, (9, 6), generator=torch.Generator().manual_seed(0)).to(torch.uint8), table(9)[1]
    with pytest.raises(wc.ContractError, match="mixes records"):
        made(Scaled(), data)


def test_bytes_are_tested_over_their_range() -> None:
    check_bytes()


# -- loaders -----------------------------------------------------------------------------------------------------------


def strict() -> Any:
    return private(mlp(), table(24), sigma=1.0, batch=6, strict=True)


def check_ahead() -> None:
    """A loop that fetches the next batch before it trains on this one; others go on as before."""
    run = strict()
    batches = iter(run.loader)
    batch = next(batches)
    next(batches)
    with pytest.raises(wc.ContractError, match="Fetch no batch ahead"):
        usual(run, batch)
    next(iter(run.loader))  # a look at the shapes
    with torch.no_grad():
        for x, _ in run.loader:  # an evaluation
            run.model(x)
    for batch in run.loader:
        usual(run, batch)
        if run.engine.steps == 2:
            break
    for k, batch in enumerate(run.loader):
        if k == 0:  # a failure in the model: this draw is left
            with pytest.raises(RuntimeError):
                run.model(batch[0][:, :2])
            continue
        usual(run, batch)
    assert run.engine.steps > 3


def test_strict_batches_are_not_fetched_ahead() -> None:
    check_ahead()


# -- what is charged ---------------------------------------------------------------------------------------------------


def check_price() -> None:
    """Noise and rate cannot be given another price afterwards."""
    run = private(mlp(), table(24), sigma=1.0, batch=6)
    run.train(3)
    before = run.engine.get_epsilon(1e-5)
    with pytest.raises(wc.ContractError, match="noise_multiplier is fixed"):
        run.engine.noise_multiplier *= 1.5
    with pytest.raises(wc.ContractError, match="sample_rate is fixed"):
        run.loader.sample_rate = 0.001
    assert run.engine.get_epsilon(1e-5) == before


def test_the_price_of_a_run_is_fixed() -> None:
    check_price()


def check_fork() -> None:
    """A fork would count for itself alone."""
    run = private(mlp(), table(24), sigma=1.0, batch=6)
    run.train(1)
    steps, here = run.engine.steps, os.getpid()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getpid", lambda: here + 1)
        with pytest.raises(wc.ContractError, match="fork"):
            run.train(1)
    assert run.engine.steps == steps > 0


def test_a_fork_releases_nothing() -> None:
    check_fork()


def check_other_runs(tmp_path: Any) -> None:
    """Without a ledger, releases before a checkpoint of another run was loaded stay counted."""
    first, second = (private(mlp(), table(24), sigma=1.0, batch=6) for _ in range(2))
    first.train(2)
    first.engine.save(tmp_path / "first")
    second.train(1)
    saved, own = first.engine.steps, second.engine.steps
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        second.engine.load(tmp_path / "first")
        assert second.engine.steps == saved + own > saved
        first.train(1)
        beyond = first.engine.steps
        first.engine.load(tmp_path / "first")  # its own: what it has released is the more of both
        assert first.engine.steps == beyond > saved
        third = private(mlp(), table(24), sigma=1.0, batch=6)
        third.engine.load(tmp_path / "first")
        third.engine.load(tmp_path / "first")
        assert third.engine.steps == saved


def test_releases_of_another_run_are_added(tmp_path) -> None:
    check_other_runs(tmp_path)


def check_interrupted() -> None:
    """A sum on the grid that was interrupted belongs to a draw that is lost, not to the pieces that follow."""
    run = made(mlp(), exact_sums=True, max_physical_batch_size=4)
    batches = iter(run.loader)
    x, y = next(batches)
    loss = run.criterion(run.model(x), y)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridSums, "add", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
    x, y = next(batches)
    with pytest.raises(wc.ContractError, match="backward pass over this draw failed"):
        run.criterion(run.model(x), y)


def test_an_interrupted_piece_is_not_added_again() -> None:
    check_interrupted()


# -- layers of two models ----------------------------------------------------------------------------------------------


def check_two_models() -> None:
    """A layer whose products another engine collects is nobody else's."""
    shared = nn.Linear(6, 8)
    first = private(nn.Sequential(shared, nn.ReLU(), nn.Linear(8, 3)), table(24), sigma=1.0, batch=6)
    with pytest.raises(wc.ContractError, match="belongs to another private model"):
        private(nn.Sequential(shared, nn.Tanh(), nn.Linear(8, 3)), table(24), sigma=1.0, batch=6)
    first.train(1)
    first.engine.detach()
    private(nn.Sequential(shared, nn.Tanh(), nn.Linear(8, 3)), table(24), sigma=1.0, batch=6).train(1)


def test_a_layer_of_another_private_model_is_refused() -> None:
    check_two_models()


# -- a bug that was no leak --------------------------------------------------------------------------------------------


def test_prelu_trains_under_autocast() -> None:
    run = made(nn.Sequential(nn.Linear(6, 8), nn.PReLU(), nn.Linear(8, 3)))
    x, y = next(iter(run.loader))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = run.criterion(run.model(x), y)
    loss.backward()
    run.optimizer.step()
    assert run.engine.steps == 1 and bool(run.grads()["1.weight"].any())
