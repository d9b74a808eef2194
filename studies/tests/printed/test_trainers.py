"""The printed algorithms do what the paper prints, flaws included, and never call their claim an epsilon."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import norm
from torch import nn

from weightclip.accounting import _accounting as accounting
from weightclip.errors import WeightclipError
from weightclip.models import MLP
from weightclip_studies.printed import (
    PublishedDPSGD,
    PublishedLip,
    claimed_epsilon,
    clip_weights,
    dpsgd_step,
    lip_step,
    power_iteration,
    published_sensitivities,
)

TAU = math.sqrt(2)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mlp(*widths: int, seed: int = 0, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(seed)
    parts: list[nn.Module] = []
    for a, b in zip(widths, widths[1:], strict=False):
        parts += [nn.Linear(a, b, bias=bias), nn.ReLU()]
    return nn.Sequential(*parts[:-1]).double()


def blobs(n: int = 60, d: int = 5, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = generator(seed)
    y = torch.randint(0, 2, (n,), generator=g)
    X = torch.randn(n, d, generator=g, dtype=torch.double) + 2.0 * (2 * y[:, None] - 1)
    return X, y


def per_record_gradients(model: nn.Module, X: torch.Tensor, y: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    rows = []
    for x, target in zip(X, y, strict=True):
        model.zero_grad()
        nn.functional.cross_entropy(model(x[None]), target[None]).backward()
        rows.append({name: p.grad.clone() for name, p in model.named_parameters()})  # type: ignore[union-attr]
    model.zero_grad()
    return rows


def saturated_pair(ratio: float, records: int = 20) -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    """A unit-norm layer and records of norm X at the loss's full slope; the last record has norm ratio * X.

    The layer sees the first coordinate only (saturated, wrong label); the second carries the norm, and points the other
    way for the last record, so that its own contribution adds to the damage.
    """
    layer = nn.Linear(2, 2, bias=False).double()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]) / math.sqrt(2))
    X = torch.tensor([[60.0, 1e5]], dtype=torch.double).repeat(records + 1, 1)
    X[-1, 1] *= -ratio
    return layer, X, torch.ones(records + 1, dtype=torch.long)


# ---- what is printed ----------------------------------------------------------------------------------------------


def test_lip_step_follows_the_printed_formula() -> None:
    model, (X, y) = mlp(5, 4, 2), blobs(12)
    gains = clip_weights(model, 0.8, generator=generator())
    release = lip_step(model, X, y, gains=gains, tau=TAU, noise_multiplier=0.7, generator=generator())
    rows = per_record_gradients(model, X, y)
    hidden = model[1](model[0](X))
    X_k = {"0": X.norm(dim=1).max(), "2": hidden.norm(dim=1).max()}
    for name, mean in release.means.items():
        expected = sum(r[name] for r in rows) / (X_k[name[0]] * 12)
        torch.testing.assert_close(mean, expected)
    assert release.sensitivities == {
        "0": pytest.approx(TAU * gains["0"] * gains["2"]),
        "2": pytest.approx(TAU * gains["2"]),
    }
    assert release.noise_std["0"] == pytest.approx(0.7 * release.sensitivities["0"] / 12)
    assert release.batch_size == 12


def test_noise_has_the_stated_standard_deviation() -> None:
    model, (X, y) = mlp(5, 4, 2), blobs(3)
    gains = clip_weights(model, 1.0, generator=generator())
    draws, g = [], generator(1)
    for _ in range(300):
        release = lip_step(model, X, y, gains=gains, tau=TAU, noise_multiplier=2.0, generator=g)
        draws.append((release.gradients["0.weight"] - release.means["0.weight"]) / release.noise_std["0"])
    noise = torch.stack(draws).flatten()  # 6,000 standard normal draws if all is well
    assert abs(noise.mean()) < 0.06 and abs(noise.std() - 1) < 0.05


def test_dpsgd_clips_each_layer_and_accounts_for_one() -> None:
    model, (X, y) = mlp(5, 4, 2), blobs(10)
    release = dpsgd_step(model, X, y, max_gradient_norm=0.3, noise_multiplier=1.0, generator=generator())
    rows = per_record_gradients(model, X, y)
    for k in ("0", "2"):
        sizes = [math.sqrt(sum(float(r[f"{k}.{leaf}"].square().sum()) for leaf in ("weight", "bias"))) for r in rows]
        assert max(sizes) > 0.3  # otherwise nothing is clipped and the test is empty
        for leaf in ("weight", "bias"):
            expected = sum(r[f"{k}.{leaf}"] * min(1, 0.3 / s) for r, s in zip(rows, sizes, strict=True)) / 10
            torch.testing.assert_close(release.means[f"{k}.{leaf}"], expected)
        assert release.noise_std[k] == pytest.approx(0.03)


@pytest.mark.parametrize("p", [1, 2, math.inf])
def test_clip_weights_bounds_norms_and_fixed_sets_them(p: float) -> None:
    model = mlp(6, 6, 6)
    before = model[0].weight.detach().clone()
    gains = clip_weights(model, 0.5, p, power_iterations=500, generator=generator())
    assert list(gains) == ["0", "1", "2"] and gains["1"] == 1.0
    for k in (0, 2):
        assert float(torch.linalg.matrix_norm(model[k].weight.detach(), p)) == pytest.approx(0.5, rel=1e-6)
    # radial: a multiple of what it was
    assert float(torch.cosine_similarity(before.flatten(), model[0].weight.detach().flatten(), dim=0)) == pytest.approx(
        1
    )
    loose = clip_weights(model, 3.0, p, power_iterations=500, generator=generator())
    assert loose["0"] == pytest.approx(0.5, rel=1e-6)
    fixed = clip_weights(model, 3.0, p, fixed=True, power_iterations=500, generator=generator())
    assert fixed["0"] == 3.0
    assert float(torch.linalg.matrix_norm(model[0].weight.detach(), p)) == pytest.approx(3.0, rel=1e-6)


def test_bjorck_makes_the_weights_nearly_orthogonal() -> None:
    model = mlp(6, 6, 6)
    clip_weights(model, 0.5, bjorck_iterations=60, power_iterations=500, generator=generator())
    singular = torch.linalg.svdvals(model[0].weight.detach())
    assert float(singular.max()) == pytest.approx(0.5, rel=1e-3)
    assert float(singular.min()) > 0.45


def test_trainers_learn_and_keep_their_constraint() -> None:
    X, y = blobs(200)
    model = mlp(5, 8, 2)
    lip = PublishedLip(model, TAU, 2.0, 0.1, batch_size=50, learning_rate=0.05, generator=generator())
    lip.fit(X, y, steps=40)
    assert float((model(X).argmax(1) == y).double().mean()) > 0.95
    assert lip.steps == 40 and lip.sample_rate == 0.25
    assert set(lip.sensitivities) == {"0", "1", "2"}

    fixed = PublishedLip(mlp(5, 8, 2), TAU, 2.0, 1.0, fixed=True, power_iterations=200, generator=generator())
    fixed.fit(X, y, steps=3)
    assert float(torch.linalg.matrix_norm(fixed.model[0].weight.detach(), 2)) == pytest.approx(2.0, rel=1e-3)  # type: ignore[index]

    dp = PublishedDPSGD(mlp(5, 8, 2), 1.0, 0.1, batch_size=50, learning_rate=0.05, generator=generator())
    seen = []
    dp.fit(X, y, steps=40, callback=lambda t, release: seen.append((t, release.batch_size)))
    assert float((dp.model(X).argmax(1) == y).double().mean()) > 0.95
    assert [t for t, _ in seen] == list(range(40)) and len({size for _, size in seen}) > 5


def test_step_with_given_batch_updates_by_the_released_gradient() -> None:
    X, y = blobs(30)
    model = mlp(5, 2)
    lip = PublishedLip(
        model, TAU, 1e6, 1.0, batch_size=10, learning_rate=0.1, optimizer=torch.optim.SGD, generator=generator()
    )
    before = model[0].weight.detach().clone()
    release = lip.step(X, y, batch_indices=torch.arange(7))
    assert release.batch_size == 7
    torch.testing.assert_close(model[0].weight.detach(), before - 0.1 * release.gradients["0.weight"])


def test_convolutions_and_nested_chains_run() -> None:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    model = nn.Sequential(body, nn.Flatten(), nn.Linear(3 * 4 * 4, 2))
    X, y = torch.randn(40, 1, 8, 8), torch.randint(0, 2, (40,))
    lip = PublishedLip(model, TAU, 1.0, 1.0, batch_size=10, generator=generator())
    release = lip.step(X, y)
    assert set(release.sensitivities) == {"0.0", "2"}
    assert set(lip.gains) == {"0.0", "0.1", "0.2", "1", "2"}


# ---- the flaws are really there -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio, moved", [(8.7, 18.7), (2.0, 11.0), (100.0, 20.8)])
def test_flaw_1_one_added_record_rescales_everybody(ratio: float, moved: float) -> None:
    """SOUNDNESS section 2: the sum moves by |V| Delta (1 - X/X') + Delta; 18.7 Delta at |V| = 20 and X'/X = 8.7."""
    layer, X, y = saturated_pair(ratio)
    gains = {"": 1.0}
    sums = []
    for V in (slice(0, 20), slice(0, 21)):
        release = lip_step(layer, X[V], y[V], gains=gains, tau=TAU, noise_multiplier=1.0, generator=generator())
        sums.append(release.means["weight"] * release.batch_size)
    delta = release.sensitivities[""]
    distance = float((sums[1] - sums[0]).norm()) / delta
    assert distance == pytest.approx(20 * (1 - 1 / ratio) + 1, rel=1e-4)
    assert distance == pytest.approx(moved, abs=0.05)


def test_flaw_1_breaks_a_claim_of_epsilon_one() -> None:
    """One full-batch step at claimed epsilon 1, delta 1e-5: an exact threshold test proves epsilon >= 9.3."""
    sigma, delta = 4.5, 1e-5
    assert claimed_epsilon(noise_multiplier=sigma, sample_rate=1.0, steps=1, delta=delta) <= 1.0
    layer, X, y = saturated_pair(8.7)
    worlds = []
    for V in (slice(0, 20), slice(0, 21)):
        release = lip_step(layer, X[V], y[V], gains={"": 1.0}, tau=TAU, noise_multiplier=sigma, generator=generator())
        worlds.append((release.means["weight"], release.noise_std[""]))
    (mean, std), (mean_, std_) = worlds
    direction = (mean_ - mean) / (mean_ - mean).norm()
    a, b = float((mean * direction).sum()), float((mean_ * direction).sum())
    audited = max(
        math.log((norm.sf(t, b, std_) - delta) / norm.sf(t, a, std))
        for t in torch.linspace(a, b, 200).tolist()
        if norm.sf(t, b, std_) > delta
    )
    assert audited > 9.3


def test_flaw_2_layers_accounted_as_one() -> None:
    """The joint release has multiplier sigma / sqrt(K): sum of (Delta_k / s_k)^2 is K / sigma^2, not 1 / sigma^2."""
    model, (X, y) = mlp(5, 4, 4, 4, 2), blobs(9)
    gains = clip_weights(model, 1.0, generator=generator())
    for release in (
        lip_step(model, X, y, gains=gains, tau=TAU, noise_multiplier=1.3, generator=generator()),
        dpsgd_step(model, X, y, max_gradient_norm=1.0, noise_multiplier=1.3, generator=generator()),
    ):
        joint = sum((d / (9 * release.noise_std[k])) ** 2 for k, d in release.sensitivities.items())
        assert joint == pytest.approx(4 / 1.3**2)


def test_flaw_2_claimed_and_true_epsilon_of_four_layers() -> None:
    """SOUNDNESS section 2: K = 4, q = .01, T = 2000, sigma = 1: 2.58 is claimed where 18.1 is true."""
    mechanism = {"kind": "gaussian", "q": 0.01, "steps": 2000}
    claimed = accounting.epsilon([accounting.Mechanism(sigma=1.0, **mechanism)], 1e-5, accountant="pld")
    true = accounting.epsilon([accounting.Mechanism(sigma=0.5, **mechanism)], 1e-5, accountant="pld")
    assert claimed == pytest.approx(2.58, abs=0.03)
    assert true == pytest.approx(18.1, abs=0.2)


def test_flaw_3_the_product_includes_the_layer_itself() -> None:
    assert published_sensitivities({"a": 0.5, "b": 1.0, "c": 3.0}, 2.0) == {"a": 3.0, "b": 6.0, "c": 6.0}
    layer = nn.Linear(1, 2, bias=False).double()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[0.5], [-0.5]]) / math.sqrt(2))
    X, y = torch.tensor([[90.0]], dtype=torch.double), torch.tensor([1])  # wrong label, saturated: slope sqrt(2)
    release = lip_step(layer, X, y, gains=clip_weights(layer, 1.0), tau=TAU, noise_multiplier=1.0)
    assert float(release.means["weight"].norm()) / release.sensitivities[""] == pytest.approx(2.0, rel=1e-6)


def test_flaw_4_the_bias_is_not_counted() -> None:
    layer = nn.Linear(1, 2).double()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0], [-1.0]]) / math.sqrt(2))
        layer.bias.copy_(torch.tensor([40.0, -40.0]))
    X, y = torch.tensor([[0.1]], dtype=torch.double), torch.tensor([1])
    release = lip_step(layer, X, y, gains={"": 1.0}, tau=TAU, noise_multiplier=1.0)
    size = math.sqrt(sum(float(m.square().sum()) for m in release.means.values()))
    assert size / release.sensitivities[""] == pytest.approx(math.hypot(0.1, 1) / 0.1, rel=1e-6)


def test_flaw_5_the_noise_reveals_the_batch_size() -> None:
    model, (X, y) = mlp(5, 2), blobs(30)
    gains = clip_weights(model, 1.0, generator=generator())
    std = [
        lip_step(model, X[:n], y[:n], gains=gains, tau=TAU, noise_multiplier=1.0).noise_std["0"] for n in (1, 10, 30)
    ]
    assert std[0] / std[1] == pytest.approx(10) and std[0] / std[2] == pytest.approx(30)


def test_flaw_6_empty_batches_are_redrawn() -> None:
    lip = PublishedLip(mlp(5, 2), batch_size=0.05, generator=generator())
    assert lip.sample(1).tolist() == [0]  # a record that should come with probability 1/20 always comes
    assert all(len(lip.sample(4)) > 0 for _ in range(20))
    with pytest.raises(WeightclipError, match="empty"):
        lip_step(mlp(5, 2), torch.zeros(0, 5).double(), torch.zeros(0).long(), gains={}, tau=1, noise_multiplier=1)


def test_flaw_7_convolutions_without_the_root_of_the_kernel_area() -> None:
    conv = nn.Conv2d(1, 1, 3, padding=1, bias=False).double()
    with torch.no_grad():
        conv.weight.fill_(1 / 3)
    assert clip_weights(conv, 1.0)[""] == pytest.approx(1.0)
    image = torch.ones(1, 1, 32, 32, dtype=torch.double)
    assert float(conv(image).detach().norm() / image.norm()) > 2.8  # the true gain tends to 3 = sqrt(h'w')
    release = lip_step(
        nn.Sequential(conv, nn.Flatten()), image, torch.zeros(1).long(), gains={"0": 1.0, "1": 1.0}, tau=TAU,
        noise_multiplier=1.0,
    )  # fmt: skip
    assert release.input_norms["0"] == pytest.approx(32.0)  # the plain norm of the image


def test_flaw_8_power_iteration_converges_from_below() -> None:
    left = []
    for seed in range(10):
        W = torch.randn(128, 128, generator=generator(seed), dtype=torch.double)
        true = float(torch.linalg.matrix_norm(W, 2))
        found = float(power_iteration(W, 5, generator(seed + 100)))
        assert found <= true * (1 + 1e-12)
        left.append(true / found)
    assert max(left) > 1.05  # after clipping to C, a norm of more than 1.05 C remains
    assert float(power_iteration(W, 5000, generator())) == pytest.approx(true, rel=1e-4)


def test_flaw_9_layers_without_parameters_count_one() -> None:
    model = MLP(8, (8,), 2, activation=nn.GELU, group_norm=2, alpha=1 / 64)
    gains = clip_weights(model, 1.0)
    assert gains["layers.1"] == gains["layers.2"] == 1.0
    normalise = model.layers[1]
    x, step = torch.zeros(1, 8), torch.tensor([[1e-3, -1e-3, 1e-3, -1e-3] * 2])
    true = float((normalise(x + step) - normalise(x)).norm() / step.norm())
    assert true == pytest.approx(64, rel=1e-3)  # the safe normalisation's gain is 1 / alpha


# ---- naming and refusals ------------------------------------------------------------------------------------------


def test_everything_reported_is_a_claim() -> None:
    X, y = blobs(40)
    for trainer in (
        PublishedLip(mlp(5, 2), noise_multiplier=1.0, batch_size=10, generator=generator()),
        PublishedDPSGD(mlp(5, 2), noise_multiplier=1.0, batch_size=10, generator=generator()),
    ):
        assert trainer.claimed_epsilon(1e-3) == 0.0
        report = trainer.fit(X, y, steps=3).report(1e-3)
        assert not hasattr(trainer, "epsilon") and "epsilon" not in report
        expected = claimed_epsilon(noise_multiplier=1.0, sample_rate=0.25, steps=3, delta=1e-3)
        assert report["claimed_epsilon"] == expected > 0
        assert "not a guarantee" in report["note"] and "weightclip audit" in report["note"]


def test_claimed_epsilon_is_infinite_without_noise() -> None:
    assert claimed_epsilon(noise_multiplier=0, sample_rate=0.1, steps=1, delta=1e-5) == math.inf


def test_refusals_name_the_layer() -> None:
    with pytest.raises(WeightclipError, match="'1' \\(LayerNorm\\) has parameters"):
        clip_weights(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), 1.0)
    with pytest.raises(WeightclipError, match="nothing to train"):
        clip_weights(nn.Sequential(nn.ReLU()), 1.0)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.layer(x))

    with pytest.raises(WeightclipError, match="'layer' runs out of order or twice"):
        lip_step(Twice(), torch.ones(1, 2), torch.zeros(1).long(), gains={"layer": 1.0}, tau=TAU, noise_multiplier=1.0)
    lip = PublishedLip(mlp(5, 2), batch_size=5, generator=generator())
    X, y = blobs(20)
    lip.step(X, y)
    with pytest.raises(WeightclipError, match="one data set"):
        lip.step(X[:10], y[:10])
