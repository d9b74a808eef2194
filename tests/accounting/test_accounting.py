"""Accounting: agreement with independent implementations, the known pitfalls, and calibration."""

from __future__ import annotations

import json
import math
import warnings

import pytest
from opacus.accountants import PRVAccountant, RDPAccountant
from opacus.accountants.accountant import IAccountant

from weightclip.accounting._accounting import (
    RDP_ORDERS,
    Adjacency,
    Mechanism,
    NegativeBinomialRuns,
    PoissonRuns,
    calibrate_sigma,
    delta,
    epsilon,
    gdp_delta,
    gdp_epsilon,
    gdp_estimate,
    gdp_mu,
    search_cost,
)
from weightclip.errors import WeightclipError

GRID = [  # q, sigma, steps: epsilon from 0.1 to 6 at delta = 1e-5
    (0.001, 1.5, 1000),
    (0.001, 0.7, 20_000),
    (0.004, 0.8, 4700),
    (0.01, 1.0, 2000),
    (0.01, 4.0, 5000),
    (0.02, 1.1, 500),
    (0.1, 3.0, 100),
    (0.1, 5.0, 3000),
    (0.3, 20.0, 300),
]


def gaussian(sigma: float, q: float, steps: int) -> list[Mechanism]:
    return [Mechanism("gaussian", sigma, q, steps)]


def opacus(accountant: IAccountant, q: float, sigma: float, steps: int) -> float:
    accountant.history = [(sigma, q, steps)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of orders at the end of the list
        return float(accountant.get_epsilon(delta=1e-5))


@pytest.mark.parametrize(("q", "sigma", "steps"), [*GRID, (1.0, 12.0, 30)])
def test_rdp_agrees_with_opacus(q: float, sigma: float, steps: int) -> None:
    theirs = opacus(RDPAccountant(), q, sigma, steps)
    assert 0.09 < theirs < 7
    assert epsilon(gaussian(sigma, q, steps), 1e-5, "rdp") == pytest.approx(theirs, rel=1e-3)


@pytest.mark.parametrize(("q", "sigma", "steps"), GRID)
def test_pld_agrees_with_opacus_prv(q: float, sigma: float, steps: int) -> None:
    theirs = opacus(PRVAccountant(), q, sigma, steps)
    ours = epsilon(gaussian(sigma, q, steps), 1e-5)
    assert abs(ours - theirs) < max(0.012, 0.01 * theirs)
    assert ours < epsilon(gaussian(sigma, q, steps), 1e-5, "rdp")


def test_orders_are_those_of_opacus() -> None:
    assert list(RDP_ORDERS) == RDPAccountant.DEFAULT_ALPHAS


def test_layers_accounted_as_one_understate_epsilon() -> None:
    """K = 4 layers, each with noise sigma Delta_k: the true multiplier is sigma / 2 (SOUNDNESS section 2)."""
    claimed = epsilon(gaussian(1.0, 0.01, 2000), 1e-5)
    true = epsilon(gaussian(1.0 / math.sqrt(4), 0.01, 2000), 1e-5)
    assert claimed == pytest.approx(2.58, abs=0.01)
    assert true == pytest.approx(18.1, abs=0.05)


def test_replace_one_costs_more_and_is_not_doubled_twice() -> None:
    steps = gaussian(2.0, 0.02, 300)
    add, replace = (epsilon(steps, 1e-5, adjacency=a) for a in Adjacency)
    doubled = epsilon(gaussian(1.0, 0.02, 300), 1e-5)
    twice = epsilon(gaussian(1.0, 0.02, 300), 1e-5, adjacency=Adjacency.REPLACE_ONE)
    assert add < replace < doubled < twice
    # without sampling, replacing moves the sum by exactly 2 Delta
    for accountant in ("pld", "rdp"):
        whole = epsilon(gaussian(10.0, 1.0, 5), 1e-5, accountant, Adjacency.REPLACE_ONE)
        assert whole == pytest.approx(epsilon(gaussian(5.0, 1.0, 5), 1e-5, accountant), rel=1e-4)
    with pytest.raises(WeightclipError, match="replace-one with Poisson"):
        epsilon(steps, 1e-5, "rdp", Adjacency.REPLACE_ONE)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_monotone_in_everything(accountant: str) -> None:
    def cost(sigma: float = 1.5, q: float = 0.02, steps: int = 200, delta: float = 1e-5) -> float:
        return epsilon(gaussian(sigma, q, steps), delta, accountant)

    assert cost(sigma=3) < cost() < cost(sigma=1)
    assert cost(q=0.01) < cost() < cost(q=0.03) < cost(q=1.0)
    assert cost(steps=100) < cost() < cost(steps=201)
    assert cost(delta=1e-4) < cost() < cost(delta=1e-6)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("adjacency", list(Adjacency))
def test_nothing_released_costs_nothing_and_no_noise_costs_everything(accountant: str, adjacency: Adjacency) -> None:
    assert epsilon([], 1e-5, accountant, adjacency) == 0.0
    assert epsilon(gaussian(1.0, 0.1, 0), 1e-5, accountant, adjacency) == 0.0
    assert epsilon(gaussian(0.0, 0.1, 0), 1e-5, accountant, adjacency) == 0.0
    assert delta(gaussian(1.0, 0.1, 0), 1.0, accountant, adjacency) == 0.0
    assert epsilon(gaussian(0.0, 0.1, 1), 1e-5, accountant, adjacency) == math.inf
    assert epsilon(gaussian(0.0, 1.0, 1), 1e-5, accountant, adjacency) == math.inf
    assert delta(gaussian(0.0, 0.1, 1), 1.0, accountant, adjacency) == 1.0


def test_vanishing_noise_gives_a_huge_epsilon_not_a_crash() -> None:
    assert epsilon(gaussian(0.02, 0.5, 1000), 1e-5) > 1e5
    assert epsilon(gaussian(1e-3, 0.3, 1000), 1e-5) > 1e5
    assert delta(gaussian(1e-3, 0.3, 1000), 1.0) == pytest.approx(1.0)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_composition(accountant: str) -> None:
    a, b = Mechanism("gaussian", 1.2, 0.01, 300, label="gradients"), Mechanism("gaussian", 20.0, 1.0, 2)
    both = epsilon([a, b], 1e-5, accountant)
    assert max(epsilon([a], 1e-5, accountant), epsilon([b], 1e-5, accountant)) < both
    assert both < epsilon([a], 5e-6, accountant) + epsilon([b], 5e-6, accountant)
    assert both == pytest.approx(epsilon([b, a], 1e-5, accountant), rel=1e-9)
    halves = [Mechanism("gaussian", 1.2, 0.01, 150)] * 2
    assert epsilon([*halves, b], 1e-5, accountant) == pytest.approx(both, rel=1e-12)


@pytest.mark.parametrize("adjacency", list(Adjacency))
def test_pure_mechanisms(adjacency: Adjacency) -> None:
    m = Mechanism("pure", None, 0.01, 400, epsilon0=1.0)
    one = m.sampled_epsilon(adjacency)
    tight, renyi = (epsilon([m], 1e-6, a, adjacency) for a in ("pld", "rdp"))
    assert one < tight < renyi < 400 * one
    mixed = [m, *gaussian(2.0, 0.01, 400)]
    assert epsilon(mixed, 1e-6, adjacency=adjacency) > tight
    single = Mechanism("pure", None, 1.0, 1, epsilon0=0.5)
    assert epsilon([single], 1e-12) == pytest.approx(0.5, rel=1e-3)
    assert epsilon([Mechanism("pure", None, 0.3, 10, epsilon0=0.0)], 1e-6) == 0.0


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_delta_inverts_epsilon(accountant: str) -> None:
    steps = gaussian(1.1, 0.01, 700)
    assert delta(steps, epsilon(steps, 1e-5, accountant), accountant) == pytest.approx(1e-5, rel=1e-4)
    with pytest.raises(WeightclipError, match="epsilon must be"):
        delta(steps, -1.0, accountant)


@pytest.mark.parametrize("bad", [0.0, 1.0, -1e-5, 2.0, math.nan])
def test_delta_is_validated(bad: float) -> None:
    for call in (
        lambda: epsilon([], bad),
        lambda: calibrate_sigma(1.0, bad, 0.1, 10),
        lambda: search_cost([], bad, PoissonRuns(2)),
    ):
        with pytest.raises(WeightclipError, match="strictly between 0 and 1"):
            call()


# calibration


@pytest.mark.parametrize(
    ("target", "q", "steps", "accountant", "adjacency"),
    [
        (1.0, 0.01, 1000, "pld", "add_or_remove_one"),
        (1.0, 0.01, 1000, "rdp", "add_or_remove_one"),
        (3.0, 256 / 60_000, 4700, "pld", "add_or_remove_one"),
        (2.0, 0.05, 100, "pld", "replace_one"),
        (0.05, 0.001, 5000, "pld", "add_or_remove_one"),
        (1.0, 1.0, 50, "pld", "add_or_remove_one"),
        (1.0, 1.0, 50, "rdp", "replace_one"),
        (1.0, 0.01, 100_000, "pld", "add_or_remove_one"),
        (8.0, 0.1, 100, "pld", "add_or_remove_one"),
    ],
)
def test_calibration_is_sound_and_tight(target: float, q: float, steps: int, accountant: str, adjacency: str) -> None:
    sigma = calibrate_sigma(target, 1e-5, q, steps, accountant, adjacency)
    assert epsilon(gaussian(sigma, q, steps), 1e-5, accountant, adjacency) <= target
    assert epsilon(gaussian(sigma * (1 - 1e-4), q, steps), 1e-5, accountant, adjacency) > target


@pytest.mark.parametrize(
    "extra", [Mechanism("gaussian", 30.0, 1.0, 1), Mechanism("pure", None, 0.01, 50, epsilon0=0.5)]
)
def test_calibration_counts_the_other_mechanisms(extra: Mechanism) -> None:
    sigma = calibrate_sigma(1.0, 1e-5, 0.02, 100, extra_mechanisms=[extra])
    assert 0.999 < epsilon([*gaussian(sigma, 0.02, 100), extra], 1e-5) <= 1.0
    assert sigma > calibrate_sigma(1.0, 1e-5, 0.02, 100)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"target_epsilon": 0.0}, "target_epsilon"),
        ({"target_epsilon": -1.0}, "target_epsilon"),
        ({"target_epsilon": math.inf}, "target_epsilon"),
        ({"target_delta": 0.0}, "target_delta"),
        ({"q": 0.0}, "sampling rate"),
        ({"q": 1.5}, "sampling rate"),
        ({"steps": 0}, "steps"),
        ({"steps": 2.5}, "steps"),
        ({"accountant": "gdp"}, "accountant"),
        ({"adjacency": "zero_out"}, "adjacency"),
        ({"target_epsilon": 0.01, "accountant": "rdp"}, "RDP certifies no epsilon below"),
        ({"accountant": "rdp", "adjacency": "replace_one"}, "replace-one"),
        ({"extra_mechanisms": [Mechanism("gaussian", 1.0, 1.0, 1)]}, "extra mechanisms alone"),
    ],
)
def test_calibration_errors_are_one_clear_line(change: dict, match: str) -> None:
    arguments = {"target_epsilon": 1.0, "target_delta": 1e-5, "q": 0.1, "steps": 10} | change
    with pytest.raises(WeightclipError, match=match) as error:
        calibrate_sigma(**arguments)
    assert "\n" not in str(error.value)


# search, GDP, JSON


@pytest.mark.parametrize("law", [PoissonRuns, NegativeBinomialRuns, lambda mean: NegativeBinomialRuns(mean, shape=0.0)])
def test_a_search_costs_more_than_a_run_and_less_than_composing_all(law) -> None:
    run = gaussian(1.5, 0.01, 500)
    one = epsilon(run, 1e-6, "rdp")
    few, many = search_cost(run, 1e-6, law(5)), search_cost(run, 1e-6, law(100))
    assert one < few < many < epsilon(run * 100, 1e-6, "rdp")
    assert search_cost([], 1e-6, law(5)) == 0.0
    assert search_cost(gaussian(0.0, 0.1, 1), 1e-6, law(5)) == math.inf
    with pytest.raises(WeightclipError, match="mean number of runs"):
        search_cost(run, 1e-6, law(0.5))
    with pytest.raises(WeightclipError, match="replace-one"):
        search_cost(run, 1e-6, law(5), Adjacency.REPLACE_ONE)


def test_search_cost_of_pure_runs_against_the_theorem() -> None:
    """A geometric number of eps-DP runs is 3 eps-DP at most (Liu and Talwar 2019)."""
    cost = search_cost([Mechanism("pure", None, 1.0, 1, epsilon0=0.2)], 1e-9, NegativeBinomialRuns(50))
    assert 0.2 < cost <= 0.6 + 0.05  # the finite list of orders costs the rest


def test_gdp_is_the_exact_gaussian_curve() -> None:
    for mu in (0.1, 1.0, 4.0):
        assert gdp_delta(mu, gdp_epsilon(mu, 1e-5)) == pytest.approx(1e-5, rel=1e-6)
        assert gdp_mu(gdp_epsilon(mu, 1e-5), 1e-5) == pytest.approx(mu, rel=1e-6)
        assert epsilon(gaussian(1 / mu, 1.0, 1), 1e-5) == pytest.approx(gdp_epsilon(mu, 1e-5), rel=1e-4)
    assert gdp_delta(1.0, 0.0) == pytest.approx(0.382925, abs=1e-6)
    assert gdp_delta(0.0, 1.0) == 0.0 and gdp_epsilon(0.0, 1e-5) == 0.0
    assert gdp_delta(0.01, 50.0) == 0.0


def test_gdp_estimate_falls_below_the_truth() -> None:
    """Why it is called an estimate: the central limit is not reached at this rate and noise."""
    steps = gaussian(0.6, 0.002, 2000)
    assert gdp_epsilon(gdp_estimate(steps), 1e-5) < 0.95 * epsilon(steps, 1e-5)
    assert gdp_estimate(gaussian(5.0, 1.0, 4)) == pytest.approx(0.4)
    assert gdp_estimate(gaussian(0.0, 1.0, 4)) == math.inf
    with pytest.raises(WeightclipError, match="Gaussian"):
        gdp_estimate([Mechanism("pure", None, 1.0, 1, epsilon0=1.0)])


@pytest.mark.parametrize(
    "m", [Mechanism("gaussian", 1.5, 0.1, 10, label="gradients"), Mechanism("pure", None, 1.0, 3, epsilon0=0.5)]
)
def test_json_round_trip(m: Mechanism) -> None:
    assert Mechanism.from_json(json.loads(json.dumps(m.to_json()))) == m
