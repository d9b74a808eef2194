"""What a run costs: a thin adapter over dp-accounting, with calibration and the cost of a search.

Every figure is an upper bound on epsilon (or delta) for the stated adjacency. PLD is the default; RDP is what the
paper uses. Gaussian differential privacy appears only as an estimate, because its epsilon falls below the truth.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import dp_accounting
from dp_accounting.rdp import rdp_privacy_accountant as rdp
from scipy import optimize, stats

from weightclip.accounting import _composition as _c
from weightclip.accounting._composition import Adjacency as Adjacency
from weightclip.accounting._composition import Mechanism as Mechanism
from weightclip.errors import WeightclipError

RDP_ORDERS: tuple[float, ...] = (*(1 + x / 10 for x in range(1, 100)), *range(12, 64))
"""Orders of the RDP accountant: Opacus' default list, so that the two agree. At delta = 1e-5 they certify no epsilon
below 0.10; PLD does."""

_SEARCH_ORDERS: tuple[float, ...] = (*(1 + x / 20 for x in range(1, 200)), *range(11, 64), 80, 128, 256, 512, 1024)
_TOLERANCE = 1e-4  # of a calibrated sigma, relative


def epsilon(
    mechanisms: Iterable[Mechanism],
    delta: float,
    accountant: str = "pld",
    adjacency: Adjacency | str = Adjacency.ADD_OR_REMOVE_ONE,
) -> float:
    """Epsilon of all mechanisms together.

    Args:
        mechanisms: What was released, each with its number of steps.
        delta: Failure probability, in (0, 1).
        accountant: "pld" or "rdp".
        adjacency: Neighbouring relation. Sigma always refers to the sensitivity of adding or removing one record;
            replace-one is accounted from the same sigma and must not be doubled by the caller.

    Returns:
        Epsilon; 0.0 when nothing was released, inf when something was released without noise.

    Formal guarantees:
        The composition is (epsilon, delta)-DP for the adjacency (SOUNDNESS Theorem 2), if each step draws every record
        independently with probability q and adaptive choices depend on released values alone. PLD rounds privacy losses
        up, and gives away a part of delta that covers the rounding of its Fourier transforms.
    """
    return _epsilon(_c.normalise(mechanisms), _check_delta(delta), _check_accountant(accountant), Adjacency(adjacency))


@functools.lru_cache(maxsize=1024)
def _epsilon(mechanisms: tuple[Mechanism, ...], delta: float, accountant: str, adjacency: Adjacency) -> float:
    if not mechanisms:
        return 0.0
    if any(m.sigma == 0 for m in mechanisms):
        return math.inf
    if accountant == "rdp":
        return float(rdp.compute_epsilon(RDP_ORDERS, _c.renyi(mechanisms, RDP_ORDERS, adjacency), delta)[0])
    return _c.pld_epsilon(mechanisms, delta, adjacency)


def delta(
    mechanisms: Iterable[Mechanism],
    epsilon: float,
    accountant: str = "pld",
    adjacency: Adjacency | str = Adjacency.ADD_OR_REMOVE_ONE,
) -> float:
    """Delta of all mechanisms together at a given epsilon >= 0; the inverse of :func:`epsilon`, same guarantees."""
    if not epsilon >= 0:
        raise WeightclipError(f"delta: epsilon must be at least 0, got {epsilon}.")
    relation, released = Adjacency(adjacency), _c.normalise(mechanisms)
    if not released:
        return 0.0
    if any(m.sigma == 0 for m in released):
        return 1.0
    if _check_accountant(accountant) == "rdp":
        return float(rdp.compute_delta(RDP_ORDERS, _c.renyi(released, RDP_ORDERS, relation), epsilon)[0])
    return _c.pld_delta(released, epsilon, relation)


def calibrate_sigma(
    target_epsilon: float,
    target_delta: float,
    q: float,
    steps: int,
    accountant: str = "pld",
    adjacency: Adjacency | str = Adjacency.ADD_OR_REMOVE_ONE,
    extra_mechanisms: Sequence[Mechanism] = (),
) -> float:
    """The smallest noise multiplier, to a relative 1e-4, whose epsilon does not exceed the target.

    Args:
        target_epsilon: Positive and finite.
        target_delta: In (0, 1).
        q: Sampling rate, in (0, 1].
        steps: Number of steps, at least 1.
        accountant: "pld" or "rdp".
        adjacency: Neighbouring relation.
        extra_mechanisms: What the run releases besides (quantiles, feature statistics); it counts in the target.

    Returns:
        A sigma for which :func:`epsilon` was computed and found to be at most the target. Where delta is close to
        what PLD resolves (1e-9 at 1e5 steps), its rounding makes sigma less tight than 1e-4, never unsound.
    """
    if not (math.isfinite(target_epsilon) and target_epsilon > 0):
        raise WeightclipError(f"target_epsilon must be finite and above 0, got {target_epsilon}.")
    _check_delta(target_delta, "target_delta")
    _c.check_rate(q)
    if steps != int(steps) or steps < 1:
        raise WeightclipError(f"steps must be a whole number, at least 1, got {steps}.")
    _check_accountant(accountant)
    relation, extra = Adjacency(adjacency), _c.normalise(extra_mechanisms)
    spent = _epsilon(extra, target_delta, accountant, relation)
    if spent >= target_epsilon:
        raise WeightclipError(
            f"the extra mechanisms alone cost epsilon {spent:.4g} of a target of {target_epsilon:.4g}: raise it."
        )

    def cost(sigma: float, coarse: bool) -> float:
        released = _c.normalise([Mechanism("gaussian", sigma, q, int(steps)), *extra])
        if accountant == "pld" and coarse:
            return _c.pld_epsilon(released, target_delta, relation, coarsen=4)
        return _epsilon(released, target_delta, accountant, relation)

    if accountant == "rdp":
        tiny = [2 * target_delta**2] * len(RDP_ORDERS)  # just too large for the bound by total variation
        least = float(rdp.compute_epsilon(RDP_ORDERS, tiny, target_delta)[0])
        if target_epsilon <= least:
            raise WeightclipError(
                f"RDP certifies no epsilon below {least:.3g} at delta {target_delta:g}, the target is "
                f'{target_epsilon:g}: use accountant="pld".'
            )

    # The central limit theorem's sigma, mu^2 = q^2 T (e^(1/sigma^2) - 1), is a good first guess (and only that).
    mu = gdp_mu(target_epsilon, target_delta)
    guess = math.log1p((mu / q) ** 2 / steps) ** -0.5
    return _smallest_sigma(cost, guess, target_epsilon, f"accountant={accountant!r}, delta={target_delta:g}")


def _smallest_sigma(cost: Callable[[float, bool], float], guess: float, target: float, where: str) -> float:
    """Root of log cost(e^u) = log target on a coarse grid, then two or three exact evaluations beside it."""
    seen: dict[float, float] = {}

    def excess(u: float) -> float:
        if u not in seen:
            seen[u] = math.log(min(max(cost(math.exp(u), True), 1e-9), 1e9) / target)
        return seen[u]

    lo = hi = math.log(guess)
    while excess(hi) > 0:
        lo, hi = hi, hi + 0.1 + 2 * (hi - lo)
        if hi > 23:  # sigma = 1e10
            raise WeightclipError(f"no noise reaches epsilon {target:g} with {where}: raise epsilon or delta.")
    while excess(lo) <= 0:
        hi, lo = min(hi, lo), lo - 0.1 - 2 * abs(hi - lo)
        if lo < -9:  # sigma = 1e-4: as good as no noise
            return math.exp(lo)
    u = float(optimize.brentq(excess, lo, hi, xtol=2e-3))  # pyright: ignore[reportArgumentType]
    far = min((v for v in seen if abs(v - u) > 5e-3), key=lambda v: abs(v - u))
    slope = max(1e-3, (excess(u) - excess(far)) / (far - u))  # of -log epsilon against log sigma
    for _ in range(30):
        g = math.log(max(cost(math.exp(u), False), 1e-300) / target)
        if -0.9 * _TOLERANCE * slope <= g <= 0:
            break
        u += max(-0.5, min(0.5, (g + 0.4 * _TOLERANCE * slope) / slope))
    while cost(math.exp(u), False) > target:  # only if epsilon is not smooth here
        u += _TOLERANCE
    return math.exp(u)


@dataclass(frozen=True)
class PoissonRuns:
    """The number of runs of a search is Poisson(mean); it may be 0, and then nothing is released."""

    mean: float
    shape: float = field(default=math.inf, init=False, repr=False)


@dataclass(frozen=True)
class NegativeBinomialRuns:
    """Truncated negative binomial number of runs (at least one): shape 1 is geometric, shape 0 logarithmic."""

    mean: float
    shape: float = 1.0


def search_cost(
    mechanisms: Iterable[Mechanism],
    delta: float,
    runs: PoissonRuns | NegativeBinomialRuns,
    adjacency: Adjacency | str = Adjacency.ADD_OR_REMOVE_ONE,
) -> float:
    """Epsilon of a hyper-parameter search that releases its best run only (SOUNDNESS Theorem 4).

    Args:
        mechanisms: What *one* run releases, its score on private data included; the same bound for every candidate.
        delta: Failure probability, in (0, 1).
        runs: Law of the number of runs. It must be drawn at random, from a law fixed beforehand and kept secret, and
            each run must draw its candidate at random, independently.
        adjacency: Neighbouring relation.

    Formal guarantees:
        The selected run is (epsilon, delta)-DP for the adjacency, by Renyi divergences. A fixed number of runs, or
        looking at the others, is not covered.
    """
    if not (math.isfinite(runs.mean) and runs.mean >= 1 and runs.shape >= 0):
        raise WeightclipError(f"search_cost: the mean number of runs must be at least 1 and shape at least 0: {runs}.")
    _check_delta(delta)
    released = _c.normalise(mechanisms)
    if not released:
        return 0.0
    if any(m.sigma == 0 for m in released):
        return math.inf
    relation = Adjacency(adjacency)
    _c.check_rdp(released, relation)
    # zCDP of rounding, as in RDP itself: dp-accounting composes events, not divergences.
    padding = dp_accounting.ZCDpEvent(rho=1e-12 * sum(m.steps for m in released))
    costs = []
    for flat in (False, True):  # two valid bounds for pure mechanisms
        one = dp_accounting.ComposedDpEvent([padding, *(_c.event(m, relation, flat) for m in released)])
        with _c.quiet():
            accountant = rdp.RdpAccountant(_SEARCH_ORDERS)
            accountant.compose(dp_accounting.dp_event.RepeatAndSelectDpEvent(one, runs.mean, runs.shape))
        costs.append(float(accountant.get_epsilon(delta)))
        if all(m.sigma is not None for m in released):
            break
    return min(costs)


def gdp_delta(mu: float, epsilon: float) -> float:
    """Delta of *one* Gaussian mechanism with multiplier 1/mu: exact for it, an estimate for anything else."""
    if mu <= 0:
        return 0.0
    log_a = stats.norm.logcdf(mu / 2 - epsilon / mu)
    log_b = epsilon + stats.norm.logcdf(-mu / 2 - epsilon / mu)
    return float(-math.exp(log_a) * math.expm1(min(0.0, log_b - log_a)))


def gdp_epsilon(mu: float, delta: float) -> float:
    """Epsilon of *one* Gaussian mechanism with multiplier 1/mu: exact for it, an estimate for anything else."""
    return float(dp_accounting.get_epsilon_gaussian(1 / mu, _check_delta(delta))) if mu > 0 else 0.0


def gdp_mu(epsilon: float, delta: float) -> float:
    """The mu whose Gaussian mechanism is exactly (epsilon, delta)-DP."""
    return 1 / float(dp_accounting.get_sigma_gaussian(epsilon, _check_delta(delta)))


def gdp_estimate(mechanisms: Iterable[Mechanism]) -> float:
    """Central-limit estimate of mu for audits. Never a guarantee: its epsilon falls below the truth."""
    released = _c.normalise(mechanisms)
    if any(m.kind != "gaussian" for m in released):
        raise WeightclipError("gdp_estimate: only for Gaussian mechanisms.")
    if any(m.sigma == 0 for m in released):
        return math.inf
    return math.sqrt(math.fsum(m.steps * _c.loss_variance(m) for m in released))


def _check_delta(delta: float, name: str = "delta") -> float:
    if not 0 < delta < 1:
        raise WeightclipError(f"{name} must lie strictly between 0 and 1, got {delta}.")
    return float(delta)


def _check_accountant(accountant: str) -> str:
    if accountant not in ("pld", "rdp"):
        raise WeightclipError(f'accountant must be "pld" or "rdp", got {accountant!r}.')
    return accountant
