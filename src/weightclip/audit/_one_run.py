"""One-run audit: many canaries, each in or out by a coin, one training run, guesses about the loudest and quietest.

The bound of [Steinke2023] ("Privacy Auditing with One (1) Training Run", Theorem 5.2) needs nothing but
(epsilon, delta); its refinement for a whole trade-off curve is [Mahloujifar2024] ("Auditing f-Differential Privacy in
One Run", Theorem 9): a random guessed canary is right *and* at least c + 1 guesses are right with a probability tied by
the curve to that of being wrong with at least c right, because flipping that canary's coin turns one into the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import torch
from scipy import stats
from torch import nn

from weightclip.accounting import calibrate_sigma
from weightclip.audit._releases import claimed_curve
from weightclip.audit._statistics import ALARM, SHOWN, Curve, gaussian_epsilon
from weightclip.audit._subject import Subject
from weightclip.certificate import Bounds
from weightclip.losses import CrossEntropy

Inverse = Callable[[float], float]
"""For a true positive rate, the least false positive rate that a privacy curve allows."""
_NORMAL = NormalDist()


@dataclass(frozen=True)
class OneRun:
    """Lower bounds from a single run with many canaries."""

    canaries: int  #: number of canaries judged (another quarter chose how many to guess)
    guesses: int  #: number of guesses; on the others the adversary is silent
    correct: int  #: how many were right
    rate: float  #: q
    steps: int  #: steps of the run
    epsilon_claimed: float  #: what such a run claims
    epsilon_lower: float  #: 95% bound by (epsilon, delta) alone
    epsilon_lower_fdp: float  #: 95% bound for a Gaussian (mu-GDP) curve
    mu: float  #: Gaussian estimate from the scores, a point estimate
    epsilon_gdp: float  #: epsilon of that mu
    violation: bool  #: whether the claimed curve is refuted at the strict level


def one_run(
    *,
    epsilon_claimed: float,
    target_delta: float = 1e-5,
    rate: float = 1.0,
    steps: int = 4,
    canaries: int = 1000,
    seed: int = 0,
) -> OneRun:
    """Train once with orthogonal gradient canaries, each present with probability 1/2, and guess which were."""
    sigma = calibrate_sigma(epsilon_claimed, target_delta, rate, steps)
    generator = torch.Generator().manual_seed(seed)
    present = torch.rand(canaries, generator=generator) < 0.5
    labels = torch.randint(0, 2, (canaries,), generator=generator)
    subject = canary_subject(canaries)
    run = subject.start((torch.eye(canaries)[present], labels[present]), sigma, seed, rate=rate)
    total = torch.zeros(2, canaries, dtype=torch.float64)
    for _ in range(steps):
        total += run.step().view(2, canaries)
    # a canary's gradient is cap * (1, -1)/sqrt(2) with the sign of its label, in its own column
    sign = 1.0 - 2.0 * labels.double()
    scores = ((total[1] - total[0]) * sign).numpy()
    return judge(scores, present.numpy(), claimed_curve(sigma, rate, steps), epsilon_claimed, target_delta, rate, steps)


def canary_subject(canaries: int) -> Subject:
    """A linear model in which canary i, the i-th unit vector, has a gradient of its own column only."""

    def model() -> nn.Module:
        layer = nn.Linear(canaries, 2, bias=False)
        nn.init.zeros_(layer.weight)
        return layer

    def records(n: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        index = torch.randint(0, canaries, (n,), generator=generator)
        return torch.eye(canaries)[index], torch.randint(0, 2, (n,), generator=generator)

    return Subject("orthogonal canaries", model, CrossEntropy(cap=0.3), Bounds(input_radius=1.0), records, batch=64.0)


def judge(
    scores: np.ndarray, present: np.ndarray, claim: Curve, epsilon_claimed: float, delta: float, rate: float, steps: int
) -> OneRun:
    """Bounds from the scores of all canaries; every fourth one only serves to choose the number of guesses."""
    train = np.arange(len(scores)) % 4 == 0
    part = _choose(scores[train], present[train], delta)
    s, b = scores[~train], present[~train]
    m = len(s)
    guesses, correct = _guess(s, b, max(1, round(part * m / 2)))
    lower = _largest(lambda e: steinke_p_value(m, guesses, correct, e, delta) <= SHOWN, 60.0)
    mu_lower = _largest(lambda mu: refuted(gaussian_inverse(mu), m, guesses, correct, SHOWN), 30.0)
    spread = math.sqrt((s[b].var() + s[~b].var()) / 2)
    mu = max(0.0, float(s[b].mean() - s[~b].mean()) / spread) if spread > 0 else math.inf
    return OneRun(
        m, guesses, correct, rate, steps, epsilon_claimed, lower, gaussian_epsilon(mu_lower, delta),
        mu, gaussian_epsilon(mu, delta), refuted(curve_inverse(claim), m, guesses, correct, ALARM),
    )  # fmt: skip


def _guess(scores: np.ndarray, present: np.ndarray, each: int) -> tuple[int, int]:
    """``each`` highest scores are said to be in, as many lowest to be out: (guesses, correct ones)."""
    order = np.argsort(scores, kind="stable")
    return 2 * each, int(present[order[-each:]].sum() + (~present[order[:each]]).sum())


def _choose(scores: np.ndarray, present: np.ndarray, delta: float) -> float:
    """The part of the canaries to guess about that gives the best bound on the training quarter."""
    options = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)

    def bound(part: float) -> float:
        guesses, correct = _guess(scores, present, max(1, round(part * len(scores) / 2)))
        rate = (correct + 0.5) / (guesses + 1)  # as if the same rate held for many more canaries
        return math.log(max(rate - 1.6 * math.sqrt(rate * (1 - rate) / (4 * guesses)), 0.5) / max(1 - rate, 1e-9))

    return max(options, key=bound)


def steinke_p_value(m: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Chance that an (epsilon, delta)-DP run lets so many guesses be right, at most."""
    p = 1 / (1 + math.exp(-epsilon))
    beta = float(stats.binom.sf(correct - 1, guesses, p))
    below = stats.binom.pmf(np.arange(correct - 1, -1, -1), guesses, p).cumsum()
    alpha = float((below / np.arange(1, correct + 1)).max()) if correct else 0.0
    return min(1.0, beta + alpha * 2 * m * delta)


def refuted(inverse: Inverse, m: int, guesses: int, correct: int, level: float) -> bool:
    """Whether a trade-off curve makes P[at least so many right] <= level, by the recursion of [Mahloujifar2024].

    With p_j the chance of exactly j right guesses, r_i = sum_{j >= i} j p_j / m and h_i = sum_{j >= i} (guesses - j)
    p_j / m satisfy r_{i+1} <= curve(h_i). Starting from the supposed tail, both are followed down to i = 0, where they
    must add up to guesses / m.
    """
    scale = level * guesses / m
    r, h = scale * correct / guesses, scale * (guesses - correct) / guesses
    for i in range(correct - 1, -1, -1):
        higher = max(h, inverse(r))
        r += i / (guesses - i) * (higher - h)
        h = higher
        if r + h > guesses / m:
            return True
    return False


def gaussian_inverse(mu: float) -> Inverse:
    """Inverse trade-off of a mu-GDP mechanism."""

    def inverse(rate: float) -> float:
        if not 0 < rate < 1:
            return max(0.0, min(1.0, rate))
        return _NORMAL.cdf(_NORMAL.inv_cdf(rate) - mu)

    return inverse


def curve_inverse(claim: Curve, epsilons: Sequence[float] | None = None) -> Inverse:
    """Inverse trade-off of a privacy curve: the largest of its lines, in both directions."""
    grid = np.array(
        epsilons if epsilons is not None else np.concatenate([np.linspace(0, 6, 61), np.linspace(6.5, 30, 48)])
    )
    deltas = np.array([claim(float(e)) for e in grid])
    shrink, grow = np.exp(-grid), np.exp(grid)

    def inverse(rate: float) -> float:
        forward = ((rate - deltas) * shrink).max()
        return float(max(0.0, forward, (1 - deltas - grow * (1 - rate)).max()))

    return inverse


def _largest(refutes: Callable[[float], bool], limit: float) -> float:
    """The largest parameter that is still refuted, by bisection; 0 if none is."""
    if not refutes(1e-6):
        return 0.0
    low, high = 1e-6, limit
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if refutes(middle) else (low, middle)
    return low
