"""The law of the noise, read from p.grad after step() and from report()."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from tests.engine_kit import Run, difference, mlp, private, same_bits, table
from torch import Tensor, nn

import weightclip as wc

ALLOCATIONS = [wc.Equal(), wc.LeastVariance(), wc.AdamAware(), wc.Global()]


def wide_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 60), nn.ReLU(), nn.Linear(60, 40), nn.ReLU(), nn.Linear(40, 3))


def one_step(run: Run) -> dict[str, Tensor]:
    run.train()
    return run.grads()


def noise_of(seed: int | None = 0, sigma: float = 2.0, data=None, make=wide_net, **settings) -> tuple[Run, dict]:
    """The noise alone: the release minus the one without noise, at the same weights, in the sum over records."""
    data = data or table(16)
    with_noise = private(make(), data, sigma=sigma, seed=seed, **settings)
    without = private(make(), data, sigma=0.0, seed=seed, **settings)
    moved = difference(one_step(with_noise), one_step(without))
    return with_noise, {name: value.double() * with_noise.batch for name, value in moved.items()}


@pytest.mark.parametrize("allocation", ALLOCATIONS, ids=lambda a: type(a).__name__)
def test_each_layers_standard_deviation_is_the_reported_one(allocation) -> None:
    beta, sigma = 0.25, 3.0
    run = private(
        wide_net(), table(16), sigma=sigma, allocation=allocation, bounds=wc.Bounds(input_radius=1.0, bias_scale=beta)
    )
    scales = {row["name"]: row["noise"] for row in run.engine.report()["layers"]}  # at the weights of the first step
    _, noise = noise_of(sigma=sigma, allocation=allocation, bounds=wc.Bounds(input_radius=1.0, bias_scale=beta))
    for layer, s in scales.items():
        parts = [noise[f"{layer}.weight"].flatten() / s, noise[f"{layer}.bias"].flatten() / (s / beta)]
        for part in [*parts, torch.cat(parts)]:
            statistic, d = float(part.square().sum()), part.numel()
            assert 1e-4 < stats.chi2.cdf(statistic, d) < 1 - 1e-4, (layer, statistic, d)
    everything = torch.cat(
        [(noise[f"{k}.{kind}"] / (s if kind == "weight" else s / beta)).flatten()
         for k, s in scales.items() for kind in ("weight", "bias")]
    )  # fmt: skip
    assert stats.kstest(everything.numpy(), "norm").pvalue > 1e-4


@pytest.mark.parametrize("allocation", ALLOCATIONS, ids=lambda a: type(a).__name__)
@pytest.mark.parametrize("bounds", [wc.Bounds(input_radius=1.0), wc.Bounds(layer_cap=0.1, bias_scale=3.0)], ids=repr)
def test_shares_of_the_layers_add_up_to_one_multiplier(allocation, bounds: wc.Bounds) -> None:
    sigma = 1.7
    run = private(wide_net(), table(16), sigma=sigma, allocation=allocation, bounds=bounds)
    for _ in range(2):
        report = run.engine.report()
        total = sum((row["sensitivity"] / row["noise"]) ** 2 for row in report["layers"])
        assert total == pytest.approx(sigma**-2, rel=1e-6)
        assert report["joint_multiplier"] == pytest.approx(sigma, rel=1e-6)
        run.train()


def test_a_layer_that_cannot_move_still_gets_its_share() -> None:
    model = mlp()
    nn.init.zeros_(model[2].weight)  # nothing flows back to the first layer: its sensitivity would be 0
    run = private(model, table(8), sigma=1.5)
    rows = run.layers()
    assert rows["0"]["noise"] > 0
    total = sum((row["sensitivity"] / row["noise"]) ** 2 for row in rows.values())
    assert total == pytest.approx(1.5**-2, rel=1e-6)
    run.train()
    assert run.grads()["0.weight"].abs().max() > 0


def test_the_joint_cap_is_one_mechanism_over_all_layers() -> None:
    bounds = wc.Bounds(joint_cap={"0": 0.5, "2": 0.2, "4": 0.1})
    run = private(wide_net(), table(8), sigma=2.0, bounds=bounds)
    rows = run.layers()
    assert run.engine.report()["joint_multiplier"] == pytest.approx(2.0, rel=1e-6)
    for name, t in bounds.joint_cap.items():
        assert rows[name]["noise"] == pytest.approx(2.0 * t, rel=1e-3)  # s_k = sigma t_k and the rounding slack
        assert rows[name]["noise"] >= 2.0 * t
    _, noise = noise_of(sigma=2.0, bounds=bounds)
    for name in rows:
        d = noise[f"{name}.weight"].numel()
        statistic = float((noise[f"{name}.weight"] / rows[name]["noise"]).square().sum())
        assert 1e-4 < stats.chi2.cdf(statistic, d) < 1 - 1e-4


def test_seeded_noise_never_meets_two_different_sums() -> None:
    _, a = noise_of(seed=1)
    _, same = noise_of(seed=1)
    _, other = noise_of(seed=2)
    assert same_bits(a, same)
    assert all(not torch.equal(a[k], other[k]) for k in a)
    _, fewer = noise_of(seed=1, data=table(15), batch=16, sample_rate=1.0)
    _, more = noise_of(seed=1, data=table(16), batch=16, sample_rate=1.0)
    for k in ("0.weight", "2.weight"):
        assert abs(float(torch.corrcoef(torch.stack([fewer[k].flatten(), more[k].flatten()]))[0, 1])) < 0.2


def test_steps_have_independent_noise() -> None:
    data = table(8)
    model = nn.Linear(6, 400)
    nn.init.zeros_(model.weight)
    bounds = wc.Bounds(layer_radius=1.0, cotangent_radius=1.0)
    silent = (torch.zeros_like(data[0]), data[1])
    run = private(model, silent, sigma=1.0, bounds=bounds, optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    draws = []
    for _ in range(3):
        run.train()
        draws.append(run.grads()["weight"].flatten().double())  # inputs are zero: the weights' release is noise alone
    for i in range(3):
        for j in range(i):
            r = float(torch.corrcoef(torch.stack([draws[i], draws[j]]))[0, 1])
            assert abs(r) < 5 / math.sqrt(draws[0].numel())


def test_secure_noise_differs_between_runs_and_says_so() -> None:
    first, a = noise_of(seed=None, make=mlp)
    _, b = noise_of(seed=None, make=mlp)
    assert all(not torch.equal(a[k], b[k]) for k in a)
    assert first.engine.report()["secure_noise"] is True
    assert private(mlp(), table(4)).engine.report()["secure_noise"] is False


def test_draws_belong_to_settings_and_not_to_the_data() -> None:
    draws = [
        [x.clone() for x, _ in private(mlp(), table(64), sigma=s, batch=8).train().loader] for s in (1.0, 1.0, 5.0)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*draws[:2], strict=True))
    assert any(a.shape != b.shape or not torch.equal(a, b) for a, b in zip(*draws[1:], strict=True))
    few, many = (private(mlp(), table(n), sigma=1.0, batch=8, sample_rate=0.25) for n in (32, 33))
    for (x, _), (z, _) in zip(few.loader, many.loader, strict=True):
        assert abs(len(x) - len(z)) <= 1  # the new record comes or stays away; the others are drawn as before


def test_the_divisor_is_the_public_batch_size() -> None:
    releases = {}
    for n in (8, 12):
        run = private(mlp(), table(n), batch=32, sample_rate=1.0)
        run.train()
        releases[n] = run.batch
    assert releases == {8: 32.0, 12: 32.0}
    x, y = (one_step(private(mlp(), table(8), expected_batch_size=size)) for size in (4, 16))
    for k in x:
        torch.testing.assert_close(x[k], 4 * y[k], rtol=1e-6, atol=1e-7)
