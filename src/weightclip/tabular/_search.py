"""A search for settings of a table's model: a run is a private fit and a noisy score, `_board` chooses among runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from weightclip.accounting import Mechanism
from weightclip.errors import WeightclipError
from weightclip.noise import Streams
from weightclip.tabular._board import Board, Drawn, OneProcess, PrivateRun, take_part
from weightclip.tabular._door import Door
from weightclip.tabular._fit import fit_classifier, fit_regressor
from weightclip.tabular._model import Model
from weightclip.tabular._plan import FitPlan
from weightclip.tabular._private import release
from weightclip.tabular._report import mechanisms_of, searched_epsilon, searched_report
from weightclip.tabular._table import BLOCK, Table

VALIDATION = 0.2  # probability with which a record serves to compare runs, not to train them
_ONE = 2**30  # scores are kept in whole units of 1/_ONE
_HIDDEN = ((), (16,), (32,))
_RANGES = {"learning_rate": (0.015, 0.2), "joint_cap": (0.1, 1.0), "temperature": (0.2, 1.0)}  # even in the logarithm


@dataclass(frozen=True, eq=False)
class Task:
    """The records and what is to be predicted.

    Attributes:
        table: The private records.
        labels: Codes of the classes (anything else contributes nothing), or numbers.
        classes: Public list of classes; empty for regression.
        span: Public range of a numeric target.
        target: Name of the target, for people.
    """

    table: Table
    labels: np.ndarray
    classes: tuple[Any, ...] = ()
    span: tuple[float, float] = (0.0, 1.0)
    target: str = ""

    def rows(self, chosen: np.ndarray) -> Task:
        """The task of some of the records."""
        return replace(self, table=Table(self.table.columns, np.asarray(self.table.values[chosen])),
                       labels=self.labels[chosen])  # fmt: skip

    def fit(self, plan: FitPlan) -> tuple[Model, dict[str, Any]]:
        """Model and report of one private fit."""
        if self.classes:
            return fit_classifier(self.table, self.labels, self.classes, self.target, plan)[:2]
        return fit_regressor(self.table, self.labels, self.span, self.target, plan)[:2]

    def score(self, model: Model) -> float:
        """Number of right answers, or of records less their errors in units of the range; one record counts 1 at most.

        Formal guarantees:
            Adding or removing one record changes it by at most 1: terms are whole multiples of 2^-30 in [0, 1], and
            their sum is exact.
        """
        total = 0
        for start in range(0, len(self.table), BLOCK):
            values, labels = np.asarray(self.table.values[start : start + BLOCK]), self.labels[start : start + BLOCK]
            if self.classes:
                total += int((model.probabilities(values).argmax(1) == labels).sum()) * _ONE
            else:
                low, high = self.span
                errors = np.abs(model.regress(values) - np.clip(labels, low, high)) / (high - low)
                right = 1 - np.clip(np.nan_to_num(errors, nan=1.0), 0.0, 1.0)
                total += int(np.rint(right * _ONE).astype(np.int64).sum())
        return total / _ONE


@dataclass(frozen=True)
class SearchPlan:
    """Everything about a search that is decided before a record is read.

    Attributes:
        plan: FitPlan of a single fit; its epsilon and delta are those of the whole search.
        mean_runs: Mean of the geometric number of runs.
        score_sigma: Standard deviation of the noise on a run's score, in records.
        run_epsilon: Epsilon of one run, where it was found before (`run_epsilon`); None: it is found.
    """

    plan: FitPlan
    mean_runs: float = 10.0
    score_sigma: float = 10.0
    run_epsilon: float | None = None

    def __post_init__(self) -> None:
        if not 1 < self.mean_runs <= 1e4:
            raise WeightclipError(f"the mean number of runs must lie above 1 (at most 10,000), got {self.mean_runs:g}.")
        if not 0 < self.score_sigma < math.inf:
            raise WeightclipError(f"the noise of the score must be a positive number, got {self.score_sigma:g}.")


def search(task: Task, how: SearchPlan, board: Board | None = None) -> tuple[Model, dict[str, Any]]:
    """The best of a random number of random candidates: its model, and a report of what the whole search cost.

    Args:
        task: The records.
        how: What is fixed beforehand.
        board: Who does which run, where several processes share them; None: this one does all.

    Formal guarantees:
        Model and report are (report epsilon, delta)-DP under adding or removing one record, given the number of
        records, the columns' names and types, the classes and the plan, by `best_of_random_runs`. Each record goes to
        training or validation by a coin of its own, so a neighbouring table is split alike. Mechanisms of one run
        follow from public numbers, are the same for every candidate, and are computed on a made-up record; a
        run that released anything else would raise. Time is not covered: it tells of the number of runs.
    """
    how = replace(how, run_epsilon=run_epsilon(task, how))
    board = OneProcess(Drawn.draw(how.plan.streams, how.mean_runs)) if board is None else board
    take_part(run_of(task, how, board.drawn), how.plan.streams, board)
    score, (model, report) = board.best()
    n = how.plan.records or len(task.table)
    share = min(1.0, max(0.0, score / max(1.0, VALIDATION * n)))
    released = [*mechanisms_of(report), _count(how)]
    return model, searched_report(report, released, how.mean_runs, how.plan.epsilon, n, share)


def run_of(task: Task, how: SearchPlan, drawn: Drawn) -> PrivateRun[tuple[Model, dict[str, Any]]]:
    """One run of a search of this task, for `take_part`."""
    inner = _inner(task, how)
    agreed = [replace(m, label="") for m in _mechanisms(task, inner)]
    coins = drawn.coins(len(task.table))
    training, validation = task.rows(coins >= VALIDATION), task.rows(coins < VALIDATION)

    def run(streams: Streams, rng: np.random.Generator) -> tuple[float, tuple[Model, dict[str, Any]]]:
        chosen = {**_candidate(rng), **how.plan.chosen}
        model, report = training.fit(replace(inner, chosen=chosen, streams=streams))
        if [replace(m, label="") for m in mechanisms_of(report)] != agreed:  # labels count released features
            raise WeightclipError("a run released something else than was paid for; this is a bug, please report it.")
        score = release(np.array([validation.score(model)]), 1, how.score_sigma, Door(streams), "tune/score")
        return float(score[0]), (model, report)

    return run


def _candidate(rng: np.random.Generator) -> dict[str, Any]:
    """Settings that decide nothing about the cost of a run."""
    drawn = {k: low * (high / low) ** float(rng.uniform()) for k, (low, high) in _RANGES.items()}
    return {"hidden_layer_sizes": _HIDDEN[int(rng.integers(len(_HIDDEN)))], **drawn}


def _count(how: SearchPlan) -> Mechanism:
    return Mechanism("gaussian", how.score_sigma, 1.0, 1, label="noisy score of a run")


def _mechanisms(task: Task, plan: FitPlan) -> list[Mechanism]:
    """What one run releases, from a fit to one made-up record: all of it follows from public numbers."""
    missing = Table(task.table.columns, np.full((1, len(task.table.columns)), math.nan))
    nobody = replace(task, table=missing, labels=np.zeros(1, dtype=task.labels.dtype))
    return mechanisms_of(nobody.fit(replace(plan, streams=Streams.seeded(0)))[1])


def _inner(task: Task, how: SearchPlan) -> FitPlan:
    """The plan of one run."""
    n = how.plan.records or len(task.table)
    inner = replace(how.plan, records=max(1, round((1 - VALIDATION) * n)), progress=None)
    return inner if how.run_epsilon is None else replace(inner, epsilon=how.run_epsilon)


def run_epsilon(task: Task, how: SearchPlan) -> float:
    """An epsilon of one run at which the whole search costs the target, or up to two percent less."""
    if how.run_epsilon is not None:
        return how.run_epsilon
    target, delta, plan = how.plan.epsilon, how.plan.delta, _inner(task, how)

    def total(epsilon: float) -> float:
        mechanisms = [*_mechanisms(task, replace(plan, epsilon=epsilon)), _count(how)]
        return searched_epsilon(mechanisms, delta, how.mean_runs, target)

    low, high, epsilon = 0.0, target, target / 3  # the cost is nearly proportional to it: two or three steps will do
    while epsilon > target / 64:
        cost = total(epsilon)
        if 0.98 * target <= cost <= target or (cost < target and high < 1.005 * epsilon):
            return epsilon
        low, high = (epsilon, high) if cost < target else (low, epsilon)
        margin = 0.02 * (high - low)
        epsilon = min(max(0.99 * epsilon * target / cost, low + margin), high - margin)
    raise WeightclipError(
        f"no noise brings a search of {how.mean_runs:g} runs on average below epsilon {target:g}: raise epsilon or the "
        "noise of the score, or search less."
    )
