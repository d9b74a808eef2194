"""A private layer is the native one, but for its weight gradient."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from weightclip import nn as wnn
from weightclip.factors import Product, is_private, make_layer_plain, make_layer_private, plain_forward


def test_forward_and_input_gradient_are_native(case, made_private):
    layer = case.layer()
    twin = made_private(layer, radius=0.01, cotangent=0.01, cap=0.01, beta=0.3)
    x = case.inputs(3)
    if not case.tokens:
        x.requires_grad_()
    y, z = layer(x), twin(x)
    torch.testing.assert_close(z, y, rtol=1e-6, atol=1e-6)
    if isinstance(layer, (nn.Linear, nn.modules.conv._ConvNd, nn.Embedding)):
        assert torch.equal(y, z)
    if not case.tokens:
        d = torch.randn_like(y)
        ours, native = (torch.autograd.grad(o, x, d)[0] for o in (z, y))
        torch.testing.assert_close(ours, native, rtol=1e-5, atol=1e-6)


def test_without_limits_the_gradient_is_native(case, made_private):
    layer = case.layer()
    x = case.inputs(4)
    d = torch.randn_like(layer(x))
    native = torch.autograd.grad(layer(x), list(layer.parameters()), d)
    for product in (
        Product(),
        Product(torch.float32),
        Product(torch.float64, chunk=2),
        Product(torch.float32, chunk=3),
    ):
        twin = made_private(layer, product=product)
        ours = torch.autograd.grad(twin(x), list(twin.parameters()), d)
        for a, b in zip(ours, native, strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_in_place_operators_may_follow(case, made_private):
    layer = case.layer()
    twin = made_private(layer, cap=1.0)
    x = case.inputs(2)
    torch.testing.assert_close(torch.relu_(twin(x)), torch.relu_(layer(x)))
    twin(x).add_(1.0).relu_().sum().backward()


def test_frozen_parts_get_no_gradient(case, made_private):
    layer = case.layer()
    if len(list(layer.parameters())) < 2:
        pytest.skip("one parameter")
    for frozen, other in (("weight", "bias"), ("bias", "weight")):
        twin = made_private(layer, cap=1.0)
        getattr(twin, frozen).requires_grad_(False)
        y = twin(case.inputs(2))
        y.backward(torch.ones_like(y))
        assert getattr(twin, frozen).grad is None and getattr(twin, other).grad is not None


def test_names_types_and_state_are_native(case, made_private):
    layer = case.layer()
    twin = made_private(layer, cap=1.0)
    assert isinstance(twin, type(layer)) and is_private(twin) and not is_private(layer)
    assert list(twin.state_dict()) == list(layer.state_dict())
    assert repr(twin) == repr(layer)
    twin.load_state_dict(layer.state_dict())
    make_layer_plain(twin)
    assert type(twin) is type(layer) and not any(name.startswith("_wc") for name in twin.__dict__)
    assert list(twin.buffers()) == list(layer.buffers())


def test_copies_and_files(case, made_private):
    layer = case.layer()
    model = nn.Sequential(made_private(layer, cap=0.01, beta=0.5))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    x = case.inputs(3)
    d = torch.randn_like(layer(x))
    want = torch.autograd.grad(model(x), list(model.parameters()), d)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert is_private(twin[0]) and list(twin.state_dict()) == [f"0.{k}" for k in layer.state_dict()]
        for a, b in zip(torch.autograd.grad(twin(x), list(twin.parameters()), d), want, strict=True):
            assert torch.equal(a, b)


def test_plain_forward(case, made_private):
    twin = made_private(case.layer(), cap=1e-9)
    x = case.inputs(2)
    with plain_forward():
        y = twin(x)
    y.sum().backward()
    assert max(float(q.grad.abs().max()) for q in twin.parameters()) > 1e-3  # no cap in a plain forward


def test_transforms(case, made_private, exact):
    """vmap(grad) over single-record batches sees the same scaled per-record gradients as a loop."""
    layer = case.layer()
    twin = made_private(layer, cap=0.5, beta=0.7)
    x = case.inputs(3)
    d = torch.randn_like(layer(x))
    loop = exact(twin, x, d)
    parameters = {n: q.detach() for n, q in twin.named_parameters()}

    def loss(values, record, cotangent):
        return (torch.func.functional_call(twin, values, (record.unsqueeze(0),)) * cotangent).sum()

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, x, d)
    rows = torch.cat([found[n].flatten(1) for n in parameters], 1)
    torch.testing.assert_close(rows, loop, rtol=1e-4, atol=1e-6)


def test_double_backward(case, made_private):
    """The scaled gradient of the weights is differentiable in the input: the falsifier climbs through it."""
    if case.tokens:
        pytest.skip("token ids are not differentiable")
    twin = made_private(case.layer(torch.float64), cap=0.3, radius=2.0, cotangent=3.0)
    x = case.inputs(2, dtype=torch.float64).requires_grad_()
    weights = torch.linspace(-1, 1, twin(x).numel(), dtype=torch.float64).view_as(twin(x))

    directions = [torch.randn_like(q) for q in twin.parameters()]

    def along(v):
        gradients = torch.autograd.grad(
            (torch.tanh(twin(v)) * weights).sum(), list(twin.parameters()), create_graph=True
        )
        return sum((g * t).sum() for g, t in zip(gradients, directions, strict=True))

    (slope,) = torch.autograd.grad(along(x), x)
    step = 1e-3 * torch.randn_like(x)  # scales are float32 inside, so not smaller
    change = float((along(x + step) - along(x - step)).detach())
    assert change == pytest.approx(2 * float((slope * step).sum()), rel=2e-2, abs=1e-6)


class Mine(nn.Linear):
    """A subclass that computes what its base does."""

    extra = 1.0


class Doubled(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, input):
        return 2 * super().forward(input)


@pytest.mark.parametrize("kind", [Mine, Doubled])
def test_subclasses_stay_what_they_are(kind):
    torch.manual_seed(0)
    layer, x = kind(3, 2), torch.randn(4, 3)
    twin = copy.deepcopy(layer)
    make_layer_private(twin, cap=1e-3)
    assert isinstance(twin, kind) and repr(twin) == repr(layer) and list(twin.state_dict()) == list(layer.state_dict())
    torch.testing.assert_close(twin(x), layer(x))
    file = io.BytesIO()
    torch.save(twin, file)
    file.seek(0)
    for other in (copy.deepcopy(twin), torch.load(file, weights_only=False)):
        assert type(other) is type(twin) and is_private(other)
        torch.testing.assert_close(other(x), layer(x))
    make_layer_plain(twin)
    assert type(twin) is kind and not any(name.startswith("_wc") for name in twin.__dict__)


def test_other_norms_are_private_too(made_private):
    for layer, shape in ((wnn.SafeInstanceNorm(3, affine=True), (2, 3, 4)), (nn.LayerNorm(3, bias=False), (2, 3))):
        twin = made_private(layer, cap=0.1)
        x = torch.randn(*shape)
        torch.testing.assert_close(twin(x), layer(x))
