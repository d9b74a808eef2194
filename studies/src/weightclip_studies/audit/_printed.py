"""The printed algorithm (`weightclip_studies.printed`) caught: all at once, each flaw of SOUNDNESS section 2 alone.

Every case runs the algorithm's own step on two neighbouring batches. Given the batch, what it releases is Gaussian with
mean and noise known from that step, so releases are drawn from this law by the hundred thousand and told apart by their
exact log-likelihood ratio. To show a flaw alone, the others are kept out of the case (one layer, no bias, equal input
norms, sums instead of averages); the noise always claims epsilon = 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from weightclip import nn as wnn
from weightclip.accounting import calibrate_sigma
from weightclip.audit import Caught, Records, claimed_curve, compare, joined, repeated
from weightclip_studies import printed as published

TAU = math.sqrt(2)
CLAIM = 1.0


@dataclass(frozen=True)
class Law:
    """Mean and standard deviation of every coordinate of one release."""

    mean: np.ndarray
    std: np.ndarray

    def sample(self, n: int, rng: np.random.Generator) -> np.ndarray:
        """n releases."""
        return self.mean + self.std * rng.standard_normal((n, self.mean.size))

    def log_density(self, w: np.ndarray) -> np.ndarray:
        """Up to a constant."""
        return -0.5 * np.square((w - self.mean) / self.std).sum(1) - np.log(self.std).sum()


def catch_printed(seed: int = 0, trials: int = 20_000, delta: float = 1e-5) -> list[Caught]:
    """All cases; the first is the algorithm with all its flaws together."""
    return [case(_Draw(np.random.default_rng([seed, i]), trials, delta)) for i, case in enumerate(CASES)]


@dataclass(frozen=True)
class _Draw:
    """Source and number of the releases, and the claim's delta."""

    rng: np.random.Generator
    trials: int
    delta: float


def _laws(
    model: nn.Module, base: Records, larger: Records, sigma: float, *, per_sum: bool = True, iterations: int = 100,
    first: int | None = None,
) -> tuple[Law, Law]:  # fmt: skip
    """Laws of the algorithm's release on two batches: its own ClipWeights, then its own step on each.

    ``per_sum`` undoes the division by the batch size; ``first`` keeps so many coordinates (those of the first layer).
    """
    gains = published.clip_weights(model, 1.0, power_iterations=iterations, generator=torch.Generator().manual_seed(0))
    laws = []
    for data in (base, larger):
        release = published.lip_step(model, *data, gains=gains, tau=TAU, noise_multiplier=sigma)
        factor = release.batch_size if per_sum else 1
        stds = [torch.full((m.numel(),), release.noise_std[n.rpartition(".")[0]]) for n, m in release.means.items()]
        mean = torch.cat([m.double().flatten() for m in release.means.values()])
        laws.append(Law((mean * factor)[:first].numpy(), (torch.cat(stds).double() * factor)[:first].numpy()))
    return laws[0], laws[1]


def _judge(
    name: str,
    note: str,
    laws: tuple[Law, Law],
    sigma: float,
    draw: _Draw,
    *,
    mix: float = 1.0,
    rate: float = 1.0,
) -> Caught:
    """Draw releases in both worlds and compare; with ``mix`` the record takes part in so many batches of D' only."""
    shift = (laws[1].mean - laws[0].mean) / laws[0].std
    if np.allclose(laws[0].std, laws[1].std, rtol=1e-12):  # only the direction of the shift tells anything
        laws = Law(np.zeros(1), np.ones(1)), Law(np.array([np.linalg.norm(shift)]), np.ones(1))

    def ratio(w: np.ndarray) -> np.ndarray:
        plain = laws[1].log_density(w) - laws[0].log_density(w)
        return plain if mix == 1 else np.logaddexp(math.log1p(-mix), math.log(mix) + plain)

    without, with_it = laws[0].sample(draw.trials, draw.rng), laws[1].sample(draw.trials, draw.rng)
    if mix < 1:
        with_it = np.where(draw.rng.random((draw.trials, 1)) < mix, with_it, laws[0].sample(draw.trials, draw.rng))
    scores = ratio(without), ratio(with_it)
    claim = claimed_curve(sigma, rate, 1)
    size = float(np.linalg.norm(shift)) * sigma
    return Caught(name, sigma, rate, size, compare(*scores, draw.delta, claim), note, scores, claim)


def _sigma(delta: float, rate: float = 1.0) -> float:
    return calibrate_sigma(CLAIM, delta, rate, 1, accountant="rdp")


def _linear(weight: Tensor, bias: bool = False) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias:
            layer.bias.zero_()
    return layer


def _opposite(width: int, norm: float = 1.0) -> Tensor:
    """Two classes with opposite weights: the top left singular vector is (1, -1)/sqrt(2), where cross-entropy acts."""
    row = torch.full((width,), norm / math.sqrt(2 * width))
    return torch.stack([row, -row])


def _record(width: int, length: float, label: int = 1) -> Records:
    """A record with equal entries; by default far out and wrongly labelled, so that the loss is at its steepest."""
    return torch.full((1, width), length / math.sqrt(width)), torch.tensor([label])


def _chain(layers: int, width: int = 4, bias: bool = False) -> nn.Module:
    """Dense layers with one common direction in which all norms are attained."""
    ones = torch.full((width, width), 1.0 / width)
    body = [m for _ in range(layers - 1) for m in (_linear(ones, bias), nn.ReLU())]
    return nn.Sequential(*body, _linear(_opposite(width), bias))


def everything(draw: _Draw) -> Caught:
    """Four layers with biases, twenty records and a large one."""
    sigma, model = _sigma(draw.delta), _chain(4, bias=True)
    base, extra = repeated(_record(4, 30.0), 20), _record(4, 3000.0)
    laws = _laws(model, base, joined(base, extra), sigma)
    return _judge("all flaws together", "4 layers with biases, 20 records, one large record added", laws, sigma, draw)


def batch_maximum(draw: _Draw) -> Caught:
    """X_k is the largest norm of the batch: one large record rescales all others."""
    sigma, model = _sigma(draw.delta), _chain(1)
    base, extra = repeated(_record(4, 30.0), 20), _record(4, 3000.0, 0)
    laws = _laws(model, base, joined(base, extra), sigma)
    return _judge(
        "divides by the batch's largest input", "1 layer, 20 records, one 100 times as long added", laws, sigma, draw
    )


def layers_as_one(draw: _Draw) -> Caught:
    """All layers attain their bound at once."""
    sigma, model, record = _sigma(draw.delta), _chain(9), _record(4, 60.0)
    laws = _laws(model, record, joined(record, record), sigma)
    return _judge(
        "K layers accounted as one", "9 layers, a record added to its equal: sqrt(9) of the claim", laws, sigma, draw
    )


def product_from_k(draw: _Draw) -> Caught:
    """Delta_k contains c_k itself: too little noise when c_k < 1."""
    sigma, model, record = _sigma(draw.delta), nn.Sequential(_linear(_opposite(4, 0.25))), _record(4, 200.0)
    laws = _laws(model, record, joined(record, record), sigma)
    return _judge("product of norms starts at k", "1 layer of norm 1/4: four times the claim", laws, sigma, draw)


def missing_bias(draw: _Draw) -> Caught:
    """Gradients of weights and bias have norm ||delta|| ||(x, 1)||, not ||delta|| ||x||."""
    layer = _linear(_opposite(4), bias=True)
    with torch.no_grad():
        layer.bias.copy_(torch.tensor([30.0, -30.0]))
    # ClipWeights rescales the bias with the weights, which are at their norm: it keeps this one
    record = _record(4, 0.25)
    sigma = _sigma(draw.delta)
    laws = _laws(nn.Sequential(layer), record, joined(record, record), sigma)
    return _judge("the bias's 1 is missing", "1 layer with bias, inputs of norm 1/4", laws, sigma, draw)


def realised_batch(draw: _Draw) -> Caught:
    """The noise is divided by the realised batch size: its level tells the size."""
    sigma, model = _sigma(draw.delta), nn.Sequential(_linear(_opposite(100)))
    record = _record(100, 200.0, 0)  # classified rightly: no gradient at all
    laws = _laws(model, record, joined(record, record), sigma, per_sum=False)
    return _judge("divides by the realised batch size", "no gradient at all, one record against two", laws, sigma, draw)


def redrawn(draw: _Draw) -> Caught:
    """Empty batches are drawn again: among two records each takes part in about half of the batches."""
    q = 0.01
    sigma = _sigma(draw.delta, q)
    silent, extra = _record(4, 60.0, 0), _record(4, 60.0)
    model = nn.Sequential(_linear(_opposite(4)))
    trainer = published.PublishedLip(model, batch_size=2 * q, generator=torch.Generator().manual_seed(1))
    share = float(np.mean([1 in trainer.sample(2).tolist() for _ in range(300)]))
    laws = _laws(model, silent, joined(silent, extra), sigma)
    return _judge(
        "redraws empty batches",
        f"2 records, q = {q:g}: the record is in {share:.0%} of the batches",
        laws,
        sigma,
        draw,
        mix=share,
        rate=q,
    )


def kernel_norm(draw: _Draw) -> Caught:
    """A convolution's gradient grows with the number of places where a pixel meets the kernel."""
    conv = nn.Conv2d(1, 1, 3, padding=1, bias=False)
    nn.init.constant_(conv.weight, 1 / 3)
    model = nn.Sequential(conv, nn.Flatten(), _linear(_opposite(144)))
    image, label = torch.full((1, 1, 12, 12), 10.0), torch.tensor([1])
    sigma = _sigma(draw.delta)
    laws = _laws(model, (image, label), joined((image, label), (image, label)), sigma, first=9)
    return _judge(
        "convolutions without their overlap", "the kernel's gradient alone, constant image", laws, sigma, draw
    )


def power_iteration(draw: _Draw) -> Caught:
    """Power iteration stops below the norm: weights stay above C, layer after layer."""
    width, depth = 60, 12
    generator = torch.Generator().manual_seed(5)
    left = torch.linalg.qr(torch.cat([torch.ones(width, 1), torch.randn(width, width - 1, generator=generator)], 1))[0]
    values = torch.cat([torch.ones(1), torch.linspace(0.93, 0.5, width - 1)])
    matrix = left @ torch.diag(values) @ left.T * 4
    body = [m for _ in range(depth) for m in (_linear(matrix), nn.ReLU())]
    model = nn.Sequential(*body, _linear(_opposite(width, 4.0)))
    record = _record(width, 200.0)
    sigma = _sigma(draw.delta)
    laws = _laws(model, record, joined(record, record), sigma, iterations=5, first=width * width)
    return _judge("power iteration for the norm", "the first of 13 layers alone, 5 iterations", laws, sigma, draw)


def unit_gains(draw: _Draw) -> Caught:
    """Group normalisation with floor alpha has gain 1/alpha, counted as 1."""
    alternating = torch.tensor([1.0, -1.0, 1.0, -1.0]) / 2
    inner = torch.outer(alternating, alternating)
    last = torch.stack([alternating, -alternating]) / math.sqrt(2)
    model = nn.Sequential(_linear(inner), wnn.SafeGroupNorm(1, 4, alpha=1 / 64), _linear(last))
    record = (alternating[None] / 100, torch.tensor([1]))
    sigma = _sigma(draw.delta)
    laws = _laws(model, record, joined(record, record), sigma)
    return _judge("layers without parameters have gain 1", "group normalisation with floor 1/64", laws, sigma, draw)


def best_of_many(draw: _Draw) -> Caught:
    """A hundred runs, the one with the lowest training loss is released, epsilon of one run is printed."""
    sigma, runs = _sigma(draw.delta), 100
    model, record = nn.Sequential(_linear(_opposite(4))), _record(4, 60.0)
    silent = _record(4, 60.0, 0)
    laws = _laws(model, silent, joined(silent, record), sigma)
    mu = float(np.linalg.norm((laws[1].mean - laws[0].mean) / laws[0].std))
    # a step along the record's gradient lowers its loss most: with the record in the data, that run wins
    without = draw.rng.standard_normal(draw.trials)
    with_it = mu + draw.rng.standard_normal((draw.trials, runs)).max(1)

    def ratio(t: np.ndarray) -> np.ndarray:
        """log of the density of the largest of many N(mu, 1) over that of N(0, 1)."""
        return math.log(runs) + t * mu - mu**2 / 2 + (runs - 1) * stats.norm.logcdf(t - mu)

    claim = claimed_curve(sigma, 1.0, 1)
    scores = ratio(without), ratio(with_it)
    return Caught("best of many runs at one run's price", sigma, 1.0, mu * sigma, compare(*scores, draw.delta, claim),
                  f"{runs} runs, chosen by training loss", scores, claim)  # fmt: skip


CASES: tuple[Callable[[_Draw], Caught], ...] = (
    everything, batch_maximum, layers_as_one, product_from_k, missing_bias, realised_batch, redrawn, kernel_norm,
    power_iteration, unit_gains, best_of_many,
)  # fmt: skip
