"""The Opacus baseline is flat-clipping DP-SGD: same numbers as by hand, hooks gone afterwards."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from weightclip.accounting import _accounting as accounting
from weightclip.errors import WeightclipError
from weightclip_studies.printed import OpacusDPSGD

pytest.importorskip("opacus")


def problem(n: int = 12) -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    return model, 3 * torch.randn(n, 4), torch.randint(0, 2, (n,))


def test_one_full_batch_step_is_flat_clipping_by_hand() -> None:
    model, X, y = problem()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    total = {name: torch.zeros_like(p) for name, p in before.items()}
    clipped = 0
    for x, target in zip(X, y, strict=True):
        model.zero_grad()
        nn.functional.cross_entropy(model(x[None]), target[None]).backward()
        g = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        size = math.sqrt(sum(float(v.square().sum()) for v in g.values()))
        clipped += size > 0.5
        for name in total:
            total[name] += g[name] * min(1, 0.5 / size)
    assert clipped > 0
    OpacusDPSGD(model, 0.5, 0.0, batch_size=12, learning_rate=0.1, optimizer=torch.optim.SGD).fit(X, y, steps=1)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name] - 0.1 * total[name] / 12, rtol=1e-4, atol=1e-6)
        assert p.grad is None


def test_poisson_steps_epsilon_and_clean_model() -> None:
    model, X, y = problem(50)
    trainer = OpacusDPSGD(model, 1.0, 1.0, batch_size=1, generator=torch.Generator().manual_seed(0))
    assert trainer.epsilon(1e-5) == 0.0
    trainer.fit(X, y, steps=60)  # batches of expected size 1: many are empty, and still count
    eps = trainer.epsilon(1e-5)
    assert 0 < eps < 5 and trainer._engine.accountant.history[0][2] == 60
    assert list(model.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert all(torch.isfinite(p).all() for p in model.parameters())
    nn.functional.cross_entropy(model(X), y).backward()
    assert not hasattr(model[0].weight, "grad_sample")
    with pytest.raises(WeightclipError, match="has been fitted"):
        trainer.fit(X, y, steps=1)


def test_epsilon_agrees_with_our_accounting() -> None:
    model, X, y = problem(40)
    trainer = OpacusDPSGD(model, 1.0, 1.2, batch_size=10).fit(X, y, steps=20)
    ours = accounting.epsilon(
        [accounting.Mechanism(kind="gaussian", sigma=1.2, q=0.25, steps=20)], 1e-5, accountant="rdp"
    )
    assert trainer.epsilon(1e-5) == pytest.approx(ours, rel=0.03)


def test_no_noise_no_epsilon() -> None:
    model, X, y = problem()
    assert OpacusDPSGD(model, 1.0, 0.0, batch_size=4).fit(X, y, steps=2).epsilon(1e-5) == math.inf
