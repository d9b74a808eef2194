"""The transformer example: attention between layers with bounded factors trains privately, and its bounds hold."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weightclip as wc
from weightclip.errors import CertificationError

EXAMPLE = Path(__file__).parents[2] / "examples" / "transformer.py"
BOUNDS = wc.Bounds(layer_radius=2.0, cotangent_radius=0.1, bias_scale=0.5)


def encoder(**settings) -> nn.Module:
    sys.path.insert(0, str(EXAMPLE.parent))  # where the example finds its table
    spec = importlib.util.spec_from_file_location("transformer_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(EXAMPLE.parent))
    torch.manual_seed(0)
    return module.Encoder(12, **{"width": 8, "heads": 2, "depth": 1, "classes": 3, **settings})


def records(n: int = 9) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, 12, (n, 5), generator=generator)
    x[-1, :4] = 7  # the record that comes and goes repeats one token: most positions hit one row
    x[-1, 4] = 2
    return x, torch.arange(n) % 3


def private(x: Tensor, y: Tensor, sigma: float, lr: float, bounds: wc.Bounds = BOUNDS, b: float = 9):
    model = encoder()
    engine = wc.PrivacyEngine()
    parts = engine.make_private(
        module=model, optimizer=torch.optim.Adam(model.parameters(), lr=lr), noise_multiplier=sigma, bounds=bounds,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x)), criterion=wc.losses.CrossEntropy(cap=0.3),
        expected_batch_size=b, generator=torch.Generator().manual_seed(0), allocation=wc.AdamAware(),
    )  # fmt: skip
    return engine, *parts


def step(model, optimizer, loader, loss) -> dict[str, Tensor]:
    for x, y in loader:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    return {k: p.grad.detach().double().clone() for k, p in model.named_parameters()}


@pytest.mark.parametrize("bounds", [BOUNDS, wc.Bounds(joint_cap=0.1)])
def test_black_box_one_record_moves_every_layer_by_at_most_its_bound(bounds):
    x, y = records()
    engine, *parts = private(x, y, 0.0, 0.0, bounds)
    whole = step(*parts)
    _, *parts = private(x[:-1], y[:-1], 0.0, 0.0, bounds)
    fewer = step(*parts)
    found = engine.certificate().sensitivities
    assert len(found) == 8  # embedding, six dense layers, head
    total = 0.0
    for layer, bound in found.items():
        square = 0.0
        for name in (f"{layer}.weight", f"{layer}.bias"):
            if name in whole:
                beta = (bounds.of("bias_scale", layer) or 1.0) if name.endswith("bias") else 1.0
                square += float((9 * beta * (whole[name] - fewer[name])).square().sum())
        assert math.sqrt(square) <= bound
        assert square > 0
        total += square
    if bounds.joint_cap is not None:
        assert math.sqrt(total) <= max(found.values())


def test_it_learns_with_noise_and_stays_finite():
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(0, 12, (400, 5), generator=generator)
    y = (x == 3).any(1).long()
    engine, model, optimizer, loader, loss = private(x, y, 0.5, 0.02, b=400)
    for _ in range(30):
        step(model, optimizer, loader, loss)
    with torch.no_grad():
        accuracy = (model(x).argmax(1) == y).double().mean().item()
    assert accuracy > 0.8 > y.double().mean().item()
    assert 0 < engine.get_epsilon(1e-5) < math.inf
    state = engine.detach().state_dict()
    encoder().load_state_dict(state)  # keys are the plain model's


def test_weights_alone_do_not_certify_it():
    with pytest.raises(CertificationError, match="cotangent_radius"):
        wc.certify(encoder(), wc.losses.CrossEntropy(), example=records()[0], bounds=wc.Bounds(layer_radius=1.0))
