"""What a sixth, hostile reading found around tables: failed fits, diverging runs of a search, the number of records."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest

from weightclip.errors import NotFinite, WeightclipError
from weightclip.noise import Streams
from weightclip.tabular import Column, LipDPClassifier, LipDPRegressor, Table, _search
from weightclip.tabular._plan import FitPlan, PublicScaling
from weightclip.tabular._search import SearchPlan, Task

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
RNG = np.random.default_rng(0)
X = RNG.uniform(-1, 1, (400, 3))
Y = (X[:, 0] > 0).astype(int)
FEW: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-5, "feature_bounds": (-1, 1), "epochs": 2, "accountant": "rdp"}
FAR = 1e38  # a learning rate after whose first step no weight is finite


def check_failed_fits() -> None:
    """The model of the first fit, its classes and columns stay together."""
    words = np.where(Y == 1, "b", "a")
    for estimator, y, other in (
        (LipDPClassifier(**FEW), Y, words),
        (LipDPRegressor(**FEW, target_bounds=(-3, 3)), X.sum(1), X.sum(1)),
    ):
        first = estimator.fit(X, y).predict(X)
        estimator.set_params(learning_rate=FAR)
        before = dict(vars(estimator))
        with pytest.raises(NotFinite, match="finite numbers"):
            estimator.fit(X[:, :2], other)
        assert vars(estimator).keys() == before.keys() and all(vars(estimator)[k] is v for k, v in before.items())
        assert np.array_equal(estimator.predict(X), first)
    fresh = LipDPClassifier(**FEW, learning_rate=FAR)
    with pytest.raises(NotFinite):
        fresh.fit(X, Y)
    assert not hasattr(fresh, "classes_")


def test_a_fit_that_fails_leaves_the_model_of_the_last_one_whole() -> None:
    check_failed_fits()


def check_diverging_runs() -> None:
    """That a run left the finite numbers is between it and its board: the search goes on."""
    table = Table(tuple(Column(name, "numeric", -1.0, 1.0) for name in "abc"), X)
    plan = FitPlan(2.0, 1e-5, PublicScaling(pieces=1), {"epochs": 2}, "rdp", Streams.seeded(1), records=len(X))
    with (
        mock.patch.object(_search, "_candidate", lambda rng: {"learning_rate": FAR}),
        pytest.raises(WeightclipError, match="every run of the search failed"),
    ):
        _search.search(Task(table, Y, (0, 1)), SearchPlan(plan, mean_runs=2.0, run_epsilon=1.0))


def test_a_run_of_a_search_that_diverges_is_a_run_that_failed() -> None:
    check_diverging_runs()


def check_layers() -> None:
    """What is said of layers, noise and steps is the same for all numbers of records near the declared one."""
    told = []
    for n in (320, 325, 390):
        estimator = LipDPClassifier(**FEW, n_records=320, classes=[0, 1])
        report = estimator.fit(X[:n], Y[:n]).privacy_report_
        told.append((report["layers"], report["public"], report["mechanisms"]))
    assert told[0] == told[1] == told[2]


def test_reports_do_not_tell_how_many_records_there_are_beyond_those_declared() -> None:
    check_layers()
