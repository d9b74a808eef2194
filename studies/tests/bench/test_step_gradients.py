"""What the timed steps release without noise is what their modes are called after, computed record by record here."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weightclip as wc
from weightclip_studies import bench as _bench
from weightclip_studies.bench import _step

RECORDS = 8
MODES = ("factors", "exact-cap", "exact-joint-cap")


@pytest.fixture(autouse=True)
def confident(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some records hardly err: where every record exceeds every limit, caps and radii of the network are the same."""
    usual = _bench.models()["mlp"]

    def factory() -> nn.Module:
        model = usual.factory()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(3)
        return model

    for module in (_step, _bench):
        monkeypatch.setattr(module, "models", lambda: {"mlp": dataclasses.replace(usual, factory=factory)})


def released(mode: str, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Weight and bias of each layer, of one step of the benchmark whose noise is zero."""
    made: list[Any] = []

    class Quiet(wc.PrivacyEngine):
        def make_private(self, **settings: Any) -> Any:
            made.append(super().make_private(**{**settings, "noise_multiplier": 0.0}))
            return made[-1]

    monkeypatch.setattr(_step, "PrivacyEngine", Quiet)
    _bench.prepare(mode, "mlp", RECORDS, torch.device("cpu"))()
    found = [p.grad for p in made[0][0].parameters()]
    assert all(g is not None for g in found)
    return [RECORDS * g.double() for g in found]


def by_record(mode: str) -> list[Tensor]:
    """The same sums from the gradient of one record at a time."""
    torch.manual_seed(0)
    timed = _bench.models()["mlp"]
    model = timed.factory()
    x, y = timed.batch(RECORDS, torch.device("cpu"))
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    seen: dict[nn.Module, Tensor] = {}
    for layer in layers:
        layer.register_forward_hook(lambda m, args, out: seen.__setitem__(m, args[0].detach()))
    sums = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    for i in range(RECORDS):
        loss = nn.functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        own = [g.double() for g in torch.autograd.grad(loss, list(model.parameters()))]
        norms = [(own[2 * k].square().sum() + own[2 * k + 1].square().sum()).sqrt() for k in range(len(layers))]
        whole = torch.stack(norms).square().sum().sqrt()
        for k, layer in enumerate(layers):
            cotangent = own[2 * k + 1].norm()  # the bias' gradient, with one position
            factor = (seen[layer].double().square().sum() + 1).sqrt()
            scale = {
                "factors": (1 / factor).clamp(max=1) * (0.1 / cotangent).clamp(max=1),
                "exact-cap": (0.1 / norms[k]).clamp(max=1),
                "exact-joint-cap": (1 / whole).clamp(max=1),
            }[mode]
            for place in (2 * k, 2 * k + 1):
                sums[place] += scale * own[place]
    return sums


@pytest.mark.parametrize("mode", MODES)
def test_a_timed_step_releases_what_its_mode_says(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for got, want in zip(released(mode, monkeypatch), by_record(mode), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("mode,other", [("exact-cap", "factors"), ("factors", "exact-cap"), ("exact-cap", "weights"),
                                        ("exact-joint-cap", "exact-cap")])  # fmt: skip
def test_another_modes_gradients_are_told_apart(mode: str, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = _step.bounds_of
    monkeypatch.setattr(_step, "bounds_of", lambda name: real(other if name == mode else name))
    want, found = by_record(mode), released(mode, monkeypatch)
    apart = sum(float((a - b).norm()) for a, b in zip(found, want, strict=True))
    assert apart > 0.1 * sum(float(b.norm()) for b in want)
