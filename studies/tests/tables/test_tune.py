"""The multi-objective search and the search that pays for itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from weightclip.accounting import _accounting as accounting
from weightclip.errors import WeightclipError
from weightclip.noise._streams import Streams
from weightclip_studies.tables import _runs, _tune
from weightclip_studies.tables._store import Store
from weightclip_studies.tables._tune import Trial, accounted_search, pareto_mask, plot_pareto, tune


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
    assert found.run_epsilon < found.epsilon
    n = 364
    q = round(n / 8) / n
    one = [accounting.Mechanism("gaussian", found.config["sigma"], q, 8 * round(1 / q)),
           accounting.Mechanism("gaussian", found.score_sigma, 1.0, 1)]  # fmt: skip
    law = accounting.NegativeBinomialRuns(3, 1.0)
    assert accounting.search_cost(one, 1 / 569, law) == pytest.approx(found.epsilon)


def watched(patch, runs: int, **arguments):
    """What one search hands to its runs: the streams and the type of the sums; the number of runs is fixed."""
    seen = []
    real = _runs.train_stacked

    def spy(X, y, settings, norms, seeds, *, dtype=torch.float64, **rest):
        seen.append((seeds[0], dtype))
        return real(X, y, settings, norms, seeds, dtype=dtype, **rest)

    class Fixed:
        """A generator whose geometric law is a constant."""

        def __init__(self, rng):
            self.rng = rng

        def geometric(self, p):
            return runs

        def __getattr__(self, name):
            return getattr(self.rng, name)

    numpy = Streams.numpy
    patch.setattr(_runs, "train_stacked", spy)
    patch.setattr(
        Streams,
        "numpy",
        lambda self, label, *i: Fixed(numpy(self, label, *i)) if "tune" in label else numpy(self, label, *i),
    )
    return accounted_search("breast_cancer", "dp-sgd", **arguments), seen


def sound(found, seen) -> bool:
    streams = [s for s, _ in seen]
    separate = len({s.key("x") for s in streams if isinstance(s, Streams)}) == len(seen)
    return found.secure and separate and all(isinstance(s, Streams) and s.is_secure for s in streams) and all(
        dtype == torch.float64 for _, dtype in seen
    )  # fmt: skip


def test_only_the_winner_is_released(monkeypatch):
    """However many runs there were: one score, one model, and not a word about the others."""
    kept = []
    for runs in (1, 4):
        with pytest.MonkeyPatch.context() as patch:
            found, seen = watched(patch, runs, seed=5)
        assert len(seen) == runs
        kept.append(found.to_json())
        assert [w.shape for w in found.tensors().values()] == [(16, 30), (16,), (1, 16), (1,)]
        assert "runs" not in kept[-1] and not any(isinstance(v, list) for v in kept[-1].values())
    assert kept[0].keys() == kept[1].keys() and not kept[0]["secure"]


def test_the_model_is_the_one_that_was_scored():
    accuracies = []
    for seed in range(3):  # of candidates drawn at random some learn little
        found = accounted_search(
            "breast_cancer", "dp-sgd", mean_runs=1.01, total_epsilon=30.0, score_sigma=1.0, seed=seed
        )
        prepared = _runs.prepare("breast_cancer")
        X, y = prepared.X[prepared.parts.valid], prepared.y[prepared.parts.valid]
        (w1, b1), (w2, b2) = found.weights
        accuracies.append(np.mean(((np.maximum(X @ w1.T + b1, 0) @ w2.T + b2)[:, 0] > 0) == y))
        assert abs(found.score - accuracies[-1]) < 5 / len(y)
    assert np.median(accuracies) > 0.9


def test_randomness_and_sums_are_sound(monkeypatch):
    assert sound(*watched(monkeypatch, 3))


@pytest.mark.parametrize("leak", ["small seeds", "one stream for all runs"])
def test_unsound_searches_are_found(leak, monkeypatch):
    if leak == "small seeds":
        monkeypatch.setattr(Streams, "secure", classmethod(lambda cls: cls.seeded(7)))
    else:
        monkeypatch.setattr(Streams, "key", lambda self, *_: b"k" * 32)
    assert not sound(*watched(monkeypatch, 2))


def test_float32_sums_are_found(monkeypatch):
    def careless(prepared, method, group_norm, config, streams):
        settings = _runs.settings_of(config, method, prepared)
        X, y = prepared.X[prepared.parts.train], prepared.y[prepared.parts.train]
        run = _runs.train_stacked(X, y, [settings], [None], [streams], objective=_runs.Logistic(),
                                  noise=config["sigma"], dtype=torch.float32)[0][0]  # fmt: skip
        return run, 100

    monkeypatch.setattr(_tune, "train_one", careless)
    assert not sound(*watched(monkeypatch, 2))


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
