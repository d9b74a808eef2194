"""The search that pays for itself, on a table of one's own."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from weightclip.accounting import _accounting as accounting
from weightclip.errors import WeightclipError
from weightclip.noise._streams import Streams
from weightclip.tabular import _search
from weightclip.tabular._columns import Column
from weightclip.tabular._plan import FitPlan, PrivateScaling
from weightclip.tabular._report import mechanisms_of, recompute
from weightclip.tabular._search import VALIDATION, Drawn, OneProcess, SearchPlan, Task, search, take_part
from weightclip.tabular._table import Table

COLUMNS = (Column("a", "numeric", -4.0, 4.0), Column("b", "numeric", -4.0, 4.0))
DELTA = 1e-6


def task(n: int = 1500, regression: bool = False) -> Task:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 2))
    if regression:
        return Task(Table(COLUMNS, x), x.sum(1) + 0.1 * rng.normal(size=n), (), (-4.0, 4.0), "y")
    return Task(Table(COLUMNS, x), (x.sum(1) > 0).astype(np.int64), ("no", "yes"), target="y")


def plan(epsilon: float = 3.0, seed: int | None = 0, **settings) -> SearchPlan:
    streams = Streams.secure() if seed is None else Streams.seeded(seed)
    inner = FitPlan(epsilon, DELTA, PrivateScaling(), {"epochs": 12.0}, "pld", streams, records=1500)
    return SearchPlan(inner, **{"mean_runs": 3.0, **settings})


@pytest.fixture(scope="module")
def found():
    return search(task(), plan())


def test_epsilon_is_that_of_the_whole_search(found):
    report = found[1]
    assert 2.9 < report["epsilon"] <= 3.0
    released = mechanisms_of(report)
    assert released[-1].label == "noisy score of a run" and released[-1].sigma == 10.0
    law = accounting.NegativeBinomialRuns(3.0, 1.0)
    assert report["epsilon"] == pytest.approx(accounting.search_cost(released, DELTA, law), rel=1e-9)
    assert report["epsilon"] > 1.2 * accounting.epsilon(released, DELTA)  # more than the run that won
    assert recompute(report) == report["epsilon"]
    assert report["public"]["records"] == 1500 and report["public"]["training_records"] == 1200


def test_it_learns_and_says_nothing_of_the_others(found):
    model, report = found
    assert task().score(model) > 0.9 * 1500
    assert set(report["search"]) == {"mean_runs", "score"} and 0.8 < report["search"]["score"] <= 1


def test_regression_is_scored_within_the_range():
    model, report = search(task(regression=True), plan(mean_runs=1.01))
    assert report["epsilon"] <= 3.0 and task(regression=True).score(model) > 0.85 * 1500


@pytest.mark.parametrize("regression", [False, True])
def test_one_record_moves_the_score_by_at_most_one(found, regression):
    whole = task(200, regression)
    model = search(task(300, True), plan(mean_runs=1.01))[0] if regression else found[0]
    strange = replace(whole, labels=whole.labels.astype(np.float64))
    strange.labels[:4] = [math.nan, 1e300, -math.inf, 7]
    for some in (whole, strange):
        total = some.score(model)
        for i in range(8):
            assert abs(total - some.rows(np.arange(200) != i).score(model)) <= 1 + 1e-9


def watched(patch: pytest.MonkeyPatch, work: Task, how: SearchPlan) -> list[tuple[Task, FitPlan]]:
    """All fits of one search but those that compute its cost."""
    fits, fit = [], Task.fit

    def spy(self, inner):
        if len(self.table) > 1:
            fits.append((self, inner))
        return fit(self, inner)

    patch.setattr(Task, "fit", spy)
    patch.setattr(_search, "run_epsilon", lambda *_: 1.0)
    search(work, how)
    return fits


def sound(fits: list[tuple[Task, FitPlan]], n: int) -> bool:
    """Streams of their own from the operating system, candidates that differ, and no validation record in training."""
    keys = {inner.streams.key("x") for _, inner in fits}
    candidates = {inner.chosen["learning_rate"] for _, inner in fits}
    share = len(fits[0][0].table) / n
    return (
        len(keys) == len(candidates) == len(fits)
        and all(inner.streams.is_secure for _, inner in fits)
        and abs(share - (1 - VALIDATION)) < 0.05
        and all(inner.epsilon == 1.0 and inner.records == round((1 - VALIDATION) * 1500) for _, inner in fits)
    )


def several(patch: pytest.MonkeyPatch, runs: int = 3) -> None:
    """The number of runs is fixed, so that there are some to look at."""
    numpy = Streams.numpy

    class Fixed:
        def __init__(self, rng):
            self.rng = rng

        def geometric(self, p):
            return runs

        def __getattr__(self, name):
            return getattr(self.rng, name)

    patch.setattr(
        Streams, "numpy", lambda s, label, *i: Fixed(numpy(s, label, *i)) if label == "tune/search" else numpy(s, label)
    )


def test_runs_are_sound(monkeypatch):
    several(monkeypatch)
    assert sound(watched(monkeypatch, task(), plan(seed=None)), 1500)


@pytest.mark.parametrize("leak", ["small seeds", "one stream for all runs", "one candidate", "trains on all"])
def test_unsound_searches_are_found(leak, monkeypatch):
    several(monkeypatch)
    if leak == "small seeds":
        monkeypatch.setattr(Streams, "secure", classmethod(lambda cls: cls.seeded(7)))
    elif leak == "one stream for all runs":
        monkeypatch.setattr(Streams, "child", lambda self, *_: self)
    elif leak == "one candidate":
        same = _search._candidate(np.random.default_rng(0))
        monkeypatch.setattr(_search, "_candidate", lambda rng: same)
    else:
        monkeypatch.setattr(Task, "rows", lambda self, chosen: self)
    assert not sound(watched(monkeypatch, task(), plan(seed=None)), 1500)


def noise_of_a_score(patch: pytest.MonkeyPatch, score: float) -> float:
    """What one seeded search adds to a run's score before it shows it."""
    with patch.context() as inner:
        inner.setattr(_search, "run_epsilon", lambda *_: 1.0)
        inner.setattr(Task, "score", lambda self, model: score)
        return VALIDATION * 1500 * search(task(), plan(mean_runs=1.0001))[1]["search"]["score"] - score


def test_noise_of_a_score_belongs_to_the_score_it_is_added_to(monkeypatch):
    """Fits of one seed on neighbouring tables: noise that meets two sums is what their difference is read off from."""
    first, again, other = (noise_of_a_score(monkeypatch, score) for score in (150.0, 150.0, 151.0))
    assert first == again and abs(first - other) > 0.01 and max(abs(first), abs(other)) < 60


def test_a_run_that_releases_more_is_stopped(monkeypatch):
    several(monkeypatch)
    monkeypatch.setattr(_search, "run_epsilon", lambda *_: 1.0)
    monkeypatch.setattr(_search, "_candidate", lambda rng: {"batch_fraction": 0.5})
    with pytest.raises(WeightclipError, match="than was paid for"):
        search(task(), plan())


def test_the_number_of_runs_is_geometric():
    counts = []
    for seed in range(400):
        calls, root = [], Streams.seeded(seed)
        board = OneProcess(Drawn.draw(root, 4.0))
        take_part(
            lambda streams, rng, calls=calls: (calls.append(1), (float(len(calls) % 3), len(calls)))[1], root, board
        )
        score, kept = board.best()
        counts.append(len(calls))
        assert kept == (min(len(calls), 2)) and score == float(kept % 3)
    assert min(counts) == 1 and abs(np.mean(counts) - 4.0) < 4 * math.sqrt(12 / 400)
    assert abs(np.mean(np.array(counts) == 1) - 0.25) < 4 * math.sqrt(0.19 / 400)


def test_impossible_searches_are_refused():
    with pytest.raises(WeightclipError, match="mean number of runs"):
        plan(mean_runs=1.0)
    with pytest.raises(WeightclipError, match="noise of the score"):
        plan(score_sigma=math.nan)
    with pytest.raises(WeightclipError, match="search less"):
        search(task(50), plan(epsilon=0.5, mean_runs=100.0, score_sigma=0.5))
