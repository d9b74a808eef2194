"""Sampled audits: releases of one step by the thousand, and whole runs, with and without the loudest record.

The adversary is the strongest the guarantee covers: it knows all other records, sees every released gradient, and
scores each by the record's own gradient at the present weights (white box). Whole runs are also scored by what an
outsider has, the record's loss under the final model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from weightclip.accounting import Mechanism, calibrate_sigma, delta
from weightclip.audit._statistics import Curve, TwoWorlds, compare
from weightclip.audit._subject import AuditRun, Records, Subject, frozen_sgd, joined
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


@dataclass(frozen=True)
class WholeRun:
    """Lower bounds from whole runs beside the claim."""

    subject: str  #: name of the trainer
    rate: float  #: q
    steps: int  #: steps of each run
    sigma: float  #: noise multiplier
    epsilon_claimed: float  #: what the engine prints for such a run
    white_box: TwoWorlds  #: from every released gradient
    black_box: TwoWorlds  #: from the final model alone

    @property
    def violation(self) -> bool:
        """Whether the claimed curve is refuted."""
        return self.white_box.violation or self.black_box.violation

    @property
    def sharpness(self) -> float:
        """The Gaussian estimate of epsilon over the claim: 1 where the audit is as strong as the guarantee."""
        return self.white_box.epsilon_gdp / self.epsilon_claimed


def two_worlds(
    subject: Subject,
    loudest: Records,
    *,
    epsilon_claimed: float,
    target_delta: float = 1e-5,
    rate: float = 1.0,
    steps: int = 5,
    trials: int = 200,
    records: int = 3,
    seed: int = 0,
) -> WholeRun:
    """Train ``trials`` times in each world and compare; sigma is the one that claims ``epsilon_claimed``.

    One engine serves all runs of a world: weights are restored after each, noise and draws go on, so that runs are
    independent. The claim tested is that of ``steps`` steps.
    """
    sigma = calibrate_sigma(epsilon_claimed, target_delta, rate, steps)
    base = subject.ordinary(records, seed)
    quiet = [subject.start(data, 0.0, seed, unit=sigma, rate=1.0) for data in (base, loudest)]
    scores = []
    for data in (base, joined(base, loudest)):
        run = subject.start(data, sigma, seed, rate=rate)
        start = run.weights()
        scores.append(np.array([_episode(run, start, quiet, steps) for _ in range(trials)]))
    claim = claimed_curve(sigma, rate, steps)
    white, black = (compare(scores[0][:, i], scores[1][:, i], target_delta, claim) for i in range(2))
    return WholeRun(subject.name, rate, steps, sigma, epsilon_claimed, white, black)


def _episode(run: AuditRun, start: list[torch.Tensor], quiet: list[AuditRun], steps: int) -> tuple[float, float]:
    """One training run; the sum of <release - background, record's gradient>, and minus the record's final loss.

    Background and record are released without noise by twins at the same weights.
    """
    run.set_weights(start)
    total = 0.0
    for _ in range(steps):
        for twin in quiet:
            twin.set_weights(run.weights())
        known, canary = (twin.step() for twin in quiet)
        total += float((run.step() - run.subject.rate * known) @ canary)
    x, y = quiet[1].x, quiet[1].y
    with torch.no_grad():
        loss = run.engine.criterion.loss.values(run.model(x), y)
    return total, -float(loss.sum())
