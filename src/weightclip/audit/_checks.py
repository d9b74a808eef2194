"""The audits of one trainer as a list of checks with one verdict each."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from weightclip.audit._falsifier import Falsification, falsify
from weightclip.audit._neighbours import hostile_neighbours, rounding_neighbours
from weightclip.audit._one_run import one_run
from weightclip.audit._one_step import pure_law, step_law
from weightclip.audit._releases import sampled_releases, two_worlds
from weightclip.audit._run_law import RunLaw, run_law
from weightclip.audit._subject import Records, Subject

FALSIFIER = "falsifier"
TRAINED = "falsifier, trained"
ONE_STEP = "one step, exact"
RUN_LAW = "law of a run"
SAMPLING = "law of the draws"
PURE = "K-norm mechanism"
RELEASES = "one step, sampled"
TWO_WORLDS = "two worlds"
ONE_RUN = "one run"
EXACT = (FALSIFIER, TRAINED, ONE_STEP, RUN_LAW, SAMPLING, PURE)
AUDITS = (FALSIFIER, TRAINED, ONE_STEP, RUN_LAW, SAMPLING, RELEASES, TWO_WORLDS, ONE_RUN)
"""Audits that every mutant meets; the K-norm mechanism has one of its own."""


@dataclass(frozen=True)
class Effort:
    """How hard to try."""

    restarts: int = 12  #: starting points of the falsifier per layer
    ascent: int = 40  #: its steps
    steps: int = 32  #: steps of the runs whose law is examined
    draws: int = 64  #: random draws examined
    releases: int = 400  #: sampled releases per world
    runs: int = 80  #: whole runs per world
    run_steps: int = 4  #: steps of each
    canaries: int = 1000  #: canaries of the one-run audit
    rounding: int = 4096  #: size of the batch in which rounding is provoked


QUICK = Effort()
FULL = Effort(restarts=40, ascent=120, steps=100, draws=200, releases=2000, runs=300, run_steps=6, canaries=3000,
              rounding=6000)  # fmt: skip


@dataclass(frozen=True)
class Check:
    """One audit of one trainer."""

    audit: str  #: which audit
    subject: str  #: which trainer
    measured: float  #: the number that is compared: a ratio, a shift, or an epsilon
    allowed: float  #: what the claim allows
    violation: bool  #: whether the claim is refuted
    note: str = ""  #: what was found, in words
    details: dict[str, Any] = field(default_factory=dict)  #: everything, JSON-ready


def json_ready(value: Any) -> Any:
    """Numbers, text, lists and dictionaries only; infinities as text."""
    if isinstance(value, dict):
        return {str(k): json_ready(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


class Examination:
    """Audits of one trainer, each on demand; the loudest record is searched for once."""

    def __init__(self, subject: Subject, effort: Effort = QUICK, seed: int = 0, delta: float = 1e-5) -> None:
        self.subject, self.effort, self.seed, self.delta = subject, effort, seed, delta

    @functools.cached_property
    def falsification(self) -> Falsification:
        """The search at the initial weights."""
        return falsify(self.subject, seed=self.seed, restarts=self.effort.restarts, steps=self.effort.ascent)

    @property
    def loudest(self) -> Records:
        """The record with the largest gradient over all layers."""
        return self.falsification.loudest

    def falsifier(self) -> Check:
        """Largest per-record gradients over their bounds."""
        return _falsifier_check(FALSIFIER, self.falsification)

    def trained(self) -> Check:
        """The same after some noisy steps."""
        run = self.subject.start(self.subject.ordinary(8, self.seed), 1.0, self.seed)
        for _ in range(8):
            run.step()
        e = self.effort
        return _falsifier_check(TRAINED, falsify(run, seed=self.seed, restarts=e.restarts, steps=e.ascent))

    def one_step(self) -> Check:
        """Exact shift between hostile neighbours."""
        pairs = hostile_neighbours(self.subject, self.loudest, self.seed)
        if self.subject.batch >= 1000:
            pairs += rounding_neighbours(self.subject, self.loudest, self.effort.rounding)
        law = step_law(self.subject, pairs, self.seed)
        note = law.worst.name + ("" if law.worst.same_noise else "; noise scales depend on the data")
        return Check(ONE_STEP, self.subject.name, law.worst.shift, 1.0, law.violation, note,
                     {"shifts": [asdict(s) for s in law.shifts]})  # fmt: skip

    def run_law(self) -> Check:
        """Noise, effect of one record, and ledger over a run that is saved and resumed."""
        return _law_check(RUN_LAW, run_law(self.subject, self.loudest, steps=self.effort.steps, delta=self.delta,
                                           seed=self.seed))  # fmt: skip

    def sampling(self) -> Check:
        """The same with random draws."""
        law = run_law(replace(self.subject, rate=0.25), self.loudest, steps=self.effort.draws, delta=self.delta,
                      seed=self.seed, resume=False, records=2)  # fmt: skip
        return _law_check(SAMPLING, law)

    def pure(self, p: float) -> Check:
        """The K-norm mechanism in one exponent."""
        law = pure_law(self.subject, p, hostile_neighbours(self.subject, self.loudest, self.seed), seed=self.seed)
        return Check(PURE, self.subject.name, law.shift, 1.0, law.violation, f"p = {p:g}, {law.worst}", asdict(law))

    def releases(self, epsilon: float, rate: float = 1.0) -> Check:
        """Sampled releases of one step; a small epsilon hides in the noise and needs more of them."""
        base = self.effort.releases
        trials = min(round(base * max(1.0, 4 / epsilon) ** 2), max(base, 4000))
        found = sampled_releases(self.subject, self.loudest, epsilon=epsilon, target_delta=self.delta, rate=rate,
                                 trials=trials, seed=self.seed)  # fmt: skip
        return _bound_check(RELEASES, self.subject.name, found.epsilon_claimed, rate, found.result, asdict(found))

    def two_worlds(self, epsilon: float, rate: float = 1.0) -> Check:
        """Whole runs with and without the loudest record."""
        found = two_worlds(self.subject, self.loudest, epsilon_claimed=epsilon, target_delta=self.delta, rate=rate,
                           steps=self.effort.run_steps, trials=self.effort.runs, seed=self.seed)  # fmt: skip
        check = _bound_check(TWO_WORLDS, self.subject.name, epsilon, rate, found.white_box, asdict(found))
        return replace(check, violation=found.violation)

    def every(self, epsilon: float = 2.0) -> Iterator[tuple[str, Callable[[], Check]]]:
        """All audits of this trainer at one claim, the cheap ones first."""
        yield ONE_STEP, self.one_step
        yield RUN_LAW, self.run_law
        yield FALSIFIER, self.falsifier
        yield SAMPLING, self.sampling
        yield TRAINED, self.trained
        yield RELEASES, lambda: self.releases(epsilon)
        yield RELEASES, lambda: self.releases(epsilon, 0.1)
        yield TWO_WORLDS, lambda: self.two_worlds(epsilon)


def gdp_estimate_of(check: Check) -> float:
    """The Gaussian estimate of epsilon beside a sampled lower bound; NaN where a check makes none."""
    found = check.details
    for key in ("result", "white_box"):
        found = found.get(key, found)
    return float(found.get("epsilon_gdp", math.nan))


def one_run_check(epsilon: float, rate: float, effort: Effort, seed: int, delta: float) -> Check:
    """A single run with many canaries.

    With q = 1 the run is a Gaussian mechanism and the bound for such curves is the one that is shown; a subsampled run
    has no such curve, so the bound that needs nothing but (epsilon, delta) is shown there.
    """
    found = one_run(epsilon_claimed=epsilon, target_delta=delta, rate=rate, canaries=effort.canaries, seed=seed)
    note = f"q = {rate:g}, {found.correct} of {found.guesses} guesses right, GDP estimate {found.epsilon_gdp:.3g}"
    lower = found.epsilon_lower_fdp if rate == 1 else found.epsilon_lower
    return Check(ONE_RUN, "orthogonal canaries", lower, epsilon, found.violation, note, asdict(found))


def _falsifier_check(audit: str, found: Falsification) -> Check:
    worst = max(found.layers, key=lambda f: f.ratio)
    ratio = max(found.joint, worst.ratio)
    note = f"layer {worst.layer or '(model)'}; all layers together {found.joint:.4g}"
    details = {"layers": [{**asdict(f), "ratio": f.ratio} for f in found.layers], "joint": found.joint}
    return Check(audit, found.subject, ratio, 1.0, found.violation, note, details)


def _law_check(audit: str, law: RunLaw) -> Check:
    note = "; ".join(law.failures) or f"noise {law.noise.scale:.4f} of what is stated, {law.charged} steps charged"
    return Check(audit, law.subject, law.shift, 1.0, law.violation, note, asdict(law))


def _bound_check(audit: str, subject: str, claimed: float, rate: float, found: Any, details: dict[str, Any]) -> Check:
    note = f"q = {rate:g}, {found.trials} per world, GDP estimate {found.epsilon_gdp:.3g}"
    return Check(audit, subject, found.epsilon_lower, claimed, found.violation, note, details)
