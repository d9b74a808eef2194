"""Trainers written with Opacus as its users write them: two with a defect that was reported, one without."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from weightclip.accounting._accounting import Mechanism, calibrate_sigma
from weightclip.audit import Trainer

DELTA = 1e-5


def _records(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.zeros(n, 20)  # ordinary records that move nothing
    return x, torch.zeros(n, 1)


def _with_canary(data: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([data[0], torch.full((1, 20), 10.0)]), torch.cat([data[1], torch.full((1, 1), 10.0)])


def _train(data, seed: int, *, batch: int, sigma: float, weights=None) -> list[torch.Tensor]:
    """One epoch with Opacus; everything released: the weights after every step."""
    from opacus import PrivacyEngine

    torch.manual_seed(seed)
    model = nn.Linear(20, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)  # small: the canary pulls the same way to the end
    sampler = None if weights is None else WeightedRandomSampler(weights(data), len(data[0]))
    loader = DataLoader(TensorDataset(*data), batch_size=batch, sampler=sampler)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine: Any = PrivacyEngine()  # what it returns depends on its arguments
        private, optimizer, loader = engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=sigma, max_grad_norm=1.0,
            poisson_sampling=weights is None,
        )  # fmt: skip
        states = []
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(private(x), y).backward()
            optimizer.step()
            states.append(model.weight.detach().clone())
    return states


def clean() -> Trainer:
    """All records in one batch, whose size stays the same: what Opacus claims holds."""
    sigma = calibrate_sigma(2.0, DELTA, 1.0, 1)
    base = _records(30)
    other = (torch.cat([base[0][:-1], torch.full((1, 20), 10.0)]), torch.cat([base[1][:-1], torch.full((1, 1), 10.0)]))
    return Trainer(lambda data, seed: _train(data, seed, batch=64, sigma=sigma), base, other, 2.0, DELTA,
                   (Mechanism("gaussian", sigma, 1.0, 1),), name="Opacus, one record silenced")  # fmt: skip


def divides_by_length() -> Trainer:
    """The divisor and the number of steps follow from len(dataset), which one record changes (Opacus 571, 819)."""
    sigma = calibrate_sigma(2.0, DELTA, 0.5, 2)
    base = _records(64)
    return Trainer(lambda data, seed: _train(data, seed, batch=32, sigma=sigma), base, _with_canary(base), 2.0, DELTA,
                   name="Opacus, 64 or 65 records")  # fmt: skip


def weighted_sampler() -> Trainer:
    """A record drawn far more often than the sampling rate that was accounted (Opacus 813)."""

    def weights(data):
        return (1.0 + 31.0 * (data[0][:, 0] > 0)).tolist()

    return _eighths("Opacus, weighted sampler", weights)


def poisson_sampler() -> Trainer:
    """The same run with the sampler that was accounted: what Opacus claims holds."""
    return _eighths("Opacus, Poisson sampler", None)


def _eighths(name: str, weights: Any) -> Trainer:
    """One epoch of eight steps, 64 records, one of which is silent or loud: their number is the same."""
    rate, steps, epsilon = 1 / 8, 8, 1.0
    sigma = calibrate_sigma(epsilon, DELTA, rate, steps)
    base = _records(64)
    other = (torch.cat([base[0][:-1], torch.full((1, 20), 10.0)]), torch.cat([base[1][:-1], torch.full((1, 1), 10.0)]))
    return Trainer(lambda data, seed: _train(data, seed, batch=8, sigma=sigma, weights=weights), base, other, epsilon,
                   DELTA, (Mechanism("gaussian", sigma, rate, steps),), name=name)  # fmt: skip
