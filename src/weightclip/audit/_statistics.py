"""From scores of two worlds to lower bounds: Clopper-Pearson always, a Gaussian (GDP) estimate beside it.

Two worlds, data sets D and D' that differ in one record, each give a sample of scores (larger: rather D'). A test
"score above the threshold" has false and true positive rates; (epsilon, delta)-DP in both directions forces

    TPR <= e^epsilon FPR + delta   and   TNR <= e^epsilon FNR + delta.

Bounds shown to people hold with 95%; a *violation* is only declared at ``ALARM`` (false alarms: one in a million
audits), because one report makes many comparisons and a sharp canary sits right at the claim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import stats

from weightclip.accounting import gdp_epsilon

Curve = Callable[[float], float]
"""A privacy claim: epsilon -> delta(epsilon)."""

SHOWN = 0.05
ALARM = 1e-6
_GRID = (0.0, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """epsilon of a mu-GDP mechanism, also where mu is 0 or beyond all measure."""
    return gdp_epsilon(mu, delta) if mu < 1e3 else math.inf


def clopper_pearson(successes: int, trials: int, alpha: float) -> tuple[float, float]:
    """Exact bounds of a binomial proportion, each of them wrong with probability at most ``alpha``."""
    low = 0.0 if successes == 0 else float(stats.beta.ppf(alpha, successes, trials - successes + 1))
    high = 1.0 if successes == trials else float(stats.beta.ppf(1 - alpha, successes + 1, trials - successes))
    return low, high


@dataclass(frozen=True)
class TwoWorlds:
    """What two samples of scores say.

    Worlds may share their randomness (common random numbers): each rate has its own bound and the two add up, and the
    Gaussian estimate becomes much sharper.
    """

    #: 95% Clopper-Pearson lower bound of epsilon at ``delta``; the threshold is chosen on one half of the scores, the
    #: bound computed on the other
    epsilon_lower: float
    mu: float  #: Gaussian estimate: distance of the means over the standard deviation
    mu_lower: float  #: 95% Clopper-Pearson lower bound of mu for a mechanism known to be mu-GDP
    epsilon_gdp: float  #: epsilon at ``delta`` of a mu-GDP mechanism: an estimate, no bound
    delta: float
    trials: int  #: scores per world
    violation: bool  #: whether the claimed curve is refuted at the strict level
    excess: float  #: largest certified TPR - e^eps FPR - delta(eps); positive when refuted


def compare(scores0: np.ndarray, scores1: np.ndarray, delta: float, claim: Curve | None = None) -> TwoWorlds:
    """Audit two samples of scores of the same size; ``claim`` is the curve to refute."""
    s0, s1 = np.asarray(scores0, float), np.asarray(scores1, float)
    if not (np.isfinite(s0).all() and np.isfinite(s1).all()):
        # a release that is not finite in one world only tells the worlds apart by itself
        s0, s1 = (np.nan_to_num(s, nan=np.inf, posinf=np.inf, neginf=-np.inf) for s in (s0, s1))
        s0, s1 = (np.clip(s, -1e100, 1e100) for s in (s0, s1))
    train, test = (s0[::2], s1[::2]), (s0[1::2], s1[1::2])
    lower = _best(train, test, lambda a, b, alpha: _epsilon_bound(a, b, delta, alpha))
    mu_lower = _best(train, test, _mu_bound)
    spread = math.sqrt((s0.var() + s1.var()) / 2) if len(s0) > 1 else 0.0
    gap = float(s1.mean() - s0.mean())
    mu = max(0.0, gap / spread) if spread > 0 else (math.inf if gap > 0 else 0.0)
    excess = -math.inf if claim is None else _excess(train, test, claim)
    return TwoWorlds(lower, mu, mu_lower, gaussian_epsilon(mu, delta), delta, len(s0), excess > 0, excess)


def _thresholds(train: tuple[np.ndarray, np.ndarray], count: int) -> np.ndarray:
    """Quantiles of the pooled scores, dense at both ends where small rates live."""
    tails = np.geomspace(1 / max(len(train[0]), 2), 0.5, count)
    return np.unique(np.quantile(np.concatenate(train), np.concatenate([tails, 1 - tails])))


def _best(train, test, bound: Callable[[tuple[int, int], tuple[int, int], float], float]) -> float:
    """Threshold by the training half, value by the other: no selection effect."""
    options = _thresholds(train, 64)
    counts = [tuple((int((s > t).sum()), len(s)) for s in train) for t in options]
    chosen = options[int(np.argmax([bound(a, b, SHOWN / 2) for a, b in counts]))]
    a, b = ((int((s > chosen).sum()), len(s)) for s in test)
    return max(0.0, bound(a, b, SHOWN / 2))


def _epsilon_bound(positives0: tuple[int, int], positives1: tuple[int, int], delta: float, alpha: float) -> float:
    fpr_low, fpr_high = clopper_pearson(*positives0, alpha)
    tpr_low, tpr_high = clopper_pearson(*positives1, alpha)
    options = ((tpr_low - delta, fpr_high), (1 - fpr_high - delta, 1 - tpr_low))
    return max((math.log(a / b) for a, b in options if a > 0), default=0.0)


def _mu_bound(positives0: tuple[int, int], positives1: tuple[int, int], alpha: float) -> float:
    _, fpr = clopper_pearson(*positives0, alpha)
    tpr, _ = clopper_pearson(*positives1, alpha)
    if tpr <= 0 or fpr >= 1:
        return -math.inf
    return float(stats.norm.ppf(tpr) - stats.norm.ppf(fpr))


def _excess(train, test, claim: Curve) -> float:
    """Largest certified excess over the claimed curve, all thresholds and both directions at level ``ALARM``."""
    options = _thresholds(train, 8)
    alpha = ALARM / (2 * len(options))
    worst = -math.inf
    limits = [(math.exp(e), claim(e)) for e in _GRID]
    for t in options:
        a, b = ((int((s > t).sum()), len(s)) for s in test)
        fpr, tpr = clopper_pearson(*a, alpha)[1], clopper_pearson(*b, alpha)[0]
        for growth, limit in limits:
            worst = max(worst, tpr - growth * fpr - limit, (1 - fpr) - growth * (1 - tpr) - limit)
    return worst


@dataclass(frozen=True)
class Normality:
    """Whether numbers are independent standard normals times a known scale."""

    scale: float  #: their standard deviation over the claimed one
    p_value: float  #: smallest of the tests' p-values (spread, shape, resolution), Bonferroni-corrected
    suspicious: bool  #: whether the p-value is below the alarm level
    why: str = ""  #: which test failed


def check_normal(z: np.ndarray) -> Normality:
    """Test z ~ N(0, I): the spread by chi-square, the shape by Kolmogorov-Smirnov, and repeated values."""
    z = np.asarray(z, float).ravel()
    n = z.size
    if not np.isfinite(z).all():
        return Normality(math.nan, 0.0, True, "not finite")
    total = float(np.square(z).sum())
    spread = 2 * min(stats.chi2.cdf(total, n), stats.chi2.sf(total, n))
    shape = stats.kstest(z, "norm").pvalue
    # float32 normals seldom repeat (fewer than n^2 / 2^17 pairs, sums included); a coarser type repeats all the time
    few = z[:20_000]
    repeats = few.size - np.unique(np.float32(few)).size
    fine = stats.poisson.sf(repeats - 1, 1 + few.size**2 / 2**17) if repeats else 1.0
    tests = {"spread": spread, "shape": shape, "resolution": fine}
    why = min(tests, key=lambda k: tests[k])
    p = min(1.0, 3 * tests[why])
    return Normality(math.sqrt(total / n), float(p), bool(p < ALARM), why if p < ALARM else "")
