"""An algorithm that is known to break its claim, and what the audits show of it: a test of the audits themselves."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from weightclip.audit._statistics import Curve, TwoWorlds


@dataclass(frozen=True)
class Caught:
    """One case: what was claimed, what is true at least.

    Attributes:
        name: The flaw.
        sigma: Noise multiplier that claims epsilon = 1.
        rate: Sampling rate of the claim.
        shift: How far one record moves the mean, in multiples of what the algorithm allows.
        result: Lower bounds from the sampled releases.
        note: The case in words.
        scores: Log-likelihood ratios in both worlds, for the picture.
        claim: The claimed curve.
    """

    name: str
    sigma: float
    rate: float
    shift: float
    result: TwoWorlds
    note: str
    scores: tuple[np.ndarray, np.ndarray] = field(repr=False)
    claim: Curve = field(repr=False)

    def curve(self, epsilons: np.ndarray) -> np.ndarray:
        """Estimate of the true delta(epsilon) = E over D' of (1 - e^(epsilon - ratio))_+."""
        ratio = self.scores[1]
        return np.array([np.maximum(0.0, -np.expm1(np.minimum(0.0, e - ratio))).mean() for e in epsilons])
