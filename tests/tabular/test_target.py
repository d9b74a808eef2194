"""Scaling of a numeric target, and the last look at the predictions."""

from __future__ import annotations

import math
import os
import sys

import numpy as np
import pytest

import weightclip.tabular._private as private
from weightclip.noise._streams import Streams
from weightclip.tabular import LipDPRegressor
from weightclip.tabular._columns import Column
from weightclip.tabular._encoder import fit_private
from weightclip.tabular._private import Door
from weightclip.tabular._table import Table
from weightclip.tabular._target import Target, agreement, fit_target, pretended

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


def look(predictions, targets, sigma, weights=None, seed=0, n=None):
    """The last look at these predictions, with those of pretended records spread as far as they are."""
    f, y = np.asarray(predictions, dtype=float), np.asarray(targets, dtype=float)
    w = None if weights is None else np.asarray(weights, dtype=float)
    reference = np.linspace(-1.7, 1.7, 100) * (REFERENCE or f.std())
    return agreement(lambda: iter([(f, y, w)]), reference, 5, n or len(f), sigma, Door(Streams.seeded(seed)))[0]


REFERENCE = 0.0


@pytest.mark.parametrize("record", [(9.0, 9.0), (-9.0, 9.0), (1.0, math.nan), (math.inf, 1.0), (0.3, -0.2)])
@pytest.mark.parametrize("weight", [None, 1.0, 1e9, 0.5, -3.0, math.nan])
def test_one_record_moves_the_sums_by_no_more_than_the_noise_assumes(record, weight, monkeypatch):
    seen = []

    def release(total, touched, sigma, door, label):
        seen.append((np.array(total), touched))
        return total

    monkeypatch.setattr(private, "release", release)
    monkeypatch.setattr(sys.modules[__name__], "REFERENCE", 0.8)  # public: the same for both neighbours
    f, y = RNG.normal(size=40), RNG.normal(size=40)
    w = None if weight is None else np.ones(40)
    look(f, y, 1.0, w)
    public = iter([total for total, _ in seen])  # what is released first steers the second: the same for both
    monkeypatch.setattr(private, "release", lambda *a: (release(*a), next(public))[1])
    look([*f, record[0]], [*y, record[1]], 1.0, None if w is None else [*w, weight], n=40)
    moved = np.array([np.linalg.norm(seen[2 + k][0] - seen[k][0]) for k in (0, 1)])
    assumed = np.sqrt([touched for _, touched in seen[:2]])
    assert (moved <= assumed).all() and [len(total) for total, _ in seen[:2]] == [1 if weight is None else 2, 3]
    if record == (9.0, 9.0) and weight in (None, 1.0, 1e9):  # the bounds are reached, and the noise is made for them
        assert moved == pytest.approx(np.sqrt([1 if weight is None else 1 + 1 / 9, 1 + 2 / 9]))
        assert assumed == pytest.approx(moved, rel=1e-5)
    if not np.isfinite(record).all() or (weight is not None and not weight > 0):
        assert (moved == 0).all()


def test_the_two_parts_of_the_last_look_cost_what_one_was_charged(monkeypatch):
    sigmas = []
    monkeypatch.setattr(private, "release", lambda total, touched, sigma, *_: (sigmas.append(sigma), total)[1])
    y = RNG.normal(size=40)
    for weights in (None, np.full(40, 0.5)):
        sigmas.clear()
        look(y, y, 7.0, weights)
        assert len(sigmas) == 2 and sum(s**-2 for s in sigmas) == pytest.approx(7.0**-2, rel=1e-12)


@pytest.mark.parametrize("weights", [None, np.full(4000, 0.3)], ids=["plain", "weighted"])
def test_noise_is_taken_back_and_signal_is_left(weights):
    y = RNG.normal(size=4000)
    assert look(0.9 * y, y, 10.0, weights) == 1.0
    assert look(RNG.normal(size=4000), y, 10.0, weights) < 0.1
    assert 0.25 < look(y + 1.5 * RNG.normal(size=4000), y, 10.0, weights) < 0.6
    assert look(0.5 * y[:50], y[:50], 30.0) == 0.0  # nothing is sure: the middle is what is left


def test_the_last_look_follows_sample_weights():
    """Records that hardly count have no say in whether predictions are believed."""
    y = RNG.normal(size=4000)
    f = np.where(np.arange(4000) < 2000, y, RNG.normal(size=4000))
    heavy = np.where(np.arange(4000) < 2000, 1.0, 0.0)
    assert look(f, y, 5.0, heavy) == 1.0 and look(f, y, 5.0, 1 - heavy) < 0.1


def test_pretended_rows_spread_as_the_released_quantiles_say():
    columns = (Column("a", "numeric"), Column("c", "categorical", categories=("x", "y")))
    values = np.column_stack([RNG.normal(50, 9, 4000), RNG.integers(0, 2, 4000).astype(float)])
    encoder = fit_private(Table(columns, values), 0.5, 6, Door(Streams.seeded(0)), 4000).encoder
    rows = pretended(encoder)
    assert rows.shape == (2000, 2) and set(rows[:, 1]) == {0.0, 1.0}
    assert rows[:, 0].mean() == pytest.approx(50, abs=2) and 5 < rows[:, 0].std() < 14


def fits(runs: int, explained: float) -> tuple[np.ndarray, np.ndarray]:
    """R² of default fits to 600 records, and of the constant each would fall back on (the mean of its predictions)."""
    scores, constants = [], []
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        X = rng.normal(size=(2600, 4))
        y = 250 + 80 * (math.sqrt(explained) * X.sum(1) / 2 + math.sqrt(1 - explained) * rng.normal(size=2600))
        model = LipDPRegressor(epsilon=1.0, random_state=seed).fit(X[:600], y[:600])
        constant = float(np.mean(model.predict(X[:600])))
        scores.append(model.score(X[600:], y[600:]))
        constants.append(1 - np.mean((y[600:] - constant) ** 2) / np.var(y[600:]))
    return np.array(scores), np.array(constants)


def test_no_fit_is_worse_than_the_mean_by_more_than_the_means_own_error():
    """Two hundred fits with WEIGHTCLIP_FULL=1 to targets that no column explains."""
    scores, constants = fits(200 if os.environ.get("WEIGHTCLIP_FULL") == "1" else 5, 0.0)
    own = float(np.mean(np.maximum(-constants, 0.0)))
    assert own < 0.05 and (scores >= constants - own).all(), (own, np.min(scores - constants))


def test_what_columns_explain_is_not_thrown_away():
    scores, _ = fits(3, 0.9)
    assert scores.min() > 0.6
