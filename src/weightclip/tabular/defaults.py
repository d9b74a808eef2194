"""Settings that work without tuning, as a function of public numbers alone.

They were chosen on data sets other than those of the study (docs/estimators.md says which), by mean regret against the
best of some hundred random settings on each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from weightclip.tabular._training import Settings

PIECES = 6  # intervals of a numeric column
KINDS_SHARE = 0.03  # part of the precision spent on a vote about kinds, where a column has no declared type


def settings(n: int, epsilon: float, width: int, outputs: int, chosen: Mapping[str, Any]) -> Settings:
    """Default settings, with what the user chose in their place: fields of the estimator that are not None.

    `n` is the public number of records, `width` the number of features as released by preprocessing.
    """
    strength = n * min(epsilon, 2.0) / max(1, outputs - 1)  # how much can be learnt, shared by the classes
    hidden = chosen.get("hidden_layer_sizes")
    if hidden is None:
        hidden = () if strength < 1900 * max(1.0, math.sqrt(width / 90)) else (16,)
    # Every feature brings its own noise: with many of them, smaller steps average more of it.
    lr = 0.06 * min(1.0, (80 / max(1, width)) ** (1 / 3))
    return Settings(
        hidden=tuple(hidden),
        batch=max(1, round(chosen.get("batch_fraction", 1 / 8) * n)),
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


def share(lack: float) -> float:
    """Part of the precision spent on preprocessing: as much as makes the statistics good enough, within reason.

    `lack` is `lack_of_precision` if a tenth were spent.
    """
    return min(0.2, max(0.02, 0.1 * lack**2))


def center_share(error: float) -> float:
    """Part of the precision spent on the features' means: as much as brings their error to a fifth of a row's norm.

    `error` is `center_error` if a fiftieth were spent.
    """
    return min(0.05, max(0.01, 0.02 * (error / 0.2) ** 2))


def target_part(known: bool) -> float:
    """Part of what statistics get that goes to a regressor's target, whose range may be `known` in public.

    A unit that is far too wide ruins the whole fit.
    """
    return 0.2 if known else 0.5


def agreement_share(n: int, mu: float) -> float:
    """Part of the precision spent on a regressor's last look: noise of a fortieth of n, where that is not too dear.

    `mu` is 1/σ of the one Gaussian mechanism that spends the whole budget.
    """
    return min(0.15, max(0.03, (40 / (n * mu)) ** 2))


def delta(n: int) -> float:
    """1/n², rounded down to one digit; never below what the accountant resolves."""
    exact = max(1.0 / max(n, 10) ** 2, 1e-11)
    power = 10.0 ** math.floor(math.log10(exact))
    return math.floor(exact / power * (1 + 1e-12)) * power
