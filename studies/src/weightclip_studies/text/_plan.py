"""The whole study as a list in order of importance, for a machine that is there for some minutes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weightclip_studies.text._canaries import Canaries
from weightclip_studies.text._networks import Full, Last, Lora, Part
from weightclip_studies.text._recipes import RECIPES, trials
from weightclip_studies.text._study import Study


@dataclass(frozen=True)
class Rows:
    """Rows of the table.

    Attributes:
        rows: What is trained, how, and at which ε (None without privacy).
        most: Runs of the chosen settings on the test part, where that is fewer than the study asks for: a row is there
            earlier, and a later stage completes it.
    """

    rows: tuple[tuple[Part, str, float | None], ...]
    most: int | None = None


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
    """Stages, the most important first: what the table has to say at least, then all of it, then recipes."""
    main, other = ("cap", "opacus"), ("factors", "quantiles")

    def rows(part: Part, epsilons: Sequence[float], methods: Sequence[str], most: int | None = None) -> Rows:
        return Rows(tuple((part, method, e) for e in epsilons for method in methods), most)

    def ceiling(part: Part, most: int | None = None) -> Rows:
        return Rows(((part, "non-private", None),), most)

    return (
        rows(lora, [8.0], main),
        ceiling(lora),
        ceiling(full),
        ceiling(last),
        rows(last, [8.0], main),
        rows(full, [8.0], main, 3),
        rows(lora, [8.0], other),
        rows(full, [8.0], main),
        rows(lora, [3.0, 1.0], main),
        Recipes(tuple(RECIPES), 8.0, lora),
        Audit(lora, "cap", 8.0, 4000),
        rows(last, [3.0, 1.0], main),
        rows(lora, [3.0, 1.0], other),
        rows(full, [3.0, 1.0], main),
        rows(last, [8.0], other),
        rows(full, [8.0], other),
    )


def timings(lora: Lora, last: Last, full: Full) -> tuple[Stage, ...]:
    """What is timed beside the plan, on a device that does nothing else meanwhile; the most important first."""
    main = ("cap", "non-private", "opacus")
    return Timing(lora, (*main, "factors", "quantiles")), Timing(full, main), Timing(last, main)


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
        elif isinstance(stage, Audit):
            yield Canaries(stage.canaries).sigma(study, study.grid(stage.part, stage.method)[:2][-1], stage.epsilon)
