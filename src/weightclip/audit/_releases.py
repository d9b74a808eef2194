"""One-step audit, sampled part: thousands of releases of the real engine, told apart by the likelihood ratio."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from weightclip.accounting import Mechanism, calibrate_sigma, delta
from weightclip.audit._one_step import frozen_sgd
from weightclip.audit._statistics import Curve, TwoWorlds, compare
from weightclip.audit._subject import Records, Subject, joined
from weightclip.losses import CrossEntropy


@dataclass(frozen=True)
class SampledReleases:
    """Lower bounds from sampled releases of one step beside the claim."""

    subject: str
    rate: float
    sigma: float
    epsilon_claimed: float
    result: TwoWorlds

    @property
    def violation(self) -> bool:
        """Whether the claimed curve is refuted."""
        return self.result.violation


def claimed_curve(sigma: float, rate: float, steps: int) -> Curve:
    """delta(epsilon) that a run with these public numbers claims."""
    mechanism = [Mechanism("gaussian", sigma, rate, steps)]
    return lambda e: delta(mechanism, e)


def sampled_releases(
    subject: Subject,
    loudest: Records,
    *,
    epsilon: float,
    target_delta: float = 1e-5,
    rate: float = 1.0,
    trials: int = 1000,
    seed: int = 0,
) -> SampledReleases:
    """Release one step ``trials`` times with and without a record, at the noise that claims ``epsilon``.

    The background contributes nothing where the loss can ignore labels, so that with q < 1 the two laws are exactly
    the accountant's pair N(0, 1) and (1 - q) N(0, 1) + q N(mu, 1), if the engine is right.
    """
    sigma = calibrate_sigma(epsilon, target_delta, rate, 1)
    frozen = replace(subject, optimizer=frozen_sgd, rate=rate)
    base = silent(subject, 3 if rate == 1 else 1, seed)
    larger = joined(base, loudest)
    direction = _mean(frozen, larger, sigma) - _mean(frozen, base, sigma)
    scores = []
    for data in (base, larger):
        run = frozen.start(data, sigma, seed)
        scores.append(np.array([float(run.step() @ direction) for _ in range(trials)]))
    result = compare(scores[0], scores[1], target_delta, claimed_curve(sigma, rate, 1))
    return SampledReleases(subject.name, rate, sigma, epsilon, result)


def silent(subject: Subject, n: int, seed: int) -> Records:
    """Ordinary records whose labels the loss ignores, if it can; they take part and contribute zero."""
    x, y = subject.ordinary(n, seed)
    loss = subject.loss
    return (x, torch.full_like(y, loss.ignore_index)) if isinstance(loss, CrossEntropy) else (x, y)


def _mean(subject: Subject, data: Records, sigma: float) -> torch.Tensor:
    return subject.start(data, 0.0, unit=sigma, rate=1.0).step()
