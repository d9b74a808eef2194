"""The K-norm mechanism: exact effect of one record in the mechanism's own norm, and the law of its noise.

One draw is epsilon0-DP if one record moves the sums by at most 1 in the joint norm max_k ||x_k||_p / Delta_k, and if
the noise has density proportional to exp(-epsilon0 times that norm). The norm of the noise is then Gamma(D,
1/epsilon0), D the number of coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy import stats

from weightclip.audit._neighbours import Neighbours
from weightclip.audit._one_step import TOLERANCE, frozen_sgd
from weightclip.audit._statistics import ALARM
from weightclip.audit._subject import AuditRun, Subject
from weightclip.noise import KNorm


@dataclass(frozen=True)
class PureLaw:
    """What was found for one exponent.

    Attributes:
        subject: The trainer.
        p: Exponent of the norm.
        shift: Largest effect of one record in the joint norm; the claim allows 1.
        worst: The pair of neighbours where it was found.
        noise: p-value of the noise's norm being Gamma(D, 1/epsilon0).
    """

    subject: str
    p: float
    shift: float
    worst: str
    noise: float

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
