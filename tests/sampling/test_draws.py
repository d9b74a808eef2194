"""The largest draw that is allowed for: exact, and a function of public constants (its law: test_sampling.py)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from weightclip.sampling._draws import TAIL, largest_batch


@pytest.mark.parametrize("q", [1e-4, 0.01, 0.5, 0.9])
@pytest.mark.parametrize("n", [10, 3000, 10**6])
@pytest.mark.parametrize("b", [1.0, 64.0, 5000.0])
def test_a_draw_exceeds_the_largest_batch_with_negligible_probability(n: int, q: float, b: float) -> None:
    limit = largest_batch(b, q, n)
    assert stats.binom.logsf(limit - 1, n, q) < math.log(TAIL)  # with one record to spare


@pytest.mark.parametrize("b", [1.0, 16.0, 256.0, 1024.0, 10**5])
def test_the_largest_batch_is_the_exact_quantile(b: float) -> None:
    limit = largest_batch(b, 1e-3, round(1000 * b))
    assert stats.poisson.sf(limit - 1, b + 1) <= TAIL < stats.poisson.sf(limit - 3, b + 1)


def test_the_largest_batch_is_near_the_expected_one() -> None:
    assert largest_batch(256, 256 / 60_000, 60_000) / 256 < 1.73
    assert largest_batch(1024, 1024 / 60_000, 60_000) / 1024 < 1.35


@pytest.mark.parametrize(("n", "q"), [(50, 0.3), (4000, 0.01), (4000, 0.4), (10**6, 1e-3)])
def test_the_poisson_tail_is_above_the_binomial_one(n: int, q: float) -> None:
    """Anderson and Samuels 1967, for the counts where b_max may lie."""
    counts = np.arange(math.ceil(n * q), math.ceil(n * q + 15 * math.sqrt(n * q) + 80))
    assert (stats.binom.sf(counts, n, q) <= stats.poisson.sf(counts, n * q) * (1 + 1e-9)).all()


def test_with_every_record_drawn_the_largest_batch_is_no_smaller_than_the_data() -> None:
    for n in (1, 2, 3, 4, 5, 16, 17, 18, 1000, 1024, 1025, 4096, 5000, 10**6):
        for b in (1.0, n / 2, float(n)):
            assert largest_batch(b, 1.0, n) >= n


def test_the_largest_batch_is_public_where_the_declared_size_is_believable() -> None:
    """A data set of the declared size, one with fewer records and one with a record more have the same."""
    for b in (1, 32, 64, 1000, 1024, 10**5):
        for q in (1.0, 0.5, 0.25, 2.0**-10):
            n = round(b / q)
            assert len({largest_batch(b, q, m) for m in (1, n // 2, n - 1, n, n + 1)}) == 1
    many = {largest_batch(1.0, 1.0, n) for n in range(1, 70_000)}
    assert len(many) == 10  # q n enters only in powers of four
