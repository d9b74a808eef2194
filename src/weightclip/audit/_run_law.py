"""Law of a run: noise, sampling and ledger of the real engine over many steps, against what it states.

A noisy run and two noiseless twins, one without and one with the loudest record, walk the same path of weights. Their
differences show the noise itself (must be independent N(0, s_k^2)), the effect of the record at every step, whether it
takes part independently with probability q, and what all steps together cost, against the engine's own ledger.
"""

from __future__ import annotations

import math
import tempfile
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy import stats

from weightclip.audit._statistics import ALARM, Normality, check_normal, gaussian_epsilon
from weightclip.audit._subject import TOLERANCE, AuditRun, Records, Subject, joined
from weightclip.errors import UncountedReleases


@dataclass(frozen=True)
class RunLaw:
    """What a run did."""

    subject: str  #: its name
    sigma: float  #: the stated multiplier
    noise: Normality  #: whether the noise is standard normal in its stated units
    dependence: float  #: p-value of independence between steps and between coordinates (Bonferroni-corrected)
    shift: float  #: largest effect of the record in one step, in units; the claim allows 1
    sampling: float  #: p-value of "takes part independently with probability q"; 1 where q = 1
    epsilon_exact: float  #: exact epsilon of the releases observed; for q < 1 only what one step alone shows
    epsilon_claimed: float  #: what the engine's ledger says
    fresh: bool  #: whether a second resume from one checkpoint brought noise that was never seen before
    releases: int  #: number of releases observed
    charged: int  #: number of steps the engine charged

    @property
    def failures(self) -> tuple[str, ...]:
        """What refutes the claim, in words."""
        found = []
        if self.noise.suspicious:
            found.append(f"noise ({self.noise.why}, {self.noise.scale:.3g} of what is stated)")
        if self.dependence < ALARM:
            found.append("noise is not independent")
        if not self.fresh:
            found.append("a resumed run repeats its noise")
        if not self.shift <= 1 + TOLERANCE:
            found.append(f"one record moves a step by {self.shift:.4g}")
        if self.sampling < ALARM:
            found.append("records are not drawn independently with probability q")
        if not self.epsilon_exact <= self.epsilon_claimed * (1 + 1e-6):
            found.append(f"epsilon is {self.epsilon_exact:.4g}, the ledger says {self.epsilon_claimed:.4g}")
        if self.charged < self.releases:
            found.append(f"{self.releases} releases, {self.charged} charged")
        return tuple(found)

    @property
    def violation(self) -> bool:
        """Whether anything refutes the claim."""
        return bool(self.failures)


def run_law(
    subject: Subject,
    loudest: Records,
    *,
    sigma: float = 1.0,
    steps: int = 40,
    delta: float = 1e-5,
    records: int = 7,
    seed: int = 0,
    resume: bool = True,
) -> RunLaw:
    """Run a trainer with noise and compare every release with its noiseless twins.

    Args:
        subject: The trainer.
        loudest: The record whose effect is followed.
        sigma: Noise multiplier.
        steps: Releases; with ``resume`` the run is saved and resumed after half of them.
        delta: delta of the ledger's epsilon.
        records: Ordinary records beside it.
        seed: Root seed.
        resume: Save in the middle and continue in a fresh engine, then once more from the same checkpoint.
    """
    base = subject.ordinary(records, seed)
    larger = joined(base, loudest)
    noisy = subject.start(larger, sigma, seed)
    without, with_it = (subject.start(data, 0.0, seed, unit=sigma) for data in (base, larger))
    for twin in (without, with_it):
        twin.loader.streams = noisy.loader.streams  # draws of a seeded run follow from its settings, sigma among them
    residuals, signals, shifts = [], [], []

    def follow(run: AuditRun, count: int) -> None:
        for _ in range(count):
            weights = run.weights()
            without.set_weights(weights)
            with_it.set_weights(weights)
            release, a, b = run.step(), without.step(), with_it.step()
            residuals.append(((release - b) / sigma).numpy())
            signals.append((b / max(float(b.norm()), 1e-30)).numpy())
            shifts.append(float((b - a).norm()))

    half = steps // 2 if resume else steps
    follow(noisy, half)
    charged_by, fresh = noisy, True
    if resume:
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / "checkpoint"
            noisy.engine.save(place)
            charged_by = subject.start(larger, sigma, seed)
            _load(charged_by, place, exact=True)
            follow(charged_by, steps - half)
            again = _replayed(subject, larger, sigma, seed, place, with_it)
            # its randomness is the operating system's: only the verdict enters the report
            fresh = not again or _dependence(np.stack(residuals + again)) >= min(
                ALARM, _dependence(np.stack(residuals))
            )
    q = subject.rate
    mu = math.sqrt(sum(s**2 for s in shifts)) / sigma if q == 1 else 0.0
    return RunLaw(
        subject.name, sigma, _normal(np.stack(residuals), noisy.engine.training.release.sizes),
        _dependence(np.stack(residuals), np.stack(signals)),
        max(s if math.isfinite(s) else math.inf for s in shifts), _sampling(with_it, np.array(shifts) > 1e-6),
        gaussian_epsilon(mu, delta), charged_by.engine.get_epsilon(delta), fresh, steps, charged_by.engine.steps,
    )  # fmt: skip


def _normal(residuals: np.ndarray, sizes: list[int]) -> Normality:
    """Noise of all coordinates together, and of each parameter alone: a small one may lack noise unseen."""
    parts = np.split(residuals, np.cumsum(sizes), axis=1)
    found = [check_normal(part) for part in (residuals, *parts) if part.size]
    worst = min(found[1:], key=lambda f: f.p_value)
    p = min(1.0, len(parts) * worst.p_value)
    if found[0].suspicious or p >= ALARM:
        return found[0]
    return replace(worst, p_value=p)


def _load(run: AuditRun, place: Path, exact: bool = False) -> None:
    """Resume without a ledger, on purpose: this function knows every release."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncountedReleases)
        run.engine.load(place, exact=exact)


def _replayed(
    subject: Subject, data: Records, sigma: float, seed: int, place: Path, twin: AuditRun
) -> list[np.ndarray]:
    """Noise of the first steps after a second resume from the same checkpoint: none of it may have been seen before."""
    if subject.rate < 1:
        return []  # draws differ from the twin's
    run = subject.start(data, sigma, seed)
    _load(run, place)
    found = []
    for _ in range(4):
        twin.set_weights(run.weights())
        found.append(((run.step() - twin.step()) / sigma).numpy())
    return found


def _dependence(z: np.ndarray, signals: np.ndarray | None = None) -> float:
    """Smallest corrected p-value of a correlation between two steps, two coordinates, or noise and data."""
    smallest = 1.0
    if signals is not None and np.isfinite(z).all() and np.isfinite(signals).all():
        along = (z * signals).sum(1)  # standard normals, if the noise knows nothing of the data
        used = np.square(signals).sum(1) > 0.5
        if used.any():
            smallest = float(2 * stats.norm.sf(abs(along[used].sum()) / math.sqrt(used.sum())))
    for rows in (z, z.T):
        count, length = rows.shape
        if count < 2 or length < 8:
            continue
        rows = rows - rows.mean(1, keepdims=True)
        size = np.linalg.norm(rows, axis=1)
        if not np.isfinite(size).all() or (size == 0).any():
            return 0.0
        r = (rows @ rows.T) / np.outer(size, size)
        worst = float(np.abs(r[np.triu_indices(count, 1)]).max())
        t = min(worst, 1 - 1e-15) * math.sqrt((length - 2) / max(1e-30, 1 - min(worst, 1 - 1e-15) ** 2))
        smallest = min(smallest, float(2 * stats.t.sf(t, length - 2)) * count * (count - 1) / 2)
    return smallest


def _sampling(run: AuditRun, included: np.ndarray, draws: int = 2000) -> float:
    """Smallest corrected p-value that records take part independently with probability q, all draws alike.

    ``included`` is what the releases showed of one record; beside it the loader's draws themselves are examined.
    """
    q = run.subject.rate
    if q == 1:
        return 1.0 if included.all() or not included.any() else 0.0
    # the last record is the one that was followed: what the loader draws is what the releases show
    told = np.array([run.loader.indices(t)[-1:].tolist() == [len(run.x) - 1] for t in range(included.size)])
    if (told != included).any():
        return 0.0
    n = len(run.x)
    table = np.zeros((draws, n), dtype=bool)
    for t in range(draws):
        table[t, run.loader.indices(t)] = True
    tests = [stats.binomtest(int(column.sum()), draws, q).pvalue for column in table.T]
    width = max(2, round(1 / q))
    passes = table[: draws // width * width].reshape(-1, width, n).sum(1)
    for count in range(3):  # times that a record takes part in one pass of 1/q draws
        expected = float(stats.binom.pmf(count, width, q))
        tests += [stats.binomtest(int((c == count).sum()), len(c), expected).pvalue for c in passes.T]
    pairs = [table[:, i] & table[:, j] for i in range(n) for j in range(i)] + [
        table[1:, i] & table[:-1, i] for i in range(n)
    ]
    tests += [stats.binomtest(int(both.sum()), both.size, q * q).pvalue for both in pairs[:64]]
    return min(1.0, len(tests) * float(min(tests)))
