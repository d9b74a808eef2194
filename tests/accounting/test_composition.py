"""The composition under the accountant: never below a known truth, whatever the rounding does."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from dp_accounting import get_epsilon_gaussian
from scipy import optimize, stats

from weightclip.accounting import _composition as c
from weightclip.accounting._composition import Adjacency, Mechanism
from weightclip.errors import WeightclipError

ADD, REPLACE = Adjacency.ADD_OR_REMOVE_ONE, Adjacency.REPLACE_ONE


def hockey_stick(sigma: float, p: tuple[float, float], q: tuple[float, float], epsilon: float) -> float:
    """Max over both tails of P - e^epsilon Q, for (1 - rate) N(0) + rate N(shift): their ratio is monotone."""

    def law(f, x: float, mixture: tuple[float, float]) -> float:
        rate, shift = mixture
        return float((1 - rate) * f(x, 0, sigma) + rate * f(x, shift, sigma))

    def excess(x: float) -> float:
        return math.log(law(stats.norm.pdf, x, p) / law(stats.norm.pdf, x, q)) - epsilon

    if excess(-15.0) * excess(15.0) > 0:
        return 0.0  # the ratio never reaches e^epsilon
    x = float(optimize.brentq(excess, -15, 15, xtol=1e-14))  # pyright: ignore[reportArgumentType]
    return max(law(f, x, p) - math.exp(epsilon) * law(f, x, q) for f in (stats.norm.cdf, stats.norm.sf))


@pytest.mark.parametrize("q", [0.05, 0.6])
@pytest.mark.parametrize("sigma", [0.8, 2.0])
def test_one_sampled_step_against_the_exact_divergence(q: float, sigma: float) -> None:
    none, plus, minus = (0.0, 0.0), (q, 1.0), (q, -1.0)
    step = (Mechanism("gaussian", sigma, q, 1),)
    for epsilon in (0.04999, 0.05, 0.4):
        truth = max(hockey_stick(sigma, none, plus, epsilon), hockey_stick(sigma, plus, none, epsilon))
        assert truth > 0
        assert truth - 1e-13 <= c.pld_delta(step, epsilon, ADD) <= truth + 1e-6
        truth = hockey_stick(sigma, plus, minus, epsilon)  # replace-one: the same Delta on either side
        assert truth - 1e-13 <= c.pld_delta(step, epsilon, REPLACE) <= truth + 1e-6


@pytest.mark.parametrize(("sigma", "steps"), [(10.0, 100), (100.0, 10_000), (300.0, 100_000)])
def test_many_steps_never_fall_below_the_exact_gaussian_curve(sigma: float, steps: int) -> None:
    """dp-accounting alone does: 0.006 at T = 1e5 and delta = 1e-10, by rounding in its Fourier transforms."""
    m = (Mechanism("gaussian", sigma, 1.0, steps),)  # not normalised, so that it is composed the long way
    for delta in (1e-3, 1e-5, 1e-8, 1e-10, 1e-11, 1e-12):
        exact = get_epsilon_gaussian(sigma / math.sqrt(steps), delta)
        if delta <= c.rounding(m):
            with pytest.raises(WeightclipError, match="PLD resolves delta"):
                c.pld_epsilon(m, delta, ADD)
        else:
            value = c.pld_epsilon(m, delta, ADD)
            assert value >= exact
            assert value <= exact * 1.002 or delta < 20 * c.rounding(m)


@pytest.mark.parametrize("q", [1e-6, 1e-4, 0.01, 0.3])
@pytest.mark.parametrize("sigma", [0.6, 3.0, 1000.0])
def test_renyi_divergences_never_fall_below_exact_ones(q: float, sigma: float) -> None:
    orders = (2.0, 3.0, 10.0, 63.0)
    values = c.renyi((Mechanism("gaussian", sigma, q, 1),), orders, ADD)
    with mpmath.workdps(60):
        for alpha, value in zip(orders, values, strict=True):
            n, rate, s = int(alpha), mpmath.mpf(q), mpmath.mpf(sigma)
            terms = (
                mpmath.binomial(n, k) * rate**k * (1 - rate) ** (n - k) * mpmath.exp(k * (k - 1) / (2 * s**2))
                for k in range(n + 1)
            )
            exact = float(mpmath.log(mpmath.fsum(terms)) / (n - 1))
            assert exact <= value <= exact * (1 + 1e-9) + 2e-13


@pytest.mark.parametrize("e", [1e-5, 0.0173, 1.0, 30.0])
@pytest.mark.parametrize("h", [1e-4, 0.003])
def test_pure_step_dominates_randomised_response_tightly(e: float, h: float) -> None:
    distribution = c._pure_pld(e, h)
    for x in np.linspace(0, 1.2 * e, 25):
        truth = max(0.0, -math.expm1(x - e) / (1 + math.exp(-e)))
        value = float(distribution.get_delta_for_epsilon(float(x)))  # pyright: ignore[reportArgumentType]
        assert truth - 1e-15 <= value <= truth + h / 2


@pytest.mark.parametrize("e", [1e-4, 0.3, 8.0])
def test_renyi_divergences_of_pure_mechanisms(e: float) -> None:
    orders = (1.1, 2.0, 12.0, 60.0)
    values = c.renyi((Mechanism("pure", None, 1.0, 3, epsilon0=e),), orders, ADD)
    for alpha, value in zip(orders, values, strict=True):
        with mpmath.workdps(50):
            a, x = mpmath.mpf(alpha), mpmath.mpf(e)  # Mironov 2017, for randomised response
            exact = float(3 * mpmath.log((mpmath.exp(a * x) + mpmath.exp((1 - a) * x)) / (1 + mpmath.exp(x))) / (a - 1))
        assert exact <= value <= exact + 1e-11 * (1 + e) and value <= 3 * min(e, alpha * e * e / 2) + 1e-11


@pytest.mark.parametrize(("e", "steps"), [(0.0173, 500), (0.4, 20)])
def test_pure_steps_against_the_binomial_formula(e: float, steps: int) -> None:
    """k-fold randomised response: sum of C(T, k) (e^(ke) - e^(x + (T-k)e))_+ / (1 + e^e)^T."""
    m = (Mechanism("pure", None, 1.0, steps, epsilon0=e),)
    k = np.arange(steps + 1)
    log_up = stats.binom.logpmf(k, steps, 1 / (1 + math.exp(-e)))
    loss = (2 * k - steps) * e
    for x in (0.1, 1.0, 2.0):
        truth = float(np.sum(np.exp(log_up) * np.maximum(0.0, -np.expm1(x - loss))))
        assert truth <= c.pld_delta(m, x, ADD) <= truth * 1.005 + 1e-9


def test_equal_mechanisms_are_merged_and_unsampled_gaussians_combined() -> None:
    a, b = Mechanism("gaussian", 2.0, 0.1, 3, label="a"), Mechanism("gaussian", 2.0, 0.1, 4, label="b")
    assert c.normalise([a, b, Mechanism("gaussian", 5.0, 0.1, 0)]) == (Mechanism("gaussian", 2.0, 0.1, 7),)
    (merged,) = c.normalise([Mechanism("gaussian", 4.0, 1.0, 8), Mechanism("gaussian", 2.0, 1.0, 2)])
    assert merged.steps == 1 and merged.sigma == pytest.approx(1.0)


def test_amplification_of_pure_mechanisms() -> None:
    m = Mechanism("pure", None, 0.01, 1, epsilon0=1.0)
    assert m.sampled_epsilon(ADD) == pytest.approx(math.log(1 + 0.01 * (math.e - 1)))
    assert m.sampled_epsilon(REPLACE) == pytest.approx(math.log((0.99 + 0.01 * math.e) / (0.99 + 0.01 / math.e)))
    whole = Mechanism("pure", None, 1.0, 1, epsilon0=40.0)
    assert whole.sampled_epsilon(ADD) == pytest.approx(40) and whole.sampled_epsilon(REPLACE) == pytest.approx(80)
    assert math.isfinite(Mechanism("pure", None, 0.5, 1, epsilon0=5000.0).sampled_epsilon(REPLACE))


def test_any_grid_is_an_upper_bound_and_the_default_is_within_a_thousandth() -> None:
    m = (Mechanism("gaussian", 5.0, 0.001, 1000),)
    h = c.interval(m, ADD)
    fine, default, coarse = (float(c.compose(m, k * h, ADD).get_epsilon_for_delta(1e-6)) for k in (0.25, 1, 16))
    assert fine * (1 - 1e-6) <= default <= fine * 1.001
    assert default < coarse


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        (("magic", 1.0, 0.1, 1), "kind"),
        (("gaussian", None, 0.1, 1), "sigma alone"),
        (("gaussian", -1.0, 0.1, 1), "at least 0"),
        (("gaussian", math.nan, 0.1, 1), "finite"),
        (("gaussian", 1.0, 0.1, 1, 2.0), "sigma alone"),
        (("pure", 1.0, 0.1, 1, 2.0), "epsilon0 alone"),
        (("gaussian", 1.0, 0.0, 1), "sampling rate"),
        (("gaussian", 1.0, 1.1, 1), "sampling rate"),
        (("gaussian", 1.0, 0.1, -1), "steps"),
        (("gaussian", 1.0, 0.1, 1.5), "steps"),
    ],
)
def test_mechanisms_refuse_nonsense(fields: tuple, match: str) -> None:
    with pytest.raises(WeightclipError, match=match):
        Mechanism(*fields)
