"""The whole audit: every built-in trainer, every claim, the accountants, and what the caller adds; one report."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from weightclip.audit._accountants import GRID, SHORT_GRID, AccountantRow, compare_accountants
from weightclip.audit._built_in import subjects
from weightclip.audit._checks import FULL, QUICK, Check, Examination, json_ready, one_run_check
from weightclip.audit._estimators import canaries, estimator_check
from weightclip.audit._statistics import Curve, TwoWorlds
from weightclip.engine import version_of_package

PRINTED_AT_LEAST = 5.0
"""What the audits must show of the printed algorithm, which claims 1: less would mean that they have gone blind."""

SHARP = "joint cap"
"""The trainer whose bound is attained exactly by one record over all layers: flat clipping."""
PURE_TRAINER = "aligned dense net"
_ALSO = ("normalisation", "radii on both factors")


@dataclass(frozen=True)
class Caught:
    """One case of an algorithm that is known to break its claim: a test of the audits themselves."""

    name: str  #: the flaw
    sigma: float  #: noise multiplier that claims epsilon = 1
    rate: float  #: sampling rate of the claim
    shift: float  #: how far one record moves the mean, in multiples of what the algorithm allows
    result: TwoWorlds  #: lower bounds from the sampled releases
    note: str  #: the case in words
    scores: tuple[np.ndarray, np.ndarray] = field(repr=False)  #: log-likelihood ratios in both worlds, for the picture
    claim: Curve = field(repr=False)  #: the claimed curve

    def curve(self, epsilons: np.ndarray) -> np.ndarray:
        """Estimate of the true delta(epsilon) = E over D' of (1 - e^(epsilon - ratio))_+."""
        ratio = self.scores[1]
        return np.array([np.maximum(0.0, -np.expm1(np.minimum(0.0, e - ratio))).mean() for e in epsilons])


@dataclass
class Report:
    """All that was found; reproducible from its seed."""

    seed: int  #: root of all randomness
    quick: bool  #: whether this was the short audit
    delta: float  #: delta of every claim
    epsilons: tuple[float, ...]  #: claims audited by sampling
    checks: list[Check] = field(default_factory=list)  #: one entry per audit and trainer
    #: algorithms that are known to be unsound (`ExtraAudit` adds them): each must be caught
    printed: list[Caught] = field(default_factory=list)
    accountants: list[AccountantRow] = field(default_factory=list)  #: independent accountants side by side

    @property
    def failures(self) -> list[str]:
        """One line for everything that refutes a claim, or shows that the audit itself has gone blind."""
        found = [f"{c.audit}, {c.subject}: {c.note}" for c in self.checks if c.violation]
        found += [f"accountants, sigma {r.sigma:g}, q {r.q:g}, {r.steps} steps: {r.disagreement}"
                  for r in self.accountants if r.disagreement]  # fmt: skip
        found += [f"printed algorithm not caught: {c.name}" for c in self.printed if not c.result.violation]
        if self.printed and self.printed[0].result.epsilon_lower < PRINTED_AT_LEAST:
            found.append(f"printed algorithm: lower bound {self.printed[0].result.epsilon_lower:.3g} is below "
                         f"{PRINTED_AT_LEAST:g}")  # fmt: skip
        return found

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; no times, no machine names: the same seed gives the same report."""
        printed = [{"name": c.name, "note": c.note, "claimed": 1.0, "sigma": c.sigma, "rate": c.rate,
                    "shift": c.shift, **asdict(c.result)} for c in self.printed]  # fmt: skip
        accountants = [{**asdict(r), "disagreement": r.disagreement} for r in self.accountants]
        return json_ready({
            "seed": self.seed, "quick": self.quick, "delta": self.delta, "epsilons": list(self.epsilons),
            "versions": {name: version_of_package(name) for name in ("weightclip", "torch", "dp-accounting")},
            "failures": self.failures, "checks": [asdict(c) for c in self.checks], "printed": printed,
            "accountants": accountants,
        })  # fmt: skip

    def to_json(self) -> str:
        """The report as JSON."""
        return json.dumps(self.to_dict(), indent=1)


@dataclass(frozen=True)
class ExtraAudit:
    """An audit that the caller adds to `run_audit`, of a trainer of its own for example."""

    label: str  #: what it does, for the progress bar
    run: Callable[[Report], None]  #: adds to the report's ``checks``, or to ``printed`` what must be caught


Progress = Callable[[str, int, int], None]
"""Called with (what comes next, number done, number of all)."""


def run_audit(
    *,
    quick: bool = False,
    seed: int = 0,
    epsilons: Sequence[float] = (1.0, 2.0, 4.0, 8.0),
    delta: float = 1e-5,
    extra: Sequence[ExtraAudit] = (),
    progress: Progress | None = None,
) -> Report:
    """Run all audits.

    Args:
        quick: A minute or so instead of ten.
        seed: Root of all randomness.
        epsilons: Claims audited by sampling.
        delta: delta of every claim.
        extra: Audits besides the built-in ones.
        progress: Called before each audit.
    """
    report = Report(seed, quick, delta, tuple(epsilons))
    tasks = _tasks(report)
    tasks += [(one.label, lambda one=one: one.run(report)) for one in extra]
    for done, (label, task) in enumerate(tasks):
        if progress is not None:
            progress(label, done, len(tasks))
        task()
    if progress is not None:
        progress("done", len(tasks), len(tasks))
    return report


def _tasks(report: Report) -> list[tuple[str, Callable[[], None]]]:
    effort = QUICK if report.quick else FULL
    seed, delta = report.seed, report.delta
    trainers = {name: Examination(s, effort, seed, delta) for name, s in subjects().items()}
    tasks: list[tuple[str, Callable[[], None]]] = []

    def check(label: str, task: Callable[[], Check]) -> None:
        tasks.append((label, lambda: report.checks.append(task())))

    for name, trainer in trainers.items():
        check(f"{name}: falsifier", trainer.falsifier)
        check(f"{name}: one step, exact", trainer.one_step)
        check(f"{name}: law of a run", trainer.run_law)
        check(f"{name}: law of the draws", trainer.sampling)
        if not report.quick or trainer.subject.bounds.weight_norm is not None:
            check(f"{name}: falsifier, trained", trainer.trained)
    for p in (1.0, 2.0, math.inf):
        check(f"K-norm mechanism, p = {p:g}", lambda p=p: trainers[PURE_TRAINER].pure(p))
    sharp = trainers[SHARP]
    for e in report.epsilons:
        check(f"epsilon {e:g}: sampled releases", lambda e=e: sharp.releases(e))
        if not report.quick or e in (report.epsilons[0], report.epsilons[-1]):
            check(f"epsilon {e:g}: two worlds", lambda e=e: sharp.two_worlds(e))
        check(f"epsilon {e:g}: one run", lambda e=e: one_run_check(e, 1.0, effort, seed, delta))
        if report.quick:
            continue
        check(f"epsilon {e:g}: sampled releases, q = 0.1", lambda e=e: sharp.releases(e, 0.1))
        check(f"epsilon {e:g}: one run, q = 0.25", lambda e=e: one_run_check(e, 0.25, effort, seed, delta))
        for name in _ALSO:
            check(f"epsilon {e:g}: sampled releases, {name}", lambda e=e, n=name: trainers[n].releases(e))
    first = report.epsilons[0] if report.epsilons else 1.0
    if report.quick:
        check("random draws: sampled releases", lambda: sharp.releases(first, 0.1))
    else:
        check("random draws: two worlds", lambda: sharp.two_worlds(first, 0.25))

    fits, grid = (70, SHORT_GRID) if report.quick else (400, GRID)
    for canary in canaries():
        check(f"estimators: {canary.name}", lambda c=canary: estimator_check(c, delta=delta, runs=fits, seed=seed))
    tasks.append(("independent accountants", lambda: report.accountants.extend(compare_accountants(grid, delta))))
    return tasks
