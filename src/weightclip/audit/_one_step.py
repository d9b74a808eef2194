"""One-step audits, exact part: how far one record moves the release, against the noise the engine adds.

Without noise (sigma = 0) the engine's release is a function of the data; run on two neighbours it gives the exact
shift of the mean. With Gaussian noise of the scales the engine states, the two releases are N(0, I) and N(mu u, I)
after a change of units, mu = shift/sigma: the whole privacy curve is known, no sampling needed.

One draw of the K-norm mechanism is epsilon0-DP if one record moves the sums by at most 1 in the joint norm
max_k ||x_k||_p / Delta_k, and if the noise has density proportional to exp(-epsilon0 times that norm). The norm of the
noise is then Gamma(D, 1/epsilon0), D the number of coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy import stats

from weightclip.accounting import gdp_delta
from weightclip.audit._neighbours import Neighbours
from weightclip.audit._statistics import ALARM, gaussian_epsilon
from weightclip.audit._subject import TOLERANCE, AuditRun, Records, Subject, frozen_sgd
from weightclip.noise import KNorm


@dataclass(frozen=True)
class Shift:
    """The exact effect of one record in one pair of neighbours."""

    name: str  #: which pair
    shift: float  #: distance of the two means in units of s_k/sigma; 1 is what the claim allows
    same_noise: bool  #: whether the noise scales are the same for both (they must be public)

    @property
    def violation(self) -> bool:
        """Whether the pair refutes the claim."""
        return not (self.shift <= 1 + TOLERANCE and self.same_noise)


@dataclass(frozen=True)
class StepLaw:
    """Exact law of one step over many pairs of neighbours."""

    subject: str
    shifts: tuple[Shift, ...]

    @property
    def violation(self) -> bool:
        """Whether any pair refutes the claim."""
        return any(s.violation for s in self.shifts)

    @property
    def worst(self) -> Shift:
        """The pair with the largest shift."""
        return max(self.shifts, key=lambda s: (s.violation, s.shift if math.isfinite(s.shift) else math.inf))

    def curve(self, sigma: float, epsilons: Sequence[float]) -> list[float]:
        """delta(epsilon) of the worst pair with noise multiplier ``sigma``: exact, to compare with the claimed one."""
        mu = self.worst.shift / sigma
        return [gdp_delta(mu, e) if math.isfinite(mu) else 1.0 for e in epsilons]

    def epsilon(self, sigma: float, delta: float) -> float:
        """Exact epsilon of the worst pair."""
        return gaussian_epsilon(self.worst.shift / sigma, delta)


def step_law(subject: Subject, pairs: Sequence[Neighbours], seed: int = 0) -> StepLaw:
    """Run the engine without noise on each pair of neighbours and measure the shift of its release."""
    bench = _Bench(replace(subject, optimizer=frozen_sgd), seed)
    return StepLaw(subject.name, tuple(bench.shift(pair) for pair in pairs))


class _Bench:
    """Engines by data set size and rate, so that pairs of equal sizes share them."""

    def __init__(self, subject: Subject, seed: int) -> None:
        self.subject, self.seed = subject, seed
        self._runs: dict[Any, AuditRun] = {}
        self._start: list[torch.Tensor] | None = None

    def _run(self, data: Records, rate: float) -> AuditRun:
        if rate < 1:  # draws are counted: always a fresh run
            return self.subject.start(data, 0.0, self.seed, rate=rate)
        key = len(data[0])
        if key not in self._runs:
            self._runs[key] = self.subject.start(data, 0.0, self.seed, rate=rate)
        self._runs[key].replace(data)
        return self._runs[key]

    def shift(self, pair: Neighbours) -> Shift:
        smaller, larger = self._run(pair.base, pair.rate), self._run(pair.larger, pair.rate)
        if self._start is None:
            self._start = smaller.weights()
        worst, same = 0.0, True
        for _ in range(pair.steps):
            for run in (smaller, larger):  # every draw starts from the same released state
                run.set_weights(self._start)
            a, b = smaller.step(), larger.step()
            same = same and smaller.layer_units() == larger.layer_units()
            distance = float((a - b).norm())
            if not distance <= worst:
                worst = distance if math.isfinite(distance) else math.inf
        return Shift(pair.name, worst, same)


@dataclass(frozen=True)
class PureLaw:
    """What was found for one exponent."""

    subject: str  #: the trainer
    p: float  #: exponent of the norm
    shift: float  #: largest effect of one record in the joint norm; the claim allows 1
    worst: str  #: the pair of neighbours where it was found
    noise: float  #: p-value of the noise's norm being Gamma(D, 1/epsilon0)

    @property
    def violation(self) -> bool:
        """Whether the claim of epsilon0 per step is refuted."""
        return not self.shift <= 1 + TOLERANCE or self.noise < ALARM


def pure_law(subject: Subject, p: float, pairs: Sequence[Neighbours], trials: int = 200, seed: int = 0) -> PureLaw:
    """Audit a trainer under ``mechanism=KNorm(p)`` at epsilon0 = 1."""
    trainer = replace(subject, mechanism=KNorm(p), optimizer=frozen_sgd)
    shift, worst = 0.0, ""
    for pair in pairs:
        if pair.rate < 1:
            continue
        runs = [trainer.start(data, 0.0, seed, rate=1.0) for data in (pair.base, pair.larger)]
        found = _norm(runs[0], runs[1].raw_step() - runs[0].raw_step(), p)
        if not found <= shift:
            shift, worst = (found if math.isfinite(found) else math.inf), pair.name
    data = subject.ordinary(3, seed)
    quiet, noisy = trainer.start(data, 0.0, seed), trainer.start(data, 1.0, seed)
    mean = quiet.raw_step()
    norms = np.array([_norm(noisy, noisy.raw_step() - mean, p) for _ in range(trials)])
    law = stats.gamma(len(mean))
    return PureLaw(subject.name, p, shift, worst, float(stats.kstest(norms, law.cdf).pvalue))


def _norm(run: AuditRun, vector: torch.Tensor, p: float) -> float:
    """max_k ||x_k||_p / Delta_k, biases times beta."""
    release, deltas = run.engine.training.release, run.engine.training.sensitivity.values.tolist()
    layers: list[list[torch.Tensor]] = [[] for _ in deltas]
    for block, part in zip(release.blocks, vector.split([b.parameter.numel() for b in release.blocks]), strict=True):
        layers[block.layer].append(block.beta * part)
    norms = [float(torch.linalg.vector_norm(torch.cat(parts), p)) / d for parts, d in zip(layers, deltas, strict=True)]
    return max(norms) if all(math.isfinite(n) for n in norms) else math.inf
