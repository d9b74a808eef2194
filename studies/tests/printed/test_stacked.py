"""Stacked runs of the printed algorithm are the single runs, side by side."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from weightclip_studies.printed import (
    clip_weights,
    dpsgd_step,
    lip_step,
    stacked_clip_weights,
    stacked_dpsgd_step,
    stacked_lip_step,
    stacked_poisson,
)

TAU = math.sqrt(2)
R = 4


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def networks() -> list[nn.Sequential]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)).double() for _ in range(R)]


def stack(models: list[nn.Sequential]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    weights = [torch.stack([m[k].weight.detach() for m in models]) for k in (0, 2)]
    return weights, [torch.stack([m[k].bias.detach() for m in models]) for k in (0, 2)]


@pytest.mark.parametrize("fixed", [False, True])
def test_stacked_step_is_each_single_step(fixed: bool) -> None:
    models = networks()
    weights, biases = stack(models)
    C = torch.tensor([0.3, 0.6, 1.0, 50.0], dtype=torch.double)
    gains = stacked_clip_weights(weights, biases, C, fixed=fixed, power_iterations=400, generator=generator())
    X, y = torch.randn(60, 5, dtype=torch.double), torch.randint(0, 3, (60,))
    indices, mask = stacked_poisson(60, torch.tensor([0.05, 0.2, 0.5, 1.0]), generator(1))
    assert len(set(mask.sum(1).tolist())) > 2
    grads_w, grads_b = stacked_lip_step(
        weights, biases, X[indices], y[indices], mask, gains=gains, tau=TAU, noise_multiplier=0.0
    )
    for r, model in enumerate(models):
        single = clip_weights(model, float(C[r]), fixed=fixed, power_iterations=400, generator=generator(r))
        assert gains[r].tolist() == pytest.approx([single["0"], single["2"]], rel=1e-6)
        batch = indices[r][mask[r]]
        means = lip_step(model, X[batch], y[batch], gains=single, tau=TAU, noise_multiplier=0.0).means
        for k, name in enumerate(("0", "2")):
            torch.testing.assert_close(weights[k][r], model[int(name)].weight.detach(), rtol=1e-5, atol=1e-8)
            torch.testing.assert_close(grads_w[k][r], means[f"{name}.weight"], rtol=1e-5, atol=1e-8)
            torch.testing.assert_close(grads_b[k][r], means[f"{name}.bias"], rtol=1e-5, atol=1e-8)


def test_stacked_step_of_algorithm_2_is_each_single_step() -> None:
    models = networks()
    weights, biases = stack(models)
    C = torch.tensor([0.1, 0.5, 1.0, 50.0], dtype=torch.double)  # some clip all records, the last none
    X, y = torch.randn(60, 5, dtype=torch.double), torch.randint(0, 3, (60,))
    indices, mask = stacked_poisson(60, torch.tensor([0.05, 0.2, 0.5, 1.0]), generator(1))
    quiet = torch.zeros(R, dtype=torch.double)
    found = stacked_dpsgd_step(
        weights, biases, X[indices], y[indices], mask, max_gradient_norm=C, noise_multiplier=quiet
    )
    for r, model in enumerate(models):
        batch = indices[r][mask[r]]
        means = dpsgd_step(model, X[batch], y[batch], max_gradient_norm=float(C[r]), noise_multiplier=0.0).means
        for k, name in enumerate(("0", "2")):
            torch.testing.assert_close(found[0][k][r], means[f"{name}.weight"], rtol=1e-5, atol=1e-8)
            torch.testing.assert_close(found[1][k][r], means[f"{name}.bias"], rtol=1e-5, atol=1e-8)
    sigma = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.double)
    still = [torch.zeros_like(w) for w in weights], [torch.zeros_like(b) for b in biases]
    x, t, all_of_them = X[: R * 2].view(R, 2, 5), y[: R * 2].view(R, 2), torch.ones(R, 2, dtype=torch.bool)
    noisy = [
        stacked_dpsgd_step(
            *still, x, t, all_of_them, max_gradient_norm=C, noise_multiplier=sigma, generator=generator(s)
        )
        for s in range(300)
    ]
    draws = torch.stack([step[0][0] for step in noisy])  # weights of zero: the first layer gets nothing but noise
    torch.testing.assert_close(draws.std(dim=(0, 2, 3)), sigma * C / 2, rtol=0.05, atol=0)


def test_noise_follows_each_runs_printed_scale() -> None:
    weights, biases = stack(networks())
    gains = stacked_clip_weights(weights, biases, 0.5, fixed=True, generator=generator())
    X, y = torch.zeros(R, 2, 5, dtype=torch.double), torch.zeros(R, 2, dtype=torch.long)
    sigma = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.double)
    mask, g = torch.ones(R, 2, dtype=torch.bool), generator(3)
    draws = torch.stack(
        [
            stacked_lip_step(weights, biases, X, y, mask, gains=gains, tau=TAU, noise_multiplier=sigma, generator=g)[0][
                0
            ]
            for _ in range(200)
        ]
    )  # zero inputs: the first layer's weights get nothing but noise
    expected = sigma * TAU * 0.25 / 2  # sigma * tau * c_1 c_2 / |V|
    torch.testing.assert_close(draws.std(dim=(0, 2, 3)), expected, rtol=0.05, atol=0)


def test_poisson_batches_are_padded_and_never_empty() -> None:
    rate = torch.tensor([0.01, 0.3, 0.9])
    sizes = torch.zeros(3)
    g = generator()
    for _ in range(300):
        indices, mask = stacked_poisson(40, rate, g)
        assert mask.any(1).all() and indices.shape == mask.shape
        for r in range(3):
            chosen = indices[r][mask[r]]
            assert len(set(chosen.tolist())) == len(chosen)
        sizes += mask.sum(1) / 300
    assert float(sizes[1]) == pytest.approx(12, rel=0.05) and float(sizes[2]) == pytest.approx(36, rel=0.03)
    # mean of Binomial(40, .01) given that it is not 0: flaw 6 triples the rate
    assert float(sizes[0]) == pytest.approx(0.4 / (1 - 0.99**40), rel=0.1)
