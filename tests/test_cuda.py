"""What only a GPU can show: recorded bounds and kernels give the numbers of the plain path, and nothing waits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import weightclip as wc
import weightclip.factors._conv as conv
import weightclip.factors._dense as dense
from weightclip._record import Recorder
from weightclip.sampling import BatchInfo

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

BOUNDS = {
    "weights": wc.Bounds(input_radius=1.0, weight_norm=1.0, spectral=False),
    "spectral": wc.Bounds(input_radius=1.0, weight_norm=1.0),
    "factors": wc.Bounds(layer_radius=1.0, cotangent_radius=0.1),
    "both": wc.Bounds(input_radius=1.0, weight_norm=1.0, spectral=False, layer_radius=1.0, cotangent_radius=0.1),
    "joint": wc.Bounds(joint_cap=1.0),
}


def train(bounds: wc.Bounds, steps: int) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 20, 3, padding=1), nn.ReLU(), nn.Conv2d(20, 24, 3, stride=2), wc.nn.SafeGroupNorm(4, 24),
        nn.Flatten(), nn.Linear(24 * 7 * 7, 5),
    ).cuda()  # fmt: skip
    x, y = torch.randn(33, 3, 16, 16, device="cuda"), torch.randint(0, 5, (33,), device="cuda")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    engine = wc.PrivacyEngine()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=33)
    engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, criterion=nn.CrossEntropyLoss(), noise_multiplier=1.0,
        bounds=bounds, sample_rate=0.01, expected_batch_size=33, generator=torch.Generator().manual_seed(3),
    )  # fmt: skip
    found = []
    for step in range(steps):
        engine._on_batch(BatchInfo(step + 1, 0, True, None, 33))
        optimizer.zero_grad()
        engine.criterion(model(x), y).backward()
        optimizer.step()
        found.append(engine._sensitivities.cpu().clone())
    return torch.cat([p.detach().flatten() for p in model.parameters()]).cpu(), found


@pytest.mark.parametrize("name", list(BOUNDS))
def test_recorded_steps_and_kernels_change_nothing(name, monkeypatch):
    weights, sensitivities = train(BOUNDS[name], 7)
    monkeypatch.setattr(Recorder, "__call__", lambda self, key, work: work())
    for module in (conv, dense):
        monkeypatch.setattr(module, "fits", lambda *_: False)
        monkeypatch.setattr(module, "fits_scale", lambda *_: False)
    plain_weights, plain = train(BOUNDS[name], 7)
    torch.testing.assert_close(weights, plain_weights, rtol=1e-5, atol=1e-6)
    for a, b in zip(sensitivities, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0.0)
