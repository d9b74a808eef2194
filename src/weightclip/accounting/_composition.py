"""Composition of mechanisms by Renyi divergences and by privacy loss distributions, over dp-accounting."""

from __future__ import annotations

import contextlib
import enum
import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import dp_accounting
import numpy as np
from absl import logging
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.rdp import rdp_privacy_accountant

from weightclip.errors import WeightclipError

_INTERVAL = 1e-4  # PLD's default grid; finer where a step's privacy loss is itself small
_FINEST = 2.0**-7  # of the above: below it rounding outweighs the grid
_MAX_CELLS = 250_000  # of one step's distribution: a coarser grid stays an upper bound
_MAX_COMPOSED = 2_000_000


class Adjacency(enum.Enum):
    """Which data sets count as neighbours."""

    ADD_OR_REMOVE_ONE = "add_or_remove_one"
    REPLACE_ONE = "replace_one"

    @classmethod
    def _missing_(cls, value: object) -> Adjacency:
        raise WeightclipError(f'adjacency must be "add_or_remove_one" or "replace_one", got {value!r}.')


@dataclass(frozen=True)
class Mechanism:
    """A mechanism applied ``steps`` times, each time to a fresh Poisson sample.

    Attributes:
        kind: "gaussian", or "pure" for one that is epsilon0-DP (K-norm, Laplace).
        sigma: Noise multiplier of a Gaussian: noise over the l2 sensitivity Delta of *adding or removing* a record.
            Layers released together are one mechanism (SOUNDNESS section 1, rule 4).
        q: Sampling rate in (0, 1]; 1 means no sampling.
        steps: Number of applications.
        epsilon0: Parameter of a pure mechanism before sampling, for adding or removing a record.
        label: For people; accounting ignores it.
    """

    kind: str
    sigma: float | None
    q: float
    steps: int
    epsilon0: float | None = None
    label: str = ""

    def __post_init__(self) -> None:
        if self.kind not in ("gaussian", "pure"):
            raise WeightclipError(f'Mechanism: kind must be "gaussian" or "pure", got {self.kind!r}.')
        mine, other = (self.sigma, self.epsilon0) if self.kind == "gaussian" else (self.epsilon0, self.sigma)
        if mine is None or other is not None or not (math.isfinite(mine) and mine >= 0):
            raise WeightclipError(
                f"Mechanism: a {self.kind} one needs {'sigma' if self.kind == 'gaussian' else 'epsilon0'} alone, "
                f"finite and at least 0; got sigma={self.sigma}, epsilon0={self.epsilon0}."
            )
        check_rate(self.q)
        if self.steps != int(self.steps) or self.steps < 0:
            raise WeightclipError(f"Mechanism: steps must be a whole number, at least 0, got {self.steps}.")

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Mechanism:
        """The inverse of :meth:`to_json`."""
        return cls(**data)

    def sampled_epsilon(self, adjacency: Adjacency) -> float:
        """Epsilon of one application of a pure mechanism, amplified by Poisson sampling."""
        assert self.epsilon0 is not None
        up = math.log1p(self.q * math.expm1(self.epsilon0)) if self.epsilon0 < 500 else self.epsilon0
        if adjacency is Adjacency.ADD_OR_REMOVE_ONE:
            return up
        # (1-q)A + qB against (1-q)A + qB', both B and B' within epsilon0 of A
        return up + (self.epsilon0 if self.q == 1 else -math.log1p(self.q * math.expm1(-self.epsilon0)))


def check_rate(q: float) -> None:
    if not 0 < q <= 1:
        raise WeightclipError(f"the sampling rate q must lie in (0, 1], got {q}.")


def check_rdp(mechanisms: tuple[Mechanism, ...], adjacency: Adjacency) -> None:
    if adjacency is Adjacency.REPLACE_ONE and any(m.sigma is not None and m.q < 1 for m in mechanisms):
        raise WeightclipError('RDP has no bound for replace-one with Poisson sampling: use accountant="pld".')


def normalise(mechanisms: Iterable[Mechanism]) -> tuple[Mechanism, ...]:
    """Merges equal mechanisms, and unsampled Gaussians into one (exactly: their 1/sigma^2 add up)."""
    counts: dict[Mechanism, int] = {}
    precision = 0.0
    for m in mechanisms:
        if m.steps == 0 or m.epsilon0 == 0:
            continue
        if m.kind == "gaussian" and m.q == 1 and m.sigma:
            precision += m.steps / m.sigma**2
            continue
        bare = Mechanism(m.kind, m.sigma, m.q, 1, m.epsilon0)
        counts[bare] = counts.get(bare, 0) + int(m.steps)
    merged = [replace(m, steps=n) for m, n in counts.items()]
    if precision > 0:
        merged.append(Mechanism("gaussian", precision**-0.5, 1.0, 1))
    return tuple(merged)


# RDP


def event(m: Mechanism, adjacency: Adjacency, flat: bool = False) -> dp_accounting.DpEvent:
    """A mechanism in dp-accounting's terms, for RDP.

    A pure one has divergences of at most min(epsilon, alpha epsilon^2/2); ``flat`` takes the first for all orders.
    """
    if m.sigma is None:
        e = m.sampled_epsilon(adjacency)
        zcdp = dp_accounting.ZCDpEvent(rho=0.0, xi=e) if flat else dp_accounting.ZCDpEvent(rho=e * e / 2)
        return dp_accounting.SelfComposedDpEvent(zcdp, m.steps)
    # Unsampled replace-one moves the sum by 2 Delta; dp-accounting's RDP leaves that to its caller.
    sigma = m.sigma / 2 if adjacency is Adjacency.REPLACE_ONE else m.sigma
    gaussian = dp_accounting.GaussianDpEvent(sigma)
    step = gaussian if m.q == 1 else dp_accounting.PoissonSampledDpEvent(m.q, gaussian)
    return dp_accounting.SelfComposedDpEvent(step, m.steps)


def renyi(mechanisms: tuple[Mechanism, ...], orders: tuple[float, ...], adjacency: Adjacency) -> list[float]:
    """Renyi divergences of the composition, one for each order."""
    check_rdp(mechanisms, adjacency)
    total = np.zeros(len(orders))
    for m in mechanisms:
        total += m.steps * _renyi_of_step(replace(m, steps=1), orders, adjacency)
    return total.tolist()


@functools.lru_cache(maxsize=256)
def _renyi_of_step(m: Mechanism, orders: tuple[float, ...], adjacency: Adjacency) -> np.ndarray:
    alpha = np.array(orders)
    if m.sigma is None:  # randomised response is the worst epsilon-DP mechanism
        e = m.sampled_epsilon(adjacency)
        log_p = -np.logaddexp(0.0, -e)
        values = np.logaddexp(log_p + (alpha - 1) * e, log_p - alpha * e) / (alpha - 1)
    else:
        with quiet():
            values = rdp_privacy_accountant.RdpAccountant(orders).compose(event(m, adjacency)).rdp
    # The logarithm behind these numbers carries rounding errors near 1e-14, which can make a small divergence
    # negative; dp-accounting would then report epsilon = 0, whatever the number of steps.
    return np.maximum(values, 0.0) * (1 + 1e-12) + 1e-13 / (alpha - 1)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps dp-accounting from reporting orders that it leaves out, which is harmless."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)


# PLD


def loss_variance(m: Mechanism, adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE) -> float:
    """Variance of one step's privacy loss, roughly: q^2 (e^(1/sigma^2) - 1)."""
    if m.sigma is None:
        return m.sampled_epsilon(adjacency) ** 2
    precision = m.sigma**-2
    return precision if m.q == 1 else m.q**2 * math.expm1(min(precision, 100.0))


def interval(mechanisms: tuple[Mechanism, ...], adjacency: Adjacency) -> float:
    """Grid of the privacy losses: 1e-4, finer for small losses, coarser where the memory would not do.

    Rounding to a grid of width h adds about h^2/6 to the variance of each step's loss, so h is kept below a thirtieth
    of the losses' root mean square (1e-4 of epsilon). Any grid gives an upper bound. Powers of two keep epsilon
    smooth in sigma.
    """
    variance = math.fsum(m.steps * loss_variance(m, adjacency) for m in mechanisms)
    h = min(_INTERVAL, math.sqrt(variance / sum(m.steps for m in mechanisms)) / 30)
    spread = 0.0
    for m in mechanisms:
        if m.sigma is None:
            top = m.sampled_epsilon(adjacency)
            spread += m.steps * top * min(top, 1.0)
        else:  # the largest loss of a step, 10 standard deviations out: log(1 - q + q e^w)
            w = 10 / m.sigma + 0.5 / m.sigma**2
            top = float(np.logaddexp(math.log1p(-m.q), math.log(m.q) + w)) if m.q < 1 else w
            spread += m.steps * min(loss_variance(m), m.sigma**-2)
        h = max(h, top / _MAX_CELLS)
    h = max(h, (20 * math.sqrt(spread) + 2 * spread) / _MAX_COMPOSED)
    return _INTERVAL * max(_FINEST, 2.0 ** round(math.log2(h / _INTERVAL)))


def _pure_pld(e: float, h: float) -> pld.PrivacyLossDistribution:
    """Randomised response, which dominates every e-DP mechanism, on the grid by connecting the dots.

    Rounding its two atoms up instead would cost up to h for each step.
    """
    below = math.floor(e / h)
    points = np.array(sorted({-below - 1, -below, below, below + 1}))
    x = points * h
    inside = np.exp(e - np.logaddexp(0.0, e)) * -np.expm1(x - e)  # (e^e - e^x) / (1 + e^e)
    hockey = np.where(x >= e, 0.0, np.where(x <= -e, -np.expm1(np.minimum(x, 0.0)), inside))
    return pld.PrivacyLossDistribution(pld_pmf.create_pmf_pessimistic_connect_dots(h, points, hockey))


@functools.lru_cache(maxsize=8)
def _step_pld(m: Mechanism, h: float, adjacency: Adjacency) -> pld.PrivacyLossDistribution:
    if m.sigma is None:
        return _pure_pld(m.sampled_epsilon(adjacency), h)
    relation = dp_accounting.NeighboringRelation[adjacency.name]
    return pld.from_gaussian_mechanism(
        m.sigma, value_discretization_interval=h, sampling_prob=m.q, neighboring_relation=relation
    )


@functools.lru_cache(maxsize=8)
def _steps_pld(m: Mechanism, h: float, adjacency: Adjacency) -> pld.PrivacyLossDistribution:
    one = _step_pld(replace(m, steps=1), h, adjacency)
    return one if m.steps == 1 else one.self_compose(m.steps)


def compose(mechanisms: tuple[Mechanism, ...], h: float, adjacency: Adjacency) -> pld.PrivacyLossDistribution:
    """The privacy loss distribution of all mechanisms, on a grid of width h."""
    return functools.reduce(lambda a, b: a.compose(b), (_steps_pld(m, h, adjacency) for m in mechanisms))


def rounding(mechanisms: tuple[Mechanism, ...]) -> float:
    """Delta given away for rounding in dp-accounting's Fourier transforms, whose T-th power magnifies it T times.

    Measured on Gaussians with a known answer and by the scatter of delta over neighbouring sigmas: up to T 2^-52, in
    either direction (at T = 1e5 and delta = 1e-12 the bare epsilon was 0.22 too low). Eight times that is given away.
    """
    return 8 * 2.0**-52 * sum(m.steps for m in mechanisms)


def pld_epsilon(mechanisms: tuple[Mechanism, ...], delta: float, adjacency: Adjacency, coarsen: float = 1.0) -> float:
    """Epsilon by PLD; inf where the losses are too large for floating point."""
    left = delta - rounding(mechanisms)
    if left <= 0:
        raise WeightclipError(
            f"PLD resolves delta only above {rounding(mechanisms):.1e} here, got {delta:.1e}: raise delta or use RDP."
        )
    try:
        composed = compose(mechanisms, coarsen * interval(mechanisms, adjacency), adjacency)
        return float(composed.get_epsilon_for_delta(left))
    except OverflowError:
        return math.inf


def pld_delta(mechanisms: tuple[Mechanism, ...], epsilon: float, adjacency: Adjacency) -> float:
    """Delta by PLD; 1 where the losses are too large for floating point."""
    try:
        composed = compose(mechanisms, interval(mechanisms, adjacency), adjacency)
        value = composed.get_delta_for_epsilon(epsilon)
    except OverflowError:
        return 1.0
    return min(1.0, float(value) + rounding(mechanisms))  # pyright: ignore[reportArgumentType]
