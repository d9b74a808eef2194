"""Every optimiser of torch, its variants, parameter groups and schedules."""

from __future__ import annotations

import inspect

import pytest
import torch
from tests.engine_kit import mlp, private, table
from torch import nn

import weightclip as wc

REFUSED = {"LBFGS", "SparseAdam", "Optimizer"}  # several losses a step; sparse gradients; the abstract base
ALL = sorted(
    name for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and name not in REFUSED
)  # fmt: skip


def biasless() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 3, bias=False))


@pytest.mark.parametrize("name", ALL)
def test_every_optimiser_steps_on_the_release(name: str) -> None:
    """The private run moves weights exactly as the same optimiser would on the released gradients."""
    make = biasless if name == "Muon" else mlp  # Muon takes matrices alone
    run = private(make(), table(8), sigma=1.0, optimizer=lambda p: getattr(torch.optim, name)(p, lr=0.05))
    twin = make()
    mirror = getattr(torch.optim, name)(twin.parameters(), lr=0.05)
    for _ in range(3):
        run.train()
        for p, q in zip(run.model.parameters(), twin.parameters(), strict=True):
            assert p.grad is not None
            q.grad = p.grad.clone()
        mirror.step()
    assert run.engine.steps == 3
    for p, q in zip(run.model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "settings", [{"foreach": True}, {"foreach": False}, {"fused": True}, {"amsgrad": True}, {"maximize": True}], ids=str
)
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_implementations_agree(name: str, settings: dict) -> None:
    if name == "SGD" and "amsgrad" in settings:
        settings = {"momentum": 0.9, "nesterov": True}
    kind = getattr(torch.optim, name)
    reference = {k: v for k, v in settings.items() if k not in ("foreach", "fused")}
    runs = [
        private(
            mlp(), table(8), sigma=1.0, pinned=0, optimizer=lambda p, s=s: kind(p, lr=0.05, weight_decay=0.1, **s)
        ).train(3)
        for s in (settings, reference)
    ]
    for k, v in runs[0].weights().items():
        torch.testing.assert_close(v, runs[1].weights()[k], rtol=1e-5, atol=1e-6)


def test_fused_settings_survive_the_engine() -> None:
    run = private(mlp(), table(8), optimizer=lambda p: torch.optim.Adam(p, fused=True))
    run.engine.detach()
    assert run.optimizer._step_supports_amp_scaling is True
    run = private(mlp(), table(8), optimizer=lambda p: torch.optim.Adam(p))
    run.engine.detach()
    assert not hasattr(run.optimizer, "_step_supports_amp_scaling")


def test_parameter_groups_and_frozen_parameters() -> None:
    model = mlp()
    model[0].bias.requires_grad_(False)
    frozen = model[0].bias.clone()
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters(), "lr": 0.5}]
    run = private(model, table(8), sigma=1.0, optimizer=lambda p: torch.optim.SGD(groups, lr=1.0))
    before = run.weights()
    run.train()
    after = run.weights()
    assert torch.equal(before["0.weight"], after["0.weight"]) and torch.equal(after["0.bias"], frozen)
    torch.testing.assert_close(before["2.weight"] - after["2.weight"], 0.5 * run.model[2].weight.grad)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 4),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=6, cycle_momentum=False),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)),
    ],
    ids=["step", "cosine", "one cycle", "lambda"],
)
def test_learning_rate_schedules(schedule) -> None:
    run = private(mlp(), table(8), sigma=1.0, optimizer=lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.0))
    plan = schedule(run.optimizer)
    rates = []
    for _ in range(3):
        before = run.weights()
        rate = run.optimizer.param_groups[0]["lr"]
        run.train()
        plan.step()
        rates.append(rate)
        torch.testing.assert_close(
            before["2.bias"] - run.weights()["2.bias"], rate * run.grads()["2.bias"], rtol=1e-4, atol=1e-6
        )
    assert len(set(rates)) == 3


def test_weight_decay_is_applied_once_a_step_and_needs_no_budget() -> None:
    run = private(mlp(), table(8), optimizer=lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.5))
    before = run.weights()
    run.train()
    for name, g in run.grads().items():
        torch.testing.assert_close(
            run.weights()[name], before[name] - 0.1 * (g + 0.5 * before[name]), rtol=1e-5, atol=1e-6
        )


def test_averaged_models_follow_released_weights_alone() -> None:
    run = private(mlp(), table(8), sigma=1.0)
    average = torch.optim.swa_utils.AveragedModel(run.model)
    history = []
    for _ in range(3):
        run.train()
        average.update_parameters(run.model)
        history.append(run.weights())
    for name, value in average.module.named_parameters():
        torch.testing.assert_close(value.detach(), torch.stack([h[name] for h in history]).mean(0))
    with torch.no_grad():
        assert average(table(8)[0]).shape == (8, 3)


def test_an_optimiser_written_by_the_user_works() -> None:
    class SignDescent(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.add_(p.grad.sign(), alpha=-group["lr"])

    run = private(mlp(), table(8), sigma=1.0, optimizer=SignDescent, max_physical_batch_size=4)
    before = run.weights()
    run.train()
    assert run.engine.steps == 1
    torch.testing.assert_close(run.weights()["0.weight"], before["0.weight"] - 0.1 * run.grads()["0.weight"].sign())


def test_the_refused_ones_say_why() -> None:
    for name, why in (("LBFGS", "several times"), ("SparseAdam", "sparse gradients")):
        with pytest.raises(wc.WeightclipError, match=why):
            private(mlp(), table(8), optimizer=lambda p, name=name: getattr(torch.optim, name)(list(p)))
