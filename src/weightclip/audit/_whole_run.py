"""Two-world audit of whole runs: train with and without the loudest record, guess from everything released.

The adversary is the strongest the guarantee covers: it knows all other records, sees every released gradient, and
scores each by the record's own gradient at the present weights (white box). The same runs are also scored by what an
outsider has, the record's loss under the final model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from weightclip.accounting import calibrate_sigma
from weightclip.audit._releases import claimed_curve
from weightclip.audit._statistics import TwoWorlds, compare
from weightclip.audit._subject import AuditRun, Records, Subject, joined


@dataclass(frozen=True)
class WholeRun:
    """Lower bounds from whole runs beside the claim.

    Attributes:
        subject: Name of the trainer.
        rate: q.
        steps: Steps of each run.
        sigma: Noise multiplier.
        epsilon_claimed: What the engine prints for such a run.
        white_box: From every released gradient.
        black_box: From the final model alone.
    """

    subject: str
    rate: float
    steps: int
    sigma: float
    epsilon_claimed: float
    white_box: TwoWorlds
    black_box: TwoWorlds

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
