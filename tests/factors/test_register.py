"""A user's own layer: taught in a few lines, or by a copy of its parameters for every record."""

from __future__ import annotations

import pytest
import torch
from tests.stock.kit import RECORDS, Case, check, released
from torch import Tensor, nn

import weightclip as wc
from weightclip.factors import _copies, _swap, families


class Mixed(nn.Module):
    """Features are mixed by an operator that no layer of torch uses; a table, and a scale of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(4))
        self.table, self.scale = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.arange(x.shape[1], device=x.device).remainder(3).expand(x.shape[:2])
        return (torch.einsum("btf,of->bto", x, self.weight) + self.bias + self.table[ids]) * self.scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixed, self.head = Mixed(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mixed(x)).mean(1))


def mixed(layer, products, x):
    ids = torch.arange(x.shape[1], device=x.device).remainder(3).expand(x.shape[:2])
    return (products.linear("weight", x, "bias") + products.embedding("table", ids)) * products.copy("scale")


def case() -> Case:
    torch.manual_seed(0)
    return Case(Net(), torch.randn(RECORDS, 6, 5), torch.randint(0, 3, (RECORDS,)))


@pytest.fixture
def taught():
    wc.register_layer(Mixed)(mixed)
    yield
    del _swap.FORMS[Mixed]
    _swap.forget_private_classes()


def test_a_copy_for_every_record_is_the_oracle_and_has_a_public_size(monkeypatch):
    check(case())
    monkeypatch.setattr(_copies, "LARGEST", 19)
    with pytest.raises(wc.ContractError, match=r"weight.* of a Mixed has 20 entries .*at most 19"):
        released(case(), 1.0)


def test_a_taught_layer_is_the_oracle_and_needs_no_copy(taught, monkeypatch):
    monkeypatch.setattr(_copies, "LARGEST", 4)  # the scale alone is copied
    check(case())


def test_whatever_a_taught_layer_computes_is_limited():
    """A function that computes something else, a hundred times over, moves the release by no more than the cap."""
    wc.register_layer(Mixed)(lambda layer, products, x: 100 * sum(mixed(layer, products, x) for _ in range(3)))
    try:
        one = case()
        whole = released(one, 0.05)
        for i in range(3):
            less = released(one, 0.05, [j for j in range(RECORDS) if j != i])
            assert float((whole - less).norm()) <= 0.05 * (1 + 1e-4)
    finally:
        del _swap.FORMS[Mixed]
        _swap.forget_private_classes()


def test_what_is_taught_wrongly_says_so(taught):
    with pytest.raises(wc.WeightclipError, match="not known yet"):
        wc.register_layer(nn.Linear)
    with pytest.raises(wc.WeightclipError, match="not known yet"):
        wc.register_layer(Mixed)
    _swap.FORMS[Mixed]._wc_taught = staticmethod(lambda layer, products, x: products.linear("wieght", x))
    with pytest.raises(wc.WeightclipError, match="no parameter 'wieght'"):
        released(case(), 1.0)


def test_a_parameter_past_its_products_gets_copies():
    wc.register_layer(Mixed)(lambda layer, products, x: x @ layer._parameters["weight"].t() + layer._parameters["bias"])
    try:
        check(case())  # of the layer's own forward, not of what was taught
    finally:
        del _swap.FORMS[Mixed]
        _swap.forget_private_classes()


def test_a_copied_model_and_a_plain_pass_use_the_native_forward(taught):
    model = case().model
    assert [type(m).__name__ for layers in families(model).values() for m in layers] == ["Mixed", "Linear"]
    x = torch.randn(2, 6, 5)
    torch.testing.assert_close(model(x), Net.forward(model, x))
