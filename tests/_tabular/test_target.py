"""Scaling of a numeric target, and the last look at the predictions."""

from __future__ import annotations

import math

import numpy as np
import pytest

import weightclip._tabular._private as private
from weightclip._streams import Streams
from weightclip._tabular._door import Door
from weightclip._tabular._target import Target, agreement, fit_target

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("span", [None, (0.0, 1000.0)])
def test_target_is_scaled_by_its_spread(span):
    y = RNG.normal(250, 80, 3000)
    scale, paid = fit_target(y, span, 8.0, Door(Streams.seeded(1)), len(y))
    assert abs(scale.middle - 250) < 15 and 60 < scale.unit < 100
    assert scale.low < 120 and scale.high > 380
    assert math.isclose(sum(m.sigma**-2 for m in paid), 8.0**-2) and len(paid) == (2 if span is None else 1)
    assert span is None or (scale.low, scale.high) == span


@pytest.mark.parametrize("y", [np.full(50, np.nan), np.full(50, 7.0), np.full(50, 1e300), np.array([1e12, -1e12] * 25)])
def test_strange_targets_have_a_finite_scale(y):
    for seed in range(5):
        scale, _ = fit_target(y, None, 3.0, Door(Streams.seeded(seed)), len(y))
        assert scale.low < scale.high and scale.unit > 0 and np.isfinite([scale.low, scale.high, scale.unit]).all()


def test_a_public_range_needs_nothing():
    assert Target.public(-2.0, 4.0) == Target(-2.0, 4.0, 1.0, 3.0)
    assert Target.public(5.0, 5.0).unit > 0


def once(predictions, targets):
    return lambda: iter([(np.asarray(predictions, dtype=float), np.asarray(targets, dtype=float))])


@pytest.mark.parametrize("record", [(9.0, 9.0), (-9.0, 9.0), (1.0, math.nan), (math.inf, 1.0), (0.3, -0.2)])
def test_one_record_moves_the_sums_by_no_more_than_the_noise_assumes(record, monkeypatch):
    seen = []

    def release(total, touched, sigma, streams, label):
        seen.append((np.array(total), touched))
        return total

    monkeypatch.setattr(private, "release", release)
    f, y = RNG.normal(size=40), RNG.normal(size=40)
    agreement(once(f, y), 0.1, 1.0, Door(Streams.seeded(0)))
    agreement(once([*f, record[0]], [*y, record[1]]), 0.1, 1.0, Door(Streams.seeded(0)))
    moved = np.linalg.norm(seen[1][0] - seen[0][0])
    assert moved <= math.sqrt(seen[0][1])
    if record == (9.0, 9.0):
        assert moved == pytest.approx(math.sqrt(2))
    if not np.isfinite(record).all():
        assert moved == 0


def test_noise_is_taken_back_and_signal_is_left():
    y = RNG.normal(size=4000)
    assert agreement(once(0.9 * y, y), 0.0, 10.0, Door(Streams.seeded(0))) == 1.0
    assert agreement(once(RNG.normal(size=4000), y), 0.0, 10.0, Door(Streams.seeded(0))) < 0.2
    assert 0.4 < agreement(once(y + RNG.normal(size=4000), y), 0.0, 10.0, Door(Streams.seeded(0))) < 0.7
