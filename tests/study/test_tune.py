"""The multi-objective search and the search that pays for itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from weightclip import accounting
from weightclip.errors import WeightclipError
from weightclip.study import _tune
from weightclip.study._store import Store
from weightclip.study._tune import Trial, accounted_search, pareto_mask, plot_pareto, tune


def fake(keys):
    """More noise, less accuracy, less ε."""
    return [
        {"accuracy": 0.95 - 0.03 * k["config"]["sigma"] - 0.05 * abs(np.log(k["config"]["lr"] / 0.03)),
         "epsilon": 4 / k["config"]["sigma"] ** 2}
        for k in keys
    ]  # fmt: skip


def test_pareto():
    assert pareto_mask([0.9, 0.8, 0.85, 0.8], [2.0, 1.0, 3.0, 1.5]) == [True, True, False, False]
    assert pareto_mask([0.9, 0.9], [1.0, 1.0]) == [True, True]  # equal points do not dominate each other


def test_bayesian_search_is_resumable(tmp_path: Path, monkeypatch):
    calls = []

    def counted(keys):
        calls.append(len(keys))
        return fake(keys)

    monkeypatch.setattr(_tune, "compute_runs", counted)
    store = Store(tmp_path / "s.sqlite")
    arguments = {"trials": 10, "initial": 8, "batch": 2, "seeds": 1}
    found = tune(store, "breast_cancer", "dp-sgd", **arguments)
    assert len(found) == 10 and any(t.pareto for t in found)
    made = len(calls)
    assert tune(store, "breast_cancer", "dp-sgd", **arguments) == found
    assert len(calls) == made
    later = np.mean([abs(np.log(t.config["lr"] / 0.03)) for t in found[8:]])
    first = np.mean([abs(np.log(t.config["lr"] / 0.03)) for t in found[:8]])
    assert later < first  # the model learnt where the front is
    assert plot_pareto(tmp_path / "p.png", {"dp-sgd": found}).stat().st_size > 1000


def test_accounted_search_costs_what_it_says():
    found = accounted_search("breast_cancer", "lip-factors", mean_runs=3, seed=1)
    assert found.epsilon <= 1.672 and found.epsilon == pytest.approx(1.672, rel=0.02)
    assert found.run_epsilon < found.epsilon and found.config is not None
    n = 364
    q = round(n / 8) / n
    one = [accounting.Mechanism("gaussian", found.config["sigma"], q, 8 * round(1 / q)),
           accounting.Mechanism("gaussian", found.score_sigma, 1.0, 1)]  # fmt: skip
    law = accounting.NegativeBinomialRuns(3, 1.0)
    assert accounting.search_cost(one, 1 / 569, law) == pytest.approx(found.epsilon)


def test_accounted_search_refuses_claims():
    with pytest.raises(WeightclipError, match="guarantee"):
        accounted_search("breast_cancer", "lip-published")
    with pytest.raises(WeightclipError, match="mean_runs"):
        accounted_search("breast_cancer", "dp-sgd", mean_runs=1)
    with pytest.raises(WeightclipError, match="raise the target"):
        accounted_search("breast_cancer", "dp-sgd", total_epsilon=1e-3)


def test_fronts_without_points_are_drawn(tmp_path: Path):
    plot_pareto(tmp_path / "p.png", {"dp-sgd": [Trial({}, 0.9, 1.0, True)], "lip-factors": []})
    assert (tmp_path / "p.png").exists()
