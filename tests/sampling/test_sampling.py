"""The law of Poisson draws, and passes over them."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tests.sampling_kit import Numbers, Spy, draws, poisson, tensors

from weightclip.sampling._draws import Cutter, largest_batch, poisson_indices

# The law of the draws -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("q", [0.01, 0.2, 0.4, 0.5, 0.7, 0.97])
def test_inclusions_are_independent_bernoulli(q: float) -> None:
    n, trials = 24, 6000
    included = np.zeros((trials, n))
    for t in range(trials):
        included[t, poisson_indices(np.random.default_rng([7, t]), q, n)] = 1
    # Each index on its own: a sum of n squared z-scores.
    z = (included.sum(0) - trials * q) / np.sqrt(trials * q * (1 - q))
    assert stats.chi2.sf((z**2).sum(), n) > 1e-4
    # Each pair: the centred products are uncorrelated over pairs, with variance (q(1-q))^2.
    c = included - q
    pairs = (c.T @ c)[np.triu_indices(n, 1)] / (np.sqrt(trials) * q * (1 - q))
    assert stats.chi2.sf((pairs**2).sum(), pairs.size) > 1e-4
    # The size of the draw.
    size = included.sum(1)
    assert stats.kstest(size + np.random.default_rng(0).random(trials), _smooth_binomial(n, q)).pvalue > 1e-4


def _smooth_binomial(n: int, q: float):
    def cdf(x: np.ndarray) -> np.ndarray:
        k = np.floor(x)
        return stats.binom.cdf(k - 1, n, q) + (x - k) * stats.binom.pmf(k, n, q)

    return cdf


@pytest.mark.parametrize("q", [1e-9, 1e-5])
def test_small_rates_have_the_right_gaps(q: float) -> None:
    gaps = np.concatenate(
        [np.diff(poisson_indices(np.random.default_rng([3, t]), q, int(2000 / q)), prepend=-1) for t in range(10)]
    )
    assert stats.kstest(gaps * -np.log1p(-q), "expon").pvalue > 1e-4
    # The low bits are uniform: a gap read off a double would repeat them.
    low = np.bincount(gaps % 16, minlength=16)
    assert stats.chisquare(low).pvalue > 1e-4


@pytest.mark.parametrize("q", [5e-324, 1e-300, 1e-17])
def test_vanishing_rates_draw_nothing(q: float) -> None:
    assert all(poisson_indices(np.random.default_rng(t), q, 2**40).size == 0 for t in range(20))


def test_rates_near_one_leave_out_the_right_share() -> None:
    q, n = 1 - 1e-4, 200_000
    missing = [n - poisson_indices(np.random.default_rng([5, t]), q, n).size for t in range(40)]
    assert stats.binomtest(sum(missing), 40 * n, 1e-4).pvalue > 1e-4
    assert poisson_indices(np.random.default_rng(0), 1 - 2**-53, 1000).tolist() == list(range(1000))


@given(st.floats(1e-6, 1, exclude_max=True), st.integers(1, 3000), st.integers(0, 50_000), st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_a_longer_data_set_extends_the_draw(q: float, m: int, extra: int, seed: int) -> None:
    short = poisson_indices(np.random.default_rng(seed), q, m)
    long = poisson_indices(np.random.default_rng(seed), q, m + extra)
    assert np.array_equal(short, long[long < m])
    assert (np.diff(long) > 0).all() and (long.size == 0 or 0 <= long[0] <= long[-1] < m + extra)


@pytest.mark.parametrize("q", [0.05, 0.3, 0.45, 0.6, 0.9])
def test_the_draw_is_extended_across_chunks(q: float) -> None:
    long = poisson_indices(np.random.default_rng(1), q, 200_000)
    for m in (1, 300, 700, 1000, 1500, 5000, 20_000, 90_000):
        assert np.array_equal(poisson_indices(np.random.default_rng(1), q, m), long[long < m])


def test_no_memory_in_the_number_of_rows() -> None:
    tracemalloc.start()
    loader, _ = poisson(Numbers(10**8), q=1e-5, loader={"shuffle": True})
    sizes = [loader.indices(t).size for t in range(5)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert all(800 < s < 1200 for s in sizes)
    assert peak < 1_000_000  # one bit per row would be 12.5 MB


# Passes and pieces ----------------------------------------------------------------------------------------------------


def test_draw_depends_on_seed_and_number_alone() -> None:
    small, small_infos = poisson(tensors(30))
    large, large_infos = poisson(tensors(50))
    first = draws(small, small_infos)
    assert len(small) == len(first) == 5
    assert first == [[i for i in d if i < 30] for d in draws(large, large_infos)]
    assert first != draws(*poisson(tensors(30), seed=1))
    streams = Spy.seeded(0)
    assert isinstance(streams, Spy)
    streams.asked = []
    loader, infos = poisson(tensors(30), streams=streams)
    draws(loader, infos)
    assert streams.asked == [("sampling", t) for t in range(5)]
    assert draws(loader, infos) != first and loader.draws == 10
    assert [i.draw for i in infos] == list(range(5, 10))


@pytest.mark.parametrize(
    "extra", [{}, {"max_physical_batch_size": 3}, {"strict": True}, {"max_physical_batch_size": 3, "strict": True}]
)
def test_workers_change_nothing(extra: dict[str, Any]) -> None:
    expected = draws(*poisson(tensors(40), **extra))
    assert draws(*poisson(Numbers(40), **extra)) == expected
    loader, infos = poisson(Numbers(40), loader={"num_workers": 2, "persistent_workers": True}, **extra)
    assert draws(loader, infos) == expected
    second = draws(loader, infos)
    fast, fast_infos = poisson(tensors(40), **extra)
    fast.load_state_dict({"draws": 5})
    assert second == draws(fast, fast_infos)


def test_leaving_a_pass_with_workers_loses_no_draw() -> None:
    loader, infos = poisson(Numbers(40), loader={"num_workers": 1, "persistent_workers": True})
    for _ in loader:
        break
    assert loader.draws == 1  # the workers are further ahead
    draws(loader, infos)
    assert [i.draw for i in infos] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("dataset", [tensors(60), Numbers(60)], ids=["fast", "loader"])
@pytest.mark.parametrize("size", [1, 4, 1000])
def test_pieces_cover_the_draw_in_order_and_their_number_is_public(dataset: Any, size: int) -> None:
    loader, infos = poisson(dataset, max_physical_batch_size=size)
    count = -(-largest_batch(4, 0.2, 60) // size)
    assert loader.pieces == count
    for t, got in enumerate(draws(loader, infos)):
        assert got == loader.indices(t).tolist()
        pieces = [i for i in infos if i.draw == t]
        assert [p.piece for p in pieces] == list(range(count))
        assert [p.last for p in pieces] == [False] * (count - 1) + [True]
        rows = [min(size, max(0, len(got) - size * k)) for k in range(count)]
        assert [p.rows for p in pieces] == [max(1, r) for r in rows]
        assert [None if p.mask is None else p.mask.tolist() for p in pieces] == [None if r else [False] for r in rows]


def test_a_draw_that_does_not_fit_gets_more_pieces() -> None:
    """The chance is 1e-25: a cutter that was told too small a number shows it."""
    for shuffled in (False, True):
        pieces = list(Cutter(4, 2, shuffled).cut(0, np.arange(11), 11, np.random.default_rng(0)))
        assert len(pieces) == 3 and pieces[-1].last
        assert sorted(np.concatenate([p.indices for p in pieces]).tolist()) == list(range(11))


@pytest.mark.parametrize("dataset", [tensors(7), Numbers(7)], ids=["fast", "loader"])
@pytest.mark.parametrize("size", [None, 3, 7])
def test_rate_one_yields_every_record_once_in_order(dataset: Any, size: int | None) -> None:
    for q, batch_size in ((1.0, 2), (None, 7), (None, 50)):
        loader, infos = poisson(dataset, q=q, loader={"batch_size": batch_size}, max_physical_batch_size=size)
        assert len(loader) == 1 and loader.sample_rate == 1.0
        assert draws(loader, infos) == [list(range(7))]
        assert [i.rows for i in infos] == ([3, 3, 1] if size == 3 else [7])
        assert draws(loader, infos) == [list(range(7))] and infos[-1].draw == 1


@pytest.mark.parametrize(("q", "passes"), [(0.3, 3), (0.7, 1), (0.04, 25), (None, 6)])
def test_length_of_a_pass(q: float | None, passes: int) -> None:
    loader, _ = poisson(tensors(25), q=q)  # None: 4 / 25
    assert len(loader) == passes == sum(1 for _ in loader)
    assert loader.expected_batch == pytest.approx(25 * (q or 0.16))
