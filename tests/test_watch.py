"""A model that is not what was certified any more is refused before anything is collected."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.engine_kit import Run, mlp, private, table
from torch import Tensor, nn

import weightclip as wc
from weightclip._watch import Watch
from weightclip.errors import ContractError


def unfreeze(run: Run) -> None:
    run.model[0].weight.requires_grad_(True)


def freeze(run: Run) -> None:
    run.model[2].bias.requires_grad_(False)


def forward_hook(run: Run) -> None:
    run.model[0].register_forward_hook(lambda m, a, out: 100 * out)


def pre_hook(run: Run) -> None:
    run.model.register_forward_pre_hook(lambda m, args: (100 * args[0],))


def backward_hook(run: Run) -> None:
    run.model[2].register_full_backward_hook(lambda m, gi, go: (100 * gi[0],))


def parameter_hook(run: Run) -> None:
    run.model[2].weight.register_hook(lambda g: 100 * g)


def new_layer(run: Run) -> None:
    run.model.add_module("3", nn.Linear(3, 3))


def replaced_layer(run: Run) -> None:
    run.model[2] = nn.Linear(8, 3)


def other_type(run: Run) -> None:
    run.model.double()


@pytest.mark.parametrize(
    "change",
    [unfreeze, freeze, forward_hook, pre_hook, backward_hook, parameter_hook, new_layer, replaced_layer, other_type],
)
def test_a_model_that_changes_after_make_private_is_refused(change) -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)
    run = private(model, table(8))
    x, y = next(iter(run.loader))
    change(run)
    with pytest.raises((wc.ContractError, RuntimeError)):
        run.criterion(run.model(x), y).backward()
        run.optimizer.step()
    assert run.engine.steps == 0


def test_a_buffer_that_changes_is_refused_and_a_reloaded_one_is_not() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)
            self.register_buffer("scale", torch.tensor(0.5))

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * self.layer(x)

    run = private(Scaled(), table(8), sigma=1.0)
    run.train()
    run.model.load_state_dict(copy.deepcopy(run.model.state_dict()))
    run.train()
    run.model.scale.mul_(10)
    with pytest.raises(wc.ContractError, match="scale"):
        run.train()


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


def test_a_hook_that_was_there_before_is_refused_at_once() -> None:
    for add in (
        lambda m: m.register_forward_hook(lambda *_: None),
        lambda m: m[0].register_forward_pre_hook(lambda *_: None),
    ):
        model = mlp()
        add(model)
        with pytest.raises(wc.ContractError, match="hook"):
            private(model, table(8))


def test_an_early_hook_is_refused() -> None:
    model = mlp()
    model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(wc.ContractError, match="before the noise"):
        private(model, table(8))


def test_addresses_tell_a_transposed_weight_from_the_one_that_lay_there() -> None:
    """``p.data = p.data.transpose(...)`` counts as no write and moves nothing, but it is another layer."""
    run = private(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)), table(8))
    before = run.engine._watch.addresses()
    weight = run.model.get_submodule("0").weight
    assert isinstance(weight, nn.Parameter)
    weight.data = weight.data.t()
    assert run.engine._watch.addresses() != before


def test_a_number_that_a_rule_has_read_must_stay() -> None:
    """Bounds that depend on no weight are kept from the first step on, and recorded ones have numbers built in."""
    cases = [
        (wc.nn.SafeLayerNorm(6, alpha=1.0), "alpha", 1e-3), (nn.LeakyReLU(0.1), "negative_slope", 50.0),
        (nn.Dropout(0.1), "p", 0.99),
    ]  # fmt: skip
    for module, name, value in cases:
        bounds = wc.Bounds(input_radius=0.1, layer_radius=5.0, cotangent_radius=2.0)
        run = private(nn.Sequential(module, nn.Linear(6, 3)), table(8), bounds=bounds).train()
        setattr(module, name, value)
        with pytest.raises(ContractError, match=f"'{name}' of module '0' changed after make_private"):
            run.train()


def test_other_attributes_may_change() -> None:
    model = mlp()
    run = private(model, table(8)).train()
    model.note, model[0]._private = 3, 4  # pyright: ignore[reportArgumentType]
    model.seen = [torch.zeros(2)]  # pyright: ignore[reportArgumentType]
    run.train()
    model.seen[0] = torch.ones(2)  # pyright: ignore[reportIndexIssue]
    assert run.train().engine.steps == 3


class Listed(nn.Module):
    """Its rule has read a list."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes, self.last = [0.5, 0.25], 7

    def forward(self, x: Tensor) -> Tensor:
        return x * self.slopes[0]


wc.register_rule(Listed, lambda op, p: wc.Effect(gains=(0.5,)))


def list_in_place(m: Listed) -> None:
    m.slopes[0] = 50.0


def list_replaced(m: Listed) -> None:
    m.slopes = [50.0, 0.25]


def number_renamed(m: Listed) -> None:
    m.other = m.__dict__.pop("last")  # the same object, at the same place


def attributes_replaced(m: Listed) -> None:
    m.__dict__ = {**m.__dict__, "last": 8}


def new_class(m: Listed) -> None:
    m.__class__ = type("Other", (Listed,), {})


def new_hook(m: Listed) -> None:
    m.register_forward_hook(lambda *_: None)


def hook_table_replaced(m: Listed) -> None:
    m._forward_pre_hooks = type(m._forward_pre_hooks)({0: lambda *_: None})


def buffer_replaced(m: Listed) -> None:
    m.register_buffer("more", torch.ones(()))


CHANGES = [list_in_place, list_replaced, number_renamed, attributes_replaced, new_class, new_hook, hook_table_replaced,
           buffer_replaced]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_a_change_is_seen_however_long_nothing_has_changed(change) -> None:
    module = Listed()
    run = private(nn.Sequential(module, nn.Linear(6, 3)), table(8)).train(3)
    change(module)
    with pytest.raises(ContractError, match="after make_private"):
        run.train()
    with pytest.raises(ContractError, match="after make_private"):  # and a refusal is not taken for a look
        run.train()
    assert run.engine.steps == 3


def test_what_is_equal_may_be_put_back() -> None:
    module = Listed()
    run = private(nn.Sequential(module, nn.Linear(6, 3)), table(8)).train(2)
    module.slopes, module.last = [0.5, 0.25], int("7")
    module.register_forward_hook(lambda *_: None).remove()
    run.model.eval()
    run.train()
    run.model.train()
    assert run.train().engine.steps == 4
    module.slopes[1] = 3.0  # of the new list
    with pytest.raises(ContractError, match="'slopes' of module '0'"):
        run.train()


def test_lists_of_tensors_on_a_container_are_nobodys_business() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    model.notes = [torch.ones(2), torch.zeros(2)]  # type: ignore[assignment]
    watch = Watch(model)
    watch.check()
    model.notes[0] = torch.zeros(3)  # type: ignore[index]
    watch.check()


def test_lists_within_lists_are_watched() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    model[0].pads = [[1, 2]]  # type: ignore[assignment]
    watch = Watch(model)
    watch.check()
    model[0].pads[0][0] = 9  # type: ignore[index]
    with pytest.raises(ContractError, match="pads"):
        watch.check()
