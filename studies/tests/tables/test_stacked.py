"""The study's stacks: bounds that hold for adversarial records, agreement with the engine and with the fast trainer."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import weightclip as wc
from weightclip.models import MLP
from weightclip.nn import SafeGroupNorm
from weightclip.noise._mechanisms import AdamAware, Equal
from weightclip.noise._streams import Streams
from weightclip_studies.fast_mlp import Logistic, Settings, Softmax, train_many
from weightclip_studies.fast_mlp._data import Data
from weightclip_studies.tables._stacked import (
    GroupNorm,
    StudyStack,
    normalise,
    normalise_backward,
    stacked_logits,
    train_stacked,
)

RADII = {"layer_radius": (2.0, 0.7), "cotangent_radius": (0.2, 0.3), "cap": 0.3, "bias_scale": 0.5, "input_radius": 1.5}
VARIANTS = {
    "weights": {"weight_norm": 1.5, "cap": 0.4, "bias_scale": 0.3, "input_radius": 2.0},
    "factors": RADII,
    "fix-lip": {"weight_norm": 1.2, "fix_lip": True, "cap": 0.4, "input_radius": 1.0},
    "joint": {"joint_cap": (0.5, 0.25), "bias_scale": 0.5, "input_radius": 2.0, "cap": 0.5},
}


def records(n: int = 60, d: int = 5, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, d)).astype(np.float32)
    X[: n // 3] *= 30  # far outside every radius
    X[n // 3 : n // 2] *= 1e-3
    return X, (X[:, 0] + 0.1 * rng.normal(size=n) > 0).astype(np.int64)


@pytest.mark.parametrize("norm", [None, GroupNorm(2, 0.3), GroupNorm(4, 0.02)], ids=["plain", "gn", "gn-small-alpha"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("classes", [2, 3])
def test_no_record_exceeds_its_sensitivity(variant: str, norm: GroupNorm | None, classes: int):
    X, y = records(30)
    y = y if classes == 2 else np.arange(len(y)) % 3
    objective = Logistic() if classes == 2 else Softmax(3)
    settings = Settings(hidden=(8,), batch=len(X), epochs=6, lr=0.3, **VARIANTS[variant])
    data = Data(X, y, objective, None, 1, torch.device("cpu"))
    stack = StudyStack(data, [settings], [Streams.seeded(0)], objective, [norm])
    stack.sigma, stack.noisy = stack.vector([1.0]), True
    stack.start(None)
    largest = 0.0
    for step in range(6):
        delta, scale = stack.bounds()
        for i in range(len(X)):
            parts = stack.views(stack.summed(torch.tensor([[i]]), None)[0, 0])
            beta = settings.bias_scale
            norms = [math.sqrt(float(w.square().sum() + beta**2 * b.square().sum())) for w, b in parts]
            ratios = [g / float(d) for g, d in zip(norms, delta[0, 0], strict=True)]
            used = math.hypot(*ratios) if settings.joint_cap is not None else max(ratios)
            assert used <= 1 + 1e-9
            largest = max(largest, used)
        if settings.joint_cap is None:  # jointly one Gaussian mechanism of multiplier sigma = 1
            assert float((delta / scale).square().sum()) == pytest.approx(1.0, rel=1e-6)
        else:
            assert torch.allclose(scale, delta)
        stack.step(step)
    assert largest > 0.1  # the test would see a bound that is violated: records come near


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_agrees_with_the_fast_trainer(variant: str, dtype: torch.dtype):
    X, y = records()
    settings = [
        Settings(hidden=(8,), batch=15, epochs=3, lr=lr, averaging=0.5, **VARIANTS[variant]) for lr in (0.02, 0.05)
    ]
    ours = train_stacked(X, y, settings, [None, None], [1, 2], objective=Logistic(), noise=1.0, dtype=dtype)
    theirs = train_many(X, y, settings, [1, 2], objective=Logistic(), noise=1.0)
    for a, b in zip(sum(ours, []), sum(theirs, []), strict=True):
        for (w, c), (v, d) in zip(a.weights, b.weights, strict=True):
            assert torch.allclose(w, v, atol=1e-5) and torch.allclose(c, d, atol=1e-5)


def test_pieces_of_records_change_nothing(monkeypatch):
    X, y = records()
    settings = [Settings(hidden=(8,), batch=40, epochs=3, lr=0.05, **RADII)]
    whole = train_stacked(X, y, settings, [GroupNorm(2, 0.2)], [1], objective=Logistic(), noise=0.5)
    monkeypatch.setattr("weightclip_studies.tables._stacked._PIECE", 1)  # 32 records at a time
    pieces = train_stacked(X, y, settings, [GroupNorm(2, 0.2)], [1], objective=Logistic(), noise=0.5)
    for (w, _), (v, _) in zip(whole[0][0].weights, pieces[0][0].weights, strict=True):
        assert torch.allclose(w, v, atol=1e-6)


@pytest.mark.parametrize("norm", [None, GroupNorm(2, 0.3)], ids=["plain", "gn"])
@pytest.mark.parametrize(
    ("bounds", "extra"),
    [
        (wc.Bounds(weight_norm=1.5, input_radius=2.0, bias_scale=0.5), {"weight_norm": 1.5, "input_radius": 2.0}),
        (
            wc.Bounds(
                input_radius=2.0,
                bias_scale=0.5,
                layer_radius={"first": 1.5, "last": 0.7},
                cotangent_radius={"first": 0.2, "last": 0.3},
            ),
            {"input_radius": 2.0, "layer_radius": (1.5, 0.7), "cotangent_radius": (0.2, 0.3)},
        ),
        (wc.Bounds(joint_cap=0.4, input_radius=2.0, bias_scale=0.5), {"joint_cap": 0.4, "input_radius": 2.0}),
    ],
    ids=["weights", "factors", "joint"],
)
def test_agrees_with_the_engine_without_noise(bounds: wc.Bounds, extra: dict, norm: GroupNorm | None):
    X, y = records()
    settings = Settings(hidden=(8,), batch=len(X), epochs=6, lr=0.03, bias_scale=0.5, **extra)
    objective = Logistic()
    data = Data(X, y, objective, None, 1, torch.device("cpu"))
    stack = StudyStack(data, [settings], [Streams.seeded(3)], objective, [norm])
    stack.start(None)
    middle = [SafeGroupNorm(norm.groups, 8, norm.alpha)] if norm else []
    model = torch.nn.Sequential()
    model.add_module("first", torch.nn.Linear(X.shape[1], 8))
    for i, module in enumerate([*middle, torch.nn.ReLU()]):
        model.add_module(f"middle{i}", module)
    model.add_module("last", torch.nn.Linear(8, 1))
    with torch.no_grad():
        for layer, (w, b) in zip((model.first, model.last), stack.params, strict=True):
            layer.weight.copy_(w[0, 0])
            layer.bias.copy_(b[0, 0])
    engine = wc.PrivacyEngine()
    targets = torch.as_tensor(y, dtype=torch.float32)[:, None]
    _, optimizer, loader, criterion = engine.make_private(
        module=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.03),
        data_loader=DataLoader(TensorDataset(torch.as_tensor(X), targets), batch_size=len(X)),
        criterion=torch.nn.BCEWithLogitsLoss(), noise_multiplier=0.0, bounds=bounds,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    for step, (x, t) in zip(range(6), (batch for _ in range(6) for batch in loader), strict=True):
        certificate = engine.certificate().sensitivities
        delta = stack.bounds()[0][0, 0]
        if settings.joint_cap is None:  # ours are float64, the engine's carry float32 slack: never smaller
            assert certificate["first"] >= float(delta[0]) * (1 - 1e-6)
            assert certificate["first"] == pytest.approx(float(delta[0]), rel=2e-3)
            assert certificate["last"] == pytest.approx(float(delta[1]), rel=2e-3)
        optimizer.zero_grad()
        criterion(model(x), t).backward()
        optimizer.step()
        stack.step(step)
    for layer, (w, b) in zip((model.first, model.last), stack.params, strict=True):
        assert torch.allclose(layer.weight.double(), w[0, 0], atol=1e-5)
        assert torch.allclose(layer.bias.double(), b[0, 0], atol=1e-5)


def test_group_normalisation_and_its_gradient():
    g = torch.Generator().manual_seed(0)
    z = torch.randn(7, 8, generator=g, dtype=torch.float64)
    z[0] = 0.01 * z[0]  # at the floor
    z[1] = 1.0  # a constant group: no division by zero
    z.requires_grad_()
    layer = SafeGroupNorm(2, 8, 0.3)
    expected = layer(z)
    upstream = torch.randn(7, 8, generator=g, dtype=torch.float64)
    (wanted,) = torch.autograd.grad(expected, z, upstream)
    y, divisor = normalise(z.detach(), 2, 0.3)
    assert torch.allclose(y, expected)
    assert torch.allclose(normalise_backward(upstream, y, divisor, 2, 0.3), wanted, atol=1e-10)


def test_outputs_are_those_of_the_model():
    X, y = records()
    norm = GroupNorm(4, 0.2)
    settings = Settings(hidden=(8,), batch=20, epochs=2, lr=0.05, allocation=AdamAware(), temperature=0.5, **RADII)
    run = train_stacked(X, y, [settings], [norm], [1], objective=Logistic(), noise=0.5)[0][0]
    model = MLP(X.shape[1], (8,), 1, group_norm=4, alpha=0.2)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), [p for layer in run.weights for p in layer], strict=True):
            parameter.copy_(value)
    projected = torch.as_tensor(X) * (1.5 / torch.as_tensor(X).norm(dim=1, keepdim=True)).clamp(max=1.0)
    assert torch.allclose(stacked_logits(run, norm, X), model(projected) / 0.5, atol=1e-5)


def test_a_record_that_is_not_finite_counts_zero():
    X, y = records(20)
    clean = X.copy()
    clean[3] = 0.0
    X[3, 1] = np.nan
    settings = [Settings(hidden=(8,), batch=20, epochs=3, lr=0.05, allocation=Equal(), **RADII)]
    a, b = (
        train_stacked(v, y, settings, [GroupNorm(2, 0.2)], [0], objective=Logistic(), noise=0.0)[0][0]
        for v in (X, clean)
    )
    assert all(torch.equal(w, v) for (w, _), (v, _) in zip(a.weights, b.weights, strict=True))
