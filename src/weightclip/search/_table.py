"""A table in a file, searched by one or several processes."""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import safetensors.numpy

from weightclip.search._shared import streams
from weightclip.search._storage import Agreed, SharedBoard, as_text
from weightclip.tabular import FitPlan, Model, PrivateScaling, Schema, SearchPlan, Task, run_epsilon, run_of
from weightclip.tabular import defaults as _defaults
from weightclip.tabular import files as _files
from weightclip.tabular import search as _search


@dataclass(frozen=True)
class TableSearch:
    """A search of settings for a table, decided before a record is read."""

    file: _files.File  #: the table
    target: str  #: column to predict
    schema: Schema  #: what is publicly known of its columns
    regression: bool  #: whether the target is a number
    epsilon: float  #: budget of the whole search and the model it releases
    delta: float | None = None  #: of that budget; None: 1/n^2, rounded down
    mean_runs: float = 10.0  #: mean of the geometric number of runs
    score_sigma: float = 10.0  #: standard deviation of the noise on a run's score, in records
    epochs: float | None = None  #: passes over the data of every run; None: the estimators' own
    n_records: int | None = None  #: public number of records; None: the true one is public
    seed: int | None = None  #: for experiments only; None: randomness of the operating system

    def search(self, board: SharedBoard | None = None) -> tuple[Model, dict[str, Any]]:
        """Model and report of the run that won, on a shared board (`shared_search`) or in this process alone."""
        how = self._how
        return _search(self._task, how if board is None else replace(how, run_epsilon=board.agreed.cost), board)

    # -- what a shared search asks for -------------------------------------------------------------------------------

    def settings(self) -> str:
        """Everything that decides about a run: all options, and a digest of the records."""
        digest = hashlib.sha256(repr((self._task.table.columns, self._task.classes)).encode())
        for block in self._task.table.blocks():
            digest.update(np.ascontiguousarray(block).tobytes())
        digest.update(np.ascontiguousarray(self._task.labels).tobytes())
        options = {k: v for k, v in self.__dict__.items() if k in self.__dataclass_fields__ and k != "file"}
        return as_text(**options, table=digest.hexdigest())

    def cost(self) -> float:
        """Epsilon of one run, at which the whole search costs its target."""
        return run_epsilon(self._task, self._how)

    def run(self, agreed: Agreed) -> Callable[..., tuple[float, Any]]:
        """One run: a private fit, and a noisy score."""
        return run_of(self._task, replace(self._how, run_epsilon=agreed.cost), agreed.drawn)

    def encode(self, result: tuple[Model, dict[str, Any]]) -> Any:
        """Model and report as JSON-ready values."""
        model, report = result
        arrays = {name: np.ascontiguousarray(value) for name, value in model.tensors().items()}
        weights = base64.b64encode(safetensors.numpy.save(arrays)).decode()
        return {"weights": weights, "pipeline": model.pipeline(), "report": report}

    def decode(self, stored: Any) -> tuple[Model, dict[str, Any]]:
        """Model and report."""
        weights = safetensors.numpy.load(base64.b64decode(stored["weights"]))
        return Model.load(weights, stored["pipeline"]), stored["report"]

    # -- inside ----------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        # another process reads the table by itself: a mapped array would be sent as a copy
        return {k: v for k, v in self.__dict__.items() if k in self.__dataclass_fields__}

    @functools.cached_property
    def _task(self) -> Task:
        loaded, span = self._loaded, self.schema.target_range or (0.0, 1.0)
        labels, classes = (loaded.target, ()) if self.regression else (loaded.codes(), loaded.classes)
        return Task(loaded.table, labels, classes, span, self.target)

    @functools.cached_property
    def _loaded(self) -> _files.Loaded:
        return _files.load(self.file, self.target, self.schema, self.regression)

    @functools.cached_property
    def _how(self) -> SearchPlan:
        n = len(self._loaded.table) if self.n_records is None else self.n_records
        plan = FitPlan(
            self.epsilon, _defaults.delta(n) if self.delta is None else self.delta, PrivateScaling(),
            {} if self.epochs is None else {"epochs": self.epochs}, "pld", streams(self.seed),
            not_covered=tuple(self._loaded.notes(self.delta, self.n_records)), records=n,
        )  # fmt: skip
        return SearchPlan(plan, self.mean_runs, self.score_sigma)
