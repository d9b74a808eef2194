"""A search that pays for itself: a random number of runs, of which the best alone is released.

Choosing the best of several runs tells of the records, too. Papernot and Steinke (2022) bound what that costs if the
number of runs is drawn from a law fixed beforehand, every run tries a candidate drawn at random, and nothing of a run
that did not win is shown (SOUNDNESS Theorem 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from weightclip.accounting import Mechanism
from weightclip.errors import NotFinite, WeightclipError
from weightclip.noise import Streams
from weightclip.tabular._fit import fit_classifier, fit_regressor
from weightclip.tabular._model import Model
from weightclip.tabular._plan import FitPlan
from weightclip.tabular._private import Door, release
from weightclip.tabular._report import mechanisms_of, searched_epsilon, searched_report
from weightclip.tabular._table import BLOCK, Table

T = TypeVar("T")
FAILED = -1e300  # the score of a run that failed
ALL_FAILED = (
    "every run of the search failed: do one by itself (weightclip train, or a call of your function) on records that "
    "you may look at, to see why."
)

PrivateRun = Callable[[Streams, np.random.Generator], tuple[float, T]]
"""One private run: from its own streams, and a generator for its candidate, to a noisy score and what it releases."""


@dataclass(frozen=True)
class Drawn:
    """What a search draws once, before its first run; all who take part in it have the same.

    Formal guarantees:
        A function of the streams and the public mean alone, independent of the records. The number of runs is
        geometric, and must be shown to nobody. Coins protect nothing: the search is private given all of them.
    """

    split: bytes  # key of the coins that send records to training or validation
    candidates: tuple[bytes, ...]  # key of each run's candidate; there are as many runs as keys

    @classmethod
    def draw(cls, root: Streams, mean_runs: float) -> Drawn:
        """Draw it; the number of runs has mean `mean_runs`, and is at least one."""
        runs = int(root.numpy("tune/search").geometric(1 / mean_runs))
        return cls(root.key("tune/split"), tuple(root.key("tune/candidate", i) for i in range(runs)))

    def coins(self, n: int) -> np.ndarray:
        """A number in [0, 1) for each of n records."""
        return Streams(self.split).numpy("tune/split").uniform(size=n)

    def candidate(self, number: int) -> np.random.Generator:
        """The generator with which a run draws its candidate."""
        return Streams(self.candidates[number]).numpy("tune/candidate")


class Board(Protocol):
    """Who does which run of a search, and what came of it."""

    @property
    def drawn(self) -> Drawn: ...  # what was drawn before the first run
    def runs(self) -> Iterator[int]: ...  # numbers of the runs that this process is to do
    def put(self, number: int, score: float, result: Any) -> None: ...  # keep what came of a run
    def best(self) -> tuple[float, Any]: ...  # score and result of the run that won, once all are done


class OneProcess:
    """A board in memory: one process does all runs, and keeps the best alone.

    Formal guarantees:
        Where `take_part` has done the runs, `best` costs `accounting.search_cost` of one run's mechanisms with
        ``NegativeBinomialRuns(mean_runs, 1)``, as long as nobody learns the number of runs or anything of a run that
        did not win.
    """

    def __init__(self, drawn: Drawn) -> None:
        self.drawn = drawn
        self._best: tuple[float, Any] | None = None

    def runs(self) -> Iterator[int]:
        """All of them."""
        return iter(range(len(self.drawn.candidates)))

    def put(self, number: int, score: float, result: Any) -> None:
        """Keep it if it is better than all before."""
        if self._best is None or score > self._best[0]:
            self._best = score, result

    def best(self) -> tuple[float, Any]:
        """Score and result of the run that won."""
        assert self._best is not None
        if self._best[0] == FAILED:
            raise WeightclipError(ALL_FAILED)
        return self._best


def take_part(run: PrivateRun[T], root: Streams, board: Board) -> None:
    """Do the runs that fall to this process.

    `run` draws its candidate with the generator, independently of the records; each run gets streams of its own from
    `root`, the randomness of this process.

    Formal guarantees:
        A run that fails is a run that is done, with the lowest of all scores: whether it fails may depend on records
        and noise (weights that diverge), and to do it again would choose among attempts that nobody has paid for.
    """
    for number in board.runs():
        try:
            score, result = run(root.child("tune/run", number), board.drawn.candidate(number))
        except Exception as error:
            if isinstance(error, WeightclipError) and not isinstance(error, NotFinite):
                raise  # says what is wrong with the call, whatever the records
            score, result = FAILED, None
        board.put(number, score, result)


VALIDATION = 0.2  # probability with which a record serves to compare runs, not to train them
_ONE = 2**30  # scores are kept in whole units of 1/_ONE
_HIDDEN = ((), (16,), (32,))
_RANGES = {"learning_rate": (0.015, 0.2), "joint_cap": (0.1, 1.0), "temperature": (0.2, 1.0)}  # even in the logarithm


@dataclass(frozen=True, eq=False)
class Task:
    """The records and what is to be predicted."""

    table: Table  # the private records
    labels: np.ndarray  # codes of the classes (anything else contributes nothing), or numbers
    classes: tuple[Any, ...] = ()  # public list of classes; empty for regression
    span: tuple[float, float] = (0.0, 1.0)  # public range of a numeric target
    target: str = ""  # name of the target, for people

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
    """Everything about a search that is decided before a record is read."""

    plan: FitPlan  # plan of a single fit; its epsilon and delta are those of the whole search
    mean_runs: float = 10.0  # mean of the geometric number of runs
    score_sigma: float = 10.0  # standard deviation of the noise on a run's score, in records
    run_epsilon: float | None = None  # epsilon of one run, where it was found before (`run_epsilon`); None: it is found

    def __post_init__(self) -> None:
        if not 1 < self.mean_runs <= 1e4:
            raise WeightclipError(f"the mean number of runs must lie above 1 (at most 10,000), got {self.mean_runs:g}.")
        if not 0 < self.score_sigma < math.inf:
            raise WeightclipError(f"the noise of the score must be a positive number, got {self.score_sigma:g}.")


def search(task: Task, how: SearchPlan, board: Board | None = None) -> tuple[Model, dict[str, Any]]:
    """The best of a random number of random candidates: its model, and a report of what the whole search cost.

    Where several processes share the runs, `board` says who does which; None: this one does all.

    Formal guarantees:
        Model and report are (report epsilon, delta)-DP under adding or removing one record, given the number of
        records, the columns' names and types, the classes and the plan, by SOUNDNESS Theorem 4. Each record goes to
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
