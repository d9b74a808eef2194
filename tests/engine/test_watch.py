"""What a release must find as it was: trainable parameters; and buffers that a pass must not write."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.engine_kit import Run, mlp, private, table
from torch import Tensor, nn

import weightclip as wc


def unfreeze(run: Run) -> None:
    run.model[0].weight.requires_grad_(True)


def freeze(run: Run) -> None:
    run.model[2].bias.requires_grad_(False)


def other_type(run: Run) -> None:
    run.model.double()


@pytest.mark.parametrize(
    "change",
    [unfreeze, freeze, other_type],
)
def test_parameters_that_change_in_kind_after_make_private_are_refused(change) -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)
    run = private(model, table(8))
    x, y = next(iter(run.loader))
    change(run)
    with pytest.raises((wc.ContractError, RuntimeError)):
        run.criterion(run.model(x), y).backward()
        run.optimizer.step()
    assert run.engine.steps == 0


class Scaled(nn.Module):
    """Multiplies by a buffer, and writes to it if asked."""

    writes = False

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            self.scale.add_(x.detach().mean())
        return self.scale * self.layer(x)


def test_a_buffer_that_forward_writes_is_refused_and_a_public_schedule_is_not() -> None:
    run = private(Scaled(), table(8), sigma=1.0)
    run.train()
    run.model.load_state_dict(copy.deepcopy(run.model.state_dict()))
    run.model.scale.mul_(10)  # between passes, by a public rule: limits hold whatever it is
    run.train()
    run.model.writes = True  # type: ignore[assignment]
    with pytest.raises(wc.ContractError, match="writes buffer 'scale'"):
        run.train()
    assert run.engine.steps == 2
    copy.deepcopy(run.model)(table(8)[0])  # a copy is its owner's business


def test_training_mode_is_part_of_what_is_certified() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)).eval()
    run = private(model, table(8))
    run.train()
    quiet = run.layers()["0"]["sensitivity"]
    run.model.train()
    with torch.no_grad():
        for p, q in zip(run.model.parameters(), mlp().parameters(), strict=True):
            p.copy_(q)
    x, y = next(iter(run.loader))
    run.criterion(run.model(x), y).backward()
    loud = run.layers()["0"]["sensitivity"]
    reference = private(nn.Sequential(mlp()[0], nn.Dropout(0.5), mlp()[2]).train(), table(8)).layers()["0"][
        "sensitivity"
    ]
    assert loud == pytest.approx(reference, rel=1e-9)
    assert loud > 0 and quiet > 0
    run.optimizer.step()


def test_gradients_the_engine_does_not_know_never_enter_a_step() -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)
    run = private(model, table(8))
    x, y = next(iter(run.loader))
    run.criterion(run.model(x), y).backward()
    run.model[0].weight.grad = torch.ones_like(run.model[0].weight)
    with pytest.raises(wc.ContractError, match="not private"):
        run.optimizer.step()


def test_addresses_tell_a_transposed_weight_from_the_one_that_lay_there() -> None:
    """``p.data = p.data.transpose(...)`` counts as no write and moves nothing, but it is another layer."""
    run = private(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)), table(8))
    before = run.engine.training.watch.addresses()
    weight = run.model.get_submodule("0").weight
    assert isinstance(weight, nn.Parameter)
    weight.data = weight.data.t()
    assert run.engine.training.watch.addresses() != before


def mixing(h: Tensor) -> Tensor:
    return h - h.mean(0)


class Body(nn.Module):
    """A model whose parts have a forward that can be changed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


def _forward(model: Body, act) -> None:
    native = model.forward
    model.forward = lambda x: act(native(x))  # type: ignore[method-assign]


LATE = {
    "hook": lambda m, act: m.first.register_forward_hook(lambda _, a, out: act(out)),
    "pre-hook": lambda m, act: m.last.register_forward_pre_hook(lambda _, a: (act(a[0]),)),
    "backward hook": lambda m, act: m.last.register_full_backward_hook(lambda _, g, out: (act(g[0]),)),
    "forward": _forward,
    "hook of all modules": lambda m, act: nn.modules.module.register_module_forward_hook(
        lambda part, a, out: act(out) if part is m.first else None
    ),
}
BOUNDS = {"caps": wc.Bounds(), "certified": wc.Bounds(weight_norm=1.0, input_radius=1.0)}


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("change", LATE)
def test_hooks_and_forwards_that_come_later_are_tested(change: str, bounds: str) -> None:
    """A hook that mixes records is refused whenever it comes, and one that does not may come."""
    for act, fine in ((mixing, False), (lambda h: 0.5 * h, True)):
        run = private(Body(), table(8), bounds=BOUNDS[bounds])
        x, y = next(iter(run.loader))
        handle = LATE[change](run.model, act)
        try:
            if fine:
                run.criterion(run.model(x), y).backward()
                run.optimizer.step()
            else:
                with pytest.raises(wc.ContractError, match="mixes records"):
                    run.criterion(run.model(x), y).backward()
            assert run.engine.steps == int(fine)
        finally:
            if handle is not None:
                handle.remove()


@pytest.mark.parametrize("bounds", BOUNDS)
def test_a_hook_for_one_pass_is_tested_in_that_pass(bounds: str) -> None:
    run = private(Body(), table(8), bounds=BOUNDS[bounds])
    x, _ = next(iter(run.loader))
    run.model.first.register_forward_hook(lambda _, a, out: mixing(out))
    with pytest.raises(wc.ContractError, match="mixes records"):
        run.model(x)


def test_nothing_is_tested_twice_without_need(monkeypatch: pytest.MonkeyPatch) -> None:
    run = private(Body(), table(8), bounds=wc.Bounds())
    calls = []
    monkeypatch.setattr(run.engine.training, "test", lambda *key: calls.append(key))
    for x, y in run.loader:
        run.optimizer.zero_grad()
        run.criterion(run.model(x), y).backward()
        run.optimizer.step()
    assert calls == [] and run.engine.steps > 0


def test_the_mutant_that_trusts_later_hooks_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    from weightclip.engine._entrance import Watch

    monkeypatch.setattr(Watch, "changed", lambda self: False)
    for bounds in BOUNDS:
        with pytest.raises(pytest.fail.Exception):
            test_hooks_and_forwards_that_come_later_are_tested("hook", bounds)
