"""The K-norm mechanism in the engine: entrywise bounds against exact gradients, its noise, its accounting."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weightclip as wc
from weightclip.accounting._accounting import Adjacency, Mechanism, epsilon
from weightclip.errors import WeightclipError
from weightclip.noise._knorm import KNorm, calibrate_epsilon0, spread

INF = math.inf


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4, bias=False), nn.ReLU(), nn.Linear(4, 3))


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 3, 2, stride=2), nn.Flatten(),
                         nn.Linear(12, 3))  # fmt: skip


class Tokens(nn.Module):
    """Embedding, a dense layer over positions, a norm with parameters (no rule of its own), a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.dense = nn.Embedding(6, 4), nn.Linear(4, 4)
        self.norm, self.head = wc.nn.SafeLayerNorm(4, alpha=0.5), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(torch.tanh(self.dense(self.embed(x)))).mean(1))


def records(kind: type | object) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    y = torch.randint(0, 3, (10,))
    if kind is Tokens:
        x = torch.randint(0, 6, (10, 5))
        x[0] = 2  # every position hits one row
        return x, y
    shape = (10, 5) if kind is dense else (10, 1, 4, 4)
    x = torch.randn(shape) * 3
    x[0] = 1.0
    x[1] = 0.0
    x[1].view(-1)[0] = 5.0  # a peak: l_inf of the input equals its l2
    return x, y


def engine_for(model: nn.Module, x: Tensor, y: Tensor, mechanism: KNorm | None, bounds: wc.Bounds, nm: float = 1.0,
               b: float | None = None):  # fmt: skip
    engine = wc.PrivacyEngine()
    parts = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), noise_multiplier=nm, bounds=bounds,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x)), criterion=nn.CrossEntropyLoss(),
        mechanism=mechanism, expected_batch_size=b or len(x), generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    return engine, *parts


def contribution(make, x: Tensor, y: Tensor, bounds: wc.Bounds, mechanism: KNorm):
    """The engine's own gradient of one record (a data set of one), without noise, layer by layer."""
    torch.manual_seed(0)
    engine, model, optimizer, loader, loss = engine_for(make(), x, y, mechanism, bounds, nm=0.0)
    for a, t in loader:
        loss(model(a), t).backward()
        optimizer.step()
    found: dict[str, list[Tensor]] = {}
    for name, p in model.named_parameters():
        path, kind = name.rsplit(".", 1)
        beta = bounds.bias_scale if kind == "bias" else 1.0
        found.setdefault(path, []).append(p.grad.double().flatten() * beta)
    return engine, {k: torch.cat(v) for k, v in found.items()}


BOUNDS = [wc.Bounds(input_radius=2.0, bias_scale=0.5), wc.Bounds(layer_radius=0.7, cotangent_radius=0.3),
          wc.Bounds(layer_cap=0.2), wc.Bounds(joint_cap=0.2)]  # fmt: skip


@pytest.mark.parametrize("p", [1, INF])
@pytest.mark.parametrize("make", [dense, conv, Tokens])
@pytest.mark.parametrize("bounds", BOUNDS)
def test_entrywise_bounds_hold_for_every_record(p, make, bounds):
    x, y = records(make)
    i = 1 if math.isinf(p) and make is not Tokens else 0  # the peak for l_inf, the flat record for l_1
    engine, gradients = contribution(make, x[i : i + 1], y[i : i + 1], bounds, KNorm(p))
    for name, bound in engine.certificate().sensitivities.items():
        assert float(torch.linalg.vector_norm(gradients[name], p)) <= bound * (1 + 1e-6)


def test_entrywise_bounds_of_one_dense_layer_are_reached():
    """||delta||_p ||(x, beta)||_p at saturated logits: the certificate wastes nothing there."""
    x, y = torch.zeros(1, 5), torch.tensor([0])
    x[0, 0] = 2.0
    bounds = wc.Bounds(input_radius=2.0)
    for p, expected in ((1, 2 * (math.sqrt(5) * 2 + 1)), (2, math.sqrt(2) * math.sqrt(5)), (INF, 1 * 2.0)):
        model = nn.Linear(5, 3)
        engine, *_ = engine_for(model, x, y, KNorm(p), bounds)
        assert engine.certificate().sensitivities[""] == pytest.approx(expected, rel=1e-3)


def test_l2_sensitivities_would_not_bound_the_l1_norm():
    """The mutant: using the Gaussian's Delta_k for p = 1."""
    x, y = records(dense)
    bounds = wc.Bounds(input_radius=2.0)
    engine, gradients = contribution(dense, x[:1], y[:1], bounds, KNorm(2))
    l2 = engine.certificate().sensitivities
    assert any(float(gradients[k].abs().sum()) > l2[k] for k in l2)


@pytest.mark.parametrize("p", [1, 2, INF])
def test_noise_is_one_joint_draw_of_the_announced_size(p):
    """Pure noise over many steps: its joint norm is Gamma(D, 1/epsilon0) distributed, entries spread as stated."""
    x, y = torch.zeros(2, 3), torch.tensor([0, 1])
    bounds, epsilon0 = wc.Bounds(layer_radius=1.0, cotangent_radius=0.3, bias_scale=0.25), 0.5
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    engine, model, *_ = engine_for(model, x, y, KNorm(p), bounds, nm=1 / epsilon0, b=1)
    deltas = list(engine.certificate().sensitivities.values())
    norms, entries = [], []
    for step in range(600):  # nothing was collected: what is released is the noise
        engine.training.release.release(engine.training.sensitivity.values, engine.streams, step)
        noise = [torch.cat([m.weight.grad.flatten(), 0.25 * m.bias.grad]).double() for m in model.children()]
        norms.append(max(float(torch.linalg.vector_norm(v, p)) / d for v, d in zip(noise, deltas, strict=True)))
        entries.append(noise[0] / deltas[0])
    d = sum(q.numel() for q in model.parameters())
    mean = sum(norms) / len(norms)
    assert mean == pytest.approx(d / epsilon0, rel=0.05)
    spread_of = spread(KNorm(p), [16, 10], epsilon0, torch.ones(2, dtype=torch.float64))[0]
    assert float(torch.stack(entries).square().mean().sqrt()) == pytest.approx(float(spread_of), rel=0.1)


def test_accounting_is_pure_and_amplified():
    x, y = records(dense)
    engine, model, optimizer, loader, loss = engine_for(dense(), x, y, KNorm(1), wc.Bounds(input_radius=1.0), nm=2.0)
    for a, t in loader:  # q = 1: one unsampled release
        loss(model(a), t).backward()
        optimizer.step()
    assert engine.mechanisms() == [Mechanism("pure", None, 1.0, 1, 0.5, label="noisy gradients (KNorm(p=1))")]
    assert engine.get_epsilon(1e-9) == pytest.approx(0.5, rel=2e-3)
    report = engine.report(1e-9)
    assert report["mechanisms"][0]["kind"] == "pure" and report["mechanisms"][0]["epsilon0"] == 0.5
    assert report["joint_multiplier"] is None
    quiet, *_ = engine_for(dense(), x, y, KNorm(1), wc.Bounds(input_radius=1.0), nm=0.0)
    quiet.steps = 1
    assert math.isinf(quiet.get_epsilon(1e-5))


def test_target_epsilon_is_kept():
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(200, 5), torch.randint(0, 3, (200,)))
    engine = wc.PrivacyEngine()
    model = dense()
    engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(data, batch_size=20), criterion=nn.CrossEntropyLoss(), target_epsilon=1.0,
        target_delta=1e-5, epochs=3, mechanism=KNorm(2),
    )  # fmt: skip
    engine.steps = 30
    assert 0.98 < engine.get_epsilon(1e-5) <= 1.0
    e0 = calibrate_epsilon0(2.0, 1e-5, 0.05, 100, "pld", Adjacency.ADD_OR_REMOVE_ONE)
    spent = [epsilon([Mechanism("pure", None, 0.05, 100, e)], 1e-5) for e in (e0, 1.01 * e0)]
    assert spent[0] <= 2.0 < spent[1]


def test_errors():
    with pytest.raises(WeightclipError, match="p must be"):
        KNorm(3)
    x, y = records(dense)
    with pytest.raises(WeightclipError, match="mechanism"):
        engine_for(dense(), x, y, KNorm(1), wc.Bounds(layer_cap=1.0, adaptive=wc.Adaptive()))


def test_checkpoint_refuses_another_mechanism(tmp_path):
    x, y = records(dense)
    engine, *_ = engine_for(dense(), x, y, KNorm(1), wc.Bounds(input_radius=1.0))
    engine.save(tmp_path / "run")
    other, *_ = engine_for(dense(), x, y, None, wc.Bounds(input_radius=1.0))
    with pytest.raises(WeightclipError, match="mechanism"):
        other.load(tmp_path / "run")
