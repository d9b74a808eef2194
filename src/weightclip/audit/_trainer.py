"""Audit of anybody's trainer: a function from data to what it releases, tried on two neighbouring data sets.

Nothing is known about the trainer but its claim. It is run many times on each data set; a first part of the runs (the
pilot) chooses how to tell the two apart, the rest measures how well that works, and Clopper-Pearson bounds turn it into
a lower bound of epsilon. Whatever is released counts: values, their spread, even how many there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from weightclip.accounting import Mechanism
from weightclip.accounting import delta as delta_of
from weightclip.audit._checks import json_ready
from weightclip.audit._statistics import Curve, TwoWorlds, compare
from weightclip.errors import WeightclipError

_TINY = 1e-300
_PILOT = 0.25  # of the runs


@dataclass(frozen=True)
class Trainer:
    """A trainer to audit, and its claim.

    Attributes:
        train: ``train(data, seed)`` trains once and returns everything that it releases: an array or tensor, a module,
            or a list or dictionary of them (the final weights, or the weights after every step: more tells more).
            A trainer that follows ``seed`` in all its randomness makes the audit sharper, others are fine.
        without: A data set.
        with_record: The same with one record more (or with one replaced, if that is what the claim is about).
        epsilon: Claimed epsilon.
        delta: Claimed delta.
        mechanisms: The claim in full, if it is known (noise, sampling rate, steps): tested along its whole curve.
        score: A number from what was released, larger where the record took part; chosen by the pilot if not given.
        name: For the report.

    Example:
        >>> import numpy as np
        >>> def train(data, seed):
        ...     return sum(data) + np.random.default_rng(seed).normal(scale=3.0)
        >>> found = audit_trainer(Trainer(train, [0.5] * 8, [0.5] * 8 + [1.0], epsilon=2.0, delta=1e-5), runs=400)
        >>> found.violation
        False
    """

    train: Callable[[Any, int], Any]
    without: Any
    with_record: Any
    epsilon: float
    delta: float
    mechanisms: tuple[Mechanism, ...] = ()
    score: Callable[[Any], float] | None = None
    name: str = "trainer"

    def __post_init__(self) -> None:
        if not self.epsilon >= 0 or math.isinf(self.epsilon):
            raise WeightclipError(f"Trainer.epsilon must be a number from 0 up, got {self.epsilon!r}.")
        if not 0 <= self.delta < 1:
            raise WeightclipError(f"Trainer.delta must lie in [0, 1), got {self.delta!r}.")

    @property
    def claim(self) -> Curve:
        """delta(epsilon) of the claim; with (epsilon, delta) alone nothing is claimed below that epsilon."""
        known = list(self.mechanisms)
        if known:
            return lambda e: min(1.0, delta_of(known, e))
        return lambda e: self.delta if e >= self.epsilon else 1.0


@dataclass(frozen=True)
class TrainerAudit:
    """What the audit of a trainer found."""

    name: str  #: the trainer
    epsilon: float  #: claimed
    delta: float  #: claimed
    result: TwoWorlds  #: lower bounds, and whether the claim is refuted (at a level of one false alarm in a million)
    told_by: str  #: what told the data sets apart best in the pilot
    scores: tuple[np.ndarray, np.ndarray]  #: scores of the runs without and with the record

    @property
    def violation(self) -> bool:
        """Whether the claim is refuted."""
        return self.result.violation

    def to_dict(self) -> dict[str, Any]:
        """Everything but the scores, ready for JSON."""
        return json_ready({"name": self.name, "epsilon_claimed": self.epsilon, "told_by": self.told_by,
                           **asdict(self.result)})  # fmt: skip

    def __str__(self) -> str:
        verdict = "REFUTED" if self.violation else "not refuted"
        return (
            f"{self.name}: claimed epsilon {self.epsilon:g} at delta {self.delta:g}; 95% lower bound "
            f"{self.result.epsilon_lower:.3g} from {self.result.trials} runs each, told by {self.told_by}: {verdict}"
        )


def audit_trainer(
    trainer: Trainer, *, runs: int = 1000, seed: int = 0, progress: Callable[[int, int], None] | None = None
) -> TrainerAudit:
    """Try to refute what a trainer claims.

    Args:
        trainer: The trainer, its two data sets and its claim.
        runs: Trainings on each data set; a quarter of them is the pilot.
        seed: Seeds of the runs follow from it.
        progress: Called with (runs done, runs in all).

    Formal guarantees:
        If the trainer is (epsilon, delta)-DP (or follows the curve of ``mechanisms``) for this pair of data sets and
        its runs are independent, ``violation`` is true with probability below 1e-6 and ``epsilon_lower`` exceeds
        epsilon with probability below 5%. That nothing is found proves nothing.
    """
    if runs < 40:
        raise WeightclipError(f"runs must be at least 40, got {runs}: fewer can refute nothing.")
    pilot = round(_PILOT * runs)
    total, done, parts = 2 * runs, 0, 1
    released: list[list[Any]] = [[], []]
    for i in range(runs):
        for world, data in enumerate((trainer.without, trainer.with_record)):
            # the pilot's runs share their seeds, so that what differs is the record; judged runs are independent
            number = seed + i if i < pilot else seed + (1 + world) * 1_000_000_007 + i
            found = trainer.train(data, number % 2**31)
            parts = _parts(found) if done == 0 else parts
            released[world].append(trainer.score(found) if trainer.score is not None else flat(found))
            done += 1
            if progress is not None:
                progress(done, total)
    if trainer.score is None:
        told_by, score = _choose(released[0][:pilot], released[1][:pilot], parts)
    else:
        told_by, score = "the given score", float
    scores = [np.array([score(found) for found in world[pilot:]], dtype=float) for world in released]
    result = compare(scores[0], scores[1], trainer.delta, trainer.claim)
    return TrainerAudit(trainer.name, trainer.epsilon, trainer.delta, result, told_by, (scores[0], scores[1]))


def flat(released: Any) -> np.ndarray:
    """Everything that was released as one vector; dictionaries by their sorted keys."""
    if hasattr(released, "state_dict"):
        released = released.state_dict()
    if isinstance(released, Mapping):
        released = [released[key] for key in sorted(released)]
    if isinstance(released, (list, tuple)):
        return np.concatenate([flat(part) for part in released]) if released else np.zeros(0)
    if hasattr(released, "detach"):
        released = released.detach().cpu().double().numpy()
    try:
        return np.asarray(released, dtype=float).ravel()
    except (TypeError, ValueError):
        raise WeightclipError(
            f"train() returned a {type(released).__name__}: return arrays, tensors, modules, or lists and dictionaries "
            "of them."
        ) from None


def _parts(released: Any) -> int:
    """How many states of one size were released one after the other; 1 if it is not a list of such."""
    if not isinstance(released, (list, tuple)) or len({flat(part).size for part in released}) != 1:
        return 1
    return len(released)


def _choose(
    without: list[np.ndarray], with_record: list[np.ndarray], parts: int
) -> tuple[str, Callable[[np.ndarray], float]]:
    """How to tell the two apart, by the pilot alone: where values lie, how far they spread, or how many there are."""
    sizes = [np.array([len(v) for v in world]) for world in (without, with_record)]
    usual = len(without[0])
    if not all((s == usual).all() for s in sizes):
        sign = 1.0 if sizes[1].mean() >= sizes[0].mean() else -1.0
        if abs(sizes[1].mean() - sizes[0].mean()) > 0.05:
            return "how many numbers are released", lambda v: sign * len(v)

    def fitted(v: np.ndarray) -> np.ndarray:
        out = np.zeros(usual)
        out[: min(usual, len(v))] = v[:usual]
        return np.nan_to_num(out, nan=1e100, posinf=1e100, neginf=-1e100)

    half = len(without) // 2  # one half finds directions, the other chooses: in many dimensions every direction fits
    options: dict[str, Callable[[np.ndarray], float]] = {}
    for name, view in (("values", lambda v: v), ("changes from one released state to the next", _changes)):
        if view is _changes and parts < 2:
            continue

        def seen(v: np.ndarray, view: Callable[[np.ndarray], np.ndarray] = view) -> np.ndarray:
            return view(fitted(v).reshape(parts, -1)).ravel()

        where, spread = _discriminants(seen, without[:half], with_record[:half])
        options[f"where the released {name} lie"] = where
        options[f"how far the released {name} spread"] = spread

    def gap(score: Callable[[np.ndarray], float]) -> float:
        s0, s1 = (np.array([score(v) for v in world[half:]]) for world in (without, with_record))
        spread = math.sqrt((s0.var() + s1.var()) / 2)
        return float(s1.mean() - s0.mean()) / max(spread, _TINY)

    best = max(options, key=lambda name: gap(options[name]))
    return best, options[best]


def _changes(states: np.ndarray) -> np.ndarray:
    """Differences of successive states: noise that adds up over the steps comes apart again."""
    return np.diff(states, axis=0, prepend=0.0)


def _discriminants(
    seen: Callable[[np.ndarray], np.ndarray], without: list[np.ndarray], with_record: list[np.ndarray]
) -> tuple[Callable[[np.ndarray], float], Callable[[np.ndarray], float]]:
    """Scores by the place of the values, and by their squared distance from where they usually lie."""
    a, b = (np.stack([seen(v) for v in world]) for world in (without, with_record))
    centre, variance = a.mean(0), (a.var(0) + b.var(0)) / 2
    weight = 1 / np.maximum(variance, max(float(variance.max(initial=0.0)) * 1e-12, _TINY))
    direction = (b.mean(0) - centre) * weight
    grows = 1.0 if (b.var(0) * weight).sum() >= (a.var(0) * weight).sum() else -1.0
    return (
        lambda v: float((seen(v) - centre) @ direction),
        lambda v: grows * float(np.square(seen(v) - centre) @ weight),
    )
