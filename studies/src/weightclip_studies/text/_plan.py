"""The whole study as a list in order of importance, for a machine that is there for some minutes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weightclip_studies.text._networks import Full, Last, Lora, Part
from weightclip_studies.text._recipes import RECIPES, trials
from weightclip_studies.text._study import Study


@dataclass(frozen=True)
class Rows:
    """Rows of the table: what is trained, how, and at which ε (None without privacy)."""

    rows: tuple[tuple[Part, str, float | None], ...]


@dataclass(frozen=True)
class Timing:
    """Time and memory of methods, measured while nothing else runs."""

    part: Part
    methods: tuple[str, ...]


@dataclass(frozen=True)
class Recipes:
    """Rows of the recipes' table."""

    names: tuple[str, ...]
    epsilon: float
    part: Part


@dataclass(frozen=True)
class Audit:
    """A lower bound of ε by inserted sentences."""

    part: Part
    method: str
    epsilon: float
    canaries: int


Stage = Rows | Timing | Recipes | Audit


def plan(lora: Lora, last: Last, full: Full) -> tuple[Stage, ...]:
    """Stages, the most important first; one begins when the one before it has ended."""
    main, other = ("cap", "opacus"), ("factors", "quantiles")
    timed = ("non-private", *main, *other)

    def rows(part: Part, epsilons: Sequence[float], methods: Sequence[str]) -> Rows:
        return Rows(tuple((part, method, e) for e in epsilons for method in methods))

    def ceiling(part: Part) -> Rows:
        return Rows(((part, "non-private", None),))

    return (
        rows(lora, [8.0, 3.0, 1.0], main),
        Timing(lora, timed),
        Audit(lora, "cap", 8.0, 4000),
        rows(last, [8.0], main),
        rows(full, [8.0], main),
        ceiling(lora),
        rows(lora, [8.0], other),
        ceiling(last),
        ceiling(full),
        Timing(last, timed),
        Timing(full, timed),
        rows(lora, [3.0, 1.0], other),
        rows(last, [3.0, 1.0], main),
        rows(full, [3.0, 1.0], main),
        rows(last, [8.0], other),
        rows(full, [8.0], other),
        Recipes(tuple(RECIPES), 8.0, lora),
    )


def calibrate(study: Study, stages: Sequence[Stage]) -> Iterator[float]:
    """Find every noise multiplier of the stages, which takes seconds each, before a machine waits for it."""
    for stage in stages:
        if isinstance(stage, Rows):
            for part, method, epsilon in stage.rows:
                for settings in study.grid(part, method):
                    yield study.sigma(settings, epsilon)
        elif isinstance(stage, Recipes):
            for name in stage.names:
                for group in trials(study, name, stage.epsilon, stage.part):
                    yield study.sigma(group[0].settings, stage.epsilon)
