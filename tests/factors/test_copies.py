"""Parameters outside known layers, folded rows, tied weights: released sums are those of an oracle."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from tests.factors.zoo import ZOO, Borrowed, Scale, made
from tests.oracle import Run, call, check, check_each, hostile, moves, wavy
from torch import Tensor, nn

from weightclip.errors import ContractError
from weightclip.factors import Copied, _copies, families, is_private, make_layer_plain


@pytest.mark.parametrize("name", ZOO)
def test_the_joint_cap_is_exact(name):
    check(*made(name))


@pytest.mark.parametrize("name", ZOO)
def test_caps_of_layers_are_exact(name):
    check_each(*made(name))


@pytest.mark.parametrize("name", ZOO)
def test_no_record_moves_the_sum_by_more_than_the_cap(name):
    model, batch = made(name)
    for each, cap in ((False, 0.3), (True, 0.1)):
        run = Run(model, batch, cap, each=each)
        limit = cap * (len(families(model)) ** 0.5 if each else 1)
        assert 0.9 * cap <= moves(run, hostile(batch)) <= limit * (1 + 1e-4)


@pytest.mark.parametrize("name", ["tokens", "tied", "own layers"])
def test_copies_files_and_plain_layers(name):
    model, batch = made(name)
    run = Run(model, batch, 0.1)
    file = io.BytesIO()
    torch.save(run.model.state_dict(), file)
    with torch.no_grad():
        want = model(batch)
        torch.testing.assert_close(run.model(batch), want)
        torch.testing.assert_close(copy.deepcopy(run.model)(batch), want)
    for layers in families(run.model).values():
        assert all(map(is_private, layers))
        for layer in layers:
            make_layer_plain(layer)
    assert [type(m) for m in run.model.modules()] == [type(m) for m in model.modules()]
    assert list(run.model.state_dict()) == list(model.state_dict())


def test_outside_a_pass_parameters_are_themselves():
    model, batch = made("tokens")
    run = Run(model, batch, 0.1)
    assert isinstance(run.model.token, nn.Parameter)
    with torch.no_grad():
        run.model(batch)
    assert isinstance(run.model.token, nn.Parameter)


def test_other_batch_sizes():
    for name in ("tokens", "relative positions", "windows"):
        model, batch = made(name)
        run = Run(model, batch, 1e6)
        for n in (1, 3, 6, 36):  # sizes that constants of the models have as well
            x = batch[torch.arange(n) % len(batch)]
            want = torch.autograd.grad(wavy(model(x)).sum(), list(model.parameters()))
            got = run.sums(x, wavy)
            torch.testing.assert_close(got, torch.cat([g.flatten().double() for g in want]), rtol=1e-4, atol=1e-4)


class Mixing(nn.Module):
    """The parameter meets the mean over records."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.first = nn.Parameter(torch.ones(3)), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x + torch.einsum("bd,d->", x, self.scale)


def test_an_operator_that_mixes_records_is_refused():
    run = Run(Mixing(), torch.randn(4, 3), 1.0)
    with pytest.raises(ContractError, match="records cannot be told apart"):
        run.model(torch.randn(4, 3))


def test_a_large_parameter_is_refused(monkeypatch):
    run = Run(Scale(3), torch.randn(4, 3), 1.0)
    monkeypatch.setattr(_copies, "LARGEST", 2)
    with pytest.raises(ContractError, match="'gamma' of a Scale has 3 entries.*requires_grad_"):
        run.model(torch.randn(4, 3))


def test_what_public_records_never_showed_is_refused():
    run = Run(made("tied")[0], made("tied")[1], 1.0)
    with pytest.raises(ContractError, match="rows"):
        run.sums(torch.randint(0, 11, (4,)), lambda out: out.sum(1))


def test_a_table_used_past_its_layer():
    """By default autograd reaches it, which an engine refuses; as a shared one it is limited over both uses."""
    torch.manual_seed(0)
    model, batch = Borrowed(), torch.randint(0, 7, (8, 5))
    with pytest.raises(AssertionError, match="outside its product"):
        check(model, batch)
    check(model, batch, shared=True)


def test_one_that_is_not_trained_stays_a_parameter():
    model, batch = made("tokens")
    model.token.requires_grad_(False)
    check(model, batch)


def test_bias_only_training():
    model, batch = made("relative positions")
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    check(model, batch)
    check_each(model, batch)


def test_activations_computed_again():
    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    for name in ("tokens", "own layers"):
        model, batch = made(name)
        check(Checkpointed(model), batch)


def test_copied_is_no_tensor_of_the_model():
    model, batch = made("tokens")
    run = Run(model, batch, 0.1)
    assert not any(isinstance(t, Copied) for t in (*run.model.parameters(), *run.model.buffers()))
    assert isinstance(call(run.model, batch), Tensor)
