"""Every known way in which user code broke the guarantee is closed: limited at the product, or refused with the fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine_kit import Run, mlp, private, table
from tests.holes import CERTIFIED, HOLES, Net, moved, usual
from torch import Tensor, nn

import weightclip as wc

BOUNDS = {
    "certified": CERTIFIED,
    "radii": wc.Bounds(layer_radius=1.0, cotangent_radius=0.1),
    "cap": wc.Bounds(layer_cap=0.5),
    "default": wc.Bounds(),
    "joint cap by name": wc.Bounds(joint_cap={"first": 1e4, "last": 0.1}),
}


@pytest.mark.filterwarnings("ignore:.*attribute", "ignore:.*should not be instantiated")
@pytest.mark.parametrize("name", HOLES)
def test_one_record_moves_a_release_by_no_more_than_its_noise_is_scaled_for(name: str) -> None:
    make, step = HOLES[name]
    assert moved(make, step) <= 1 + 1e-4


@pytest.mark.filterwarnings("ignore:.*attribute")
@pytest.mark.parametrize("bounds", list(BOUNDS)[1:])
@pytest.mark.parametrize("name", ["float", "hook on an activation", "hook for one pass", "more uses than certified"])
def test_the_same_under_other_limits(name: str, bounds: str) -> None:
    make, step = HOLES[name]
    assert moved(make, step, BOUNDS[bounds]) <= 1 + 1e-4


# -- what is refused ---------------------------------------------------------------------------------------------------


class Folded(Net):
    """Positions folded into the batch for a layer, after make_private."""

    fold = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.fold:
            return self.last(torch.relu(self.first(x)))
        h = torch.relu(self.first(x))
        h = self.last(h.unsqueeze(1).expand(-1, 4, -1).flatten(0, 1))
        return h.unflatten(0, (-1, 4)).sum(1)


def folded(run: Run, x: Tensor, y: Tensor) -> None:
    run.model.fold = True  # type: ignore[assignment]
    usual(run, x, y)


class Tied(Net):
    """Uses a parameter beside its layer, once asked to."""

    tied = False

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        return F.linear(h, 8 * self.last.weight) if self.tied else self.last(h)


def tied(run: Run, x: Tensor, y: Tensor) -> None:
    run.model.tied = True  # type: ignore[assignment]
    usual(run, x, y)


class Penalised(Net):
    """A gradient penalty inside forward, once asked to."""

    penalty = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.penalty:
            return self.last(torch.relu(self.first(x)))
        x = x.detach().requires_grad_()
        z = self.last(torch.relu(self.first(x)))
        (g,) = torch.autograd.grad(z.sum(), x, create_graph=True)
        return z + g.square().sum(1, keepdim=True)


def penalised(run: Run, x: Tensor, y: Tensor) -> None:
    run.model.penalty = True  # type: ignore[assignment]
    usual(run, x, y)


def multiple_of_the_parameters(run: Run, x: Tensor, y: Tensor) -> None:
    eight = {k: 8 * p for k, p in run.model.named_parameters()}
    run.criterion(torch.func.functional_call(run.model, eight, (x,)), y).backward()


def two_backward_passes(run: Run, x: Tensor, y: Tensor) -> None:
    loss = run.criterion(run.model(x), y)
    loss.backward(retain_graph=True)
    loss.backward()


def bytes_instead_of_floats(run: Run, x: Tensor, y: Tensor) -> None:
    usual(run, (x * 50).to(torch.uint8), y)


REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "positions folded into the batch": (Folded, folded, "records on dimension 0"),
    "tied weights, a view or a multiple": (Tied, tied, "outside its private layer"),
    "gradient penalty": (Penalised, penalised, "create_graph"),
    "functional_call with other weights": (Net, multiple_of_the_parameters, "in place of its parameter"),
    "two backward passes": (Net, two_backward_passes, "twice"),
    "integer records": (Net, bytes_instead_of_floats, "integers"),
}


@pytest.mark.parametrize("bounds", ["certified", "default"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_no_limit_can_cover_is_refused_and_releases_nothing(name: str, bounds: str) -> None:
    make, act, match = REFUSED[name]
    run = private(make(), table(8), bounds=BOUNDS[bounds], sigma=1.0)
    before = run.weights()
    x, y = next(iter(run.loader))
    with pytest.raises(wc.ContractError, match=match) as error:
        act(run, x, y)
    assert "\n" not in str(error.value)
    assert all(p.grad is None for p in run.model.parameters())
    assert all(torch.equal(before[k], v) for k, v in run.weights().items()) and run.engine.steps == 0


# -- models that mix records -------------------------------------------------------------------------------------------


class Branch(Net):
    def between(self, h: Tensor) -> Tensor:
        return h * 40 if h.shape[0] == 1 else h


class Mean(Net):
    def between(self, h: Tensor) -> Tensor:
        return h - _mean(h)


class Memory(Net):
    """Keeps what an earlier batch left in a Python attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.bank: list[Tensor] = []

    def between(self, h: Tensor) -> Tensor:
        h = h + _last(self.bank)
        self.bank = [h.detach().mean()]
        return h


class Running(Net):
    """A running mean in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def between(self, h: Tensor) -> Tensor:
        _update(self.mean, h)
        return h


@torch.library.custom_op("weightclip_tests::mean", mutates_args=())
def _mean(h: Tensor) -> Tensor:
    """Opaque to the graph."""
    return h.mean(0, keepdim=True).expand_as(h).clone()


_mean.register_fake(lambda h: torch.empty_like(h))
_mean.register_autograd(lambda ctx, g: _mean(g))


def _last(bank: list[Tensor]) -> Tensor | float:
    return bank[0] if bank else 0.0


def _update(mean: Tensor, h: Tensor) -> None:
    if not torch.compiler.is_compiling():
        mean.mul_(0.9).add_(0.1 * h.detach().mean(0))


wc.register_rule(torch.ops.weightclip_tests.mean, lambda op, p: wc.Effect(gains=(1.0,)))


@pytest.mark.filterwarnings("ignore:.*attribute")
@pytest.mark.parametrize("bounds", ["certified", "default"])
@pytest.mark.parametrize("make", [Branch, Mean, Memory, Running])
def test_models_that_mix_records_are_refused_before_training(make, bounds: str) -> None:
    model = make()
    state = {k: v.clone() for k, v in model.state_dict().items() if k != "mean"}
    with pytest.raises(wc.WeightclipError):
        private(model, table(8), bounds=BOUNDS[bounds])
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in state.items())
    assert type(model.first) is nn.Linear


def test_an_honest_model_passes_at_every_size() -> None:
    for batch in (1, 2, 7, 64):
        private(mlp(), table(64), batch=batch, bounds=wc.Bounds())
