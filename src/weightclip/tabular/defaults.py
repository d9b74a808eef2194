"""Settings that work without tuning, as a function of public numbers alone.

They were chosen on data sets other than those of the study (docs/estimators.md says which), by mean regret against the
best of some hundred random settings on each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from weightclip.tabular._training import Settings

KINDS_SHARE = 0.03  # part of the precision spent on a vote about kinds, where a column has no declared type


def signal(n: int, epsilon: float, outputs: int) -> float:
    """How much can be learnt: records times ε, shared by the classes."""
    return n * min(epsilon, 2.0) / max(1, outputs - 1)


def settings(n: int, epsilon: float, width: int, outputs: int, chosen: Mapping[str, Any]) -> Settings:
    """Default settings, with what the user chose in their place.

    Args:
        n: Public number of records.
        epsilon: Budget.
        width: Number of features, as released by preprocessing.
        outputs: Number of outputs.
        chosen: Fields of the estimator that are not None.
    """
    strength = signal(n, epsilon, outputs)
    hidden = chosen.get("hidden_layer_sizes")
    if hidden is None:
        hidden = () if strength < 1900 * max(1.0, math.sqrt(width / 90)) else (16,)
    # Every feature brings its own noise: with many of them, smaller steps average more of it.
    lr = 0.06 * min(1.0, (80 / max(1, width)) ** (1 / 3))
    q = chosen.get("batch_fraction", 1 / 8)
    batch = max(1, round(q * n))
    return Settings(
        hidden=tuple(hidden),
        batch=batch,
        epochs=chosen.get("epochs", 30),
        lr=chosen.get("learning_rate", lr),
        final_lr=0.1,
        averaging=0.95,
        bias_scale=chosen.get("bias_scale", 0.3),
        cap=chosen.get("gradient_cap"),
        temperature=chosen.get("temperature", 0.4),
        weight_norm=chosen.get("weight_norm"),
        joint_cap=chosen.get("joint_cap", 0.3),
    )


def pieces(n: int, epsilon: float) -> int:
    """Intervals of a numeric column."""
    return 6


def share(lack: float) -> float:
    """Part of the precision spent on preprocessing: as much as makes the statistics good enough, within reason.

    Args:
        lack: `lack_of_precision` if a tenth were spent.
    """
    return min(0.2, max(0.02, 0.1 * lack**2))


def center_share(error: float) -> float:
    """Part of the precision spent on the features' means: as much as brings their error to a fifth of a row's norm.

    Args:
        error: `center_error` if a fiftieth were spent.
    """
    return min(0.05, max(0.01, 0.02 * (error / 0.2) ** 2))


def target_part(known: bool) -> float:
    """Part of what statistics get that goes to a regressor's target: a unit that is far too wide ruins the whole fit.

    Args:
        known: Whether the target's range is public.
    """
    return 0.2 if known else 0.5


def agreement_share(n: int, mu: float) -> float:
    """Part of the precision spent on a regressor's last look: noise of a fortieth of n, where that is not too dear.

    Args:
        n: Public number of records.
        mu: 1/σ of the one Gaussian mechanism that spends the whole budget.
    """
    return min(0.15, max(0.03, (40 / (n * mu)) ** 2))


def delta(n: int) -> float:
    """1/n², rounded down to one digit; never below what the accountant resolves."""
    exact = max(1.0 / max(n, 10) ** 2, 1e-11)
    power = 10.0 ** math.floor(math.log10(exact))
    return math.floor(exact / power * (1 + 1e-12)) * power
