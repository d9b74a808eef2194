"""Runs the stages of a plan, one after the other, and writes each row as soon as it is there."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from weightclip.errors import WeightclipError
from weightclip_studies.text._canaries import Canaries
from weightclip_studies.text._figure import figure
from weightclip_studies.text._jobs import Jobs, seeds_of, write
from weightclip_studies.text._networks import Part
from weightclip_studies.text._plan import Audit, Recipes, Rows, Stage, Timing, calibrate
from weightclip_studies.text._recipes import recipe_row, write_recipes
from weightclip_studies.text._study import Line, Study, Told


@dataclass
class Runner:
    """Runs stages of a study; whatever was run before is read from its file.

    Attributes:
        study: The study; its clock decides what is still begun.
        seeds: Runs of the chosen settings on the test part.
        jobs: Runs at the same time, each in a process of its own.
        out: Where the table is written; recipes.csv and canaries.csv lie beside it.
        told: Says how it goes.
    """

    study: Study
    seeds: int
    jobs: int
    out: Path
    told: Told
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _failed: list[Exception] = field(default_factory=list)

    def run(self, stages: Sequence[Stage]) -> None:
        """All of them, in order; what fails is raised at the end.

        Raises:
            WeightclipError: Something that a stage needs is not here; nothing was run.
        """
        study, pool = self.study, None
        self._check(stages)
        if study.until:
            for _ in calibrate(study, stages):  # before processes share the table
                pass
        if self.jobs > 1 and study.until:
            pool = study.at_once = Jobs(study, self.jobs)
        try:
            self._all(stages)
        finally:
            if pool is not None:
                pool.close()
        if self.out.exists() and importlib.util.find_spec("matplotlib") is not None:
            figure(self.out, self.out.with_suffix(".png"))
        if self._failed:
            raise self._failed[0]

    def _all(self, stages: Sequence[Stage]) -> None:
        """In order; what need not have the device for itself may begin before what stands before it has ended."""
        study, number = self.study, 0
        for timed, group in itertools.groupby(stages, lambda stage: isinstance(stage, Timing)):
            together = list(group)
            left = max(0.0, study.until - time.time())
            if study.until and not left:
                self.told(f"no time left: stages {number + 1} to {len(stages)} were not begun")
                return
            for number, stage in enumerate(together, number + 1):  # noqa: B020
                self.told(f"stage {number} of {len(stages)}: {type(stage).__name__.lower()}, {left:.0f} s left")
            makers = [maker for stage in together for maker in self._makers(stage)]
            with ThreadPoolExecutor(self.jobs if study.at_once and not timed else 1) as threads:
                list(threads.map(self._make, makers))

    def _make(self, maker: Callable[[], None]) -> None:
        with self._going_on():
            maker()

    def _makers(self, stage: Stage) -> list[Callable[[], None]]:
        """What a stage consists of."""
        study, told = self.study, self.told
        if isinstance(stage, Rows):
            seeds = min(self.seeds, stage.most or self.seeds)
            return [lambda r=row: self._keep(study.row(*r, seeds, told), self._table) for row in stage.rows]
        if isinstance(stage, Recipes):
            epsilon, part, path = stage.epsilon, stage.part, self.out.with_name("recipes.csv")

            def put(row: Line) -> None:
                write_recipes(path, [row])

            return [lambda n=name: self._keep(recipe_row(study, n, epsilon, part, told), put) for name in stage.names]
        if isinstance(stage, Timing):
            timing, part = stage, stage.part
            timed = [lambda m=method: self._time(part, m) for method in stage.methods]
            return [*timed, lambda: self._again(timing), lambda: self._foretell(part)]
        return [lambda: self._audit(stage)]

    def _time(self, part: Part, method: str) -> None:
        found = self.study.pace(part, method)
        told = "not timed" if found is None else f"{1000 * found['seconds']:.1f} ms a step, {found['peak']:.2f} GiB"
        self.told(f"{part.name} {method}: {told}")

    def _foretell(self, part: Part) -> None:
        """How long the main rows of a part take."""
        study, found = self.study, []
        for method in ("cap", "opacus"):
            entry = study.timed(part, method)
            tried = len(study.grid(part, method))
            runs = (tried if tried > 1 else 0) + 3 * self.seeds
            found.append(float("nan") if entry is None else runs * entry["seconds"])
        steps = study.passes(part, "cap") * max(1, round(study.size / study.batch))
        self.told(f"{part.name}: cap and opacus at three budgets take {steps * sum(found):.0f} s")

    def _keep(self, row: Line | None, keep: Callable[[Line], None]) -> None:
        with self._lock:
            if row is not None:
                keep(row)

    @contextlib.contextmanager
    def _going_on(self) -> Iterator[None]:
        """What fails is told at once and raised when all else is done: minutes of a machine are not lost to it."""
        try:
            yield
        except Exception as error:
            self._failed.append(error)
            self.told(f"failed: {type(error).__name__}: {error}")

    def _table(self, row: Line) -> None:
        """Write the row, unless the file has it with more seeds: an earlier one stays until a new one is as sure."""
        if row["seeds"] < seeds_of(self.out, row):
            self.told(f"{row['part']} {row['method']} {row['epsilon']}: {row['seeds']} seeds only, left as it was")
        else:
            write(self.out, [row])

    def _again(self, timing: Timing) -> None:
        """Rows that are there already, with the times that are known now."""
        known = replace(self.study, until=0.0, at_once=None)
        for method in timing.methods:
            for epsilon in (None,) if method == "non-private" else (8.0, 3.0, 1.0):
                row = known.row(timing.part, method, epsilon, self.seeds, lambda line: None)
                self._keep(row, self._table)

    def _audit(self, stage: Audit) -> None:
        settings = self.study.grid(stage.part, stage.method)[:2][-1]
        found = Canaries(stage.canaries).kept(self.study, stage.part, settings, stage.epsilon)
        if found is None:
            self.told(f"{stage.part.name} {stage.method}: not audited")
            return
        row = {"part": stage.part.name, "method": stage.method, "epsilon": f"{stage.epsilon:g}",
               "device": self.study.device.type, **{k: found[k] for k in _FOUND}}  # fmt: skip
        write(self.out.with_name("canaries.csv"), [row], tuple(row))
        self.told(f"{stage.part.name} {stage.method}: epsilon claimed {stage.epsilon:g}, at least "
                  f"{found['epsilon_lower']:.2f} ({found['correct']} of {found['guesses']} guesses right)")  # fmt: skip

    def _check(self, stages: Sequence[Stage]) -> None:
        """Refuse at once what would fail minutes later."""
        methods = {row[1] for stage in stages if isinstance(stage, Rows) for row in stage.rows}
        methods |= {m for stage in stages if isinstance(stage, Timing) for m in stage.methods}
        if "opacus" in methods and self.study.until and importlib.util.find_spec("opacus") is None:
            raise WeightclipError("the method opacus needs its package: pip install opacus, or leave the method out.")
        self.study.data.encoder()
        if self.study.until and self.study.device.type == "cuda" and not torch.cuda.is_available():
            raise WeightclipError("--device cuda: torch finds no GPU here.")


_FOUND = ("canaries", "guesses", "correct", "epsilon_lower", "epsilon_lower_fdp", "mu", "violation", "steps")
