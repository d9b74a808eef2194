"""Trials of a study in several processes, and its table as a file."""

from __future__ import annotations

import csv
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

from weightclip_studies.text._study import Line, Study, Trial

COLUMNS: tuple[str, ...] = (
    "part", "method", "epsilon", "delta", "accountant", "seeds", "median", "sem", "seconds", "ratio", "peak_gib",
    "device", "steps", "batch", "rate", "clip", "dev",
)  # fmt: skip
_SAME = "part", "method", "epsilon"  # by which a row is known
_here: Study | None = None  # the study of a worker


class Jobs:
    """Runs trials of a study in processes of their own, each trial once however many rows ask for it.

    Args:
        study: The study; workers get a copy.
        count: How many processes.
    """

    def __init__(self, study: Study, count: int) -> None:
        self._pool = ProcessPoolExecutor(count, get_context("spawn"), _begin, (replace(study, at_once=None),))
        self._asked: dict[Trial, Future[Line | None]] = {}
        self._lock = threading.Lock()

    def __call__(self, trials: Sequence[Trial]) -> list[Line | None]:
        with self._lock:
            for trial in trials:
                if trial not in self._asked:
                    self._asked[trial] = self._pool.submit(_work, trial)
        return [self._asked[trial].result() for trial in trials]

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown()


def _begin(study: Study) -> None:
    global _here
    _here = study


def _work(trial: Trial) -> Line | None:
    assert _here is not None
    return _here.run(trial)


def write(
    path: Path, rows: Sequence[Line], columns: Sequence[str] = COLUMNS,
    same: Sequence[str] = _SAME,
    arranged: Callable[[list[Line]], list[Line]] | None = None,
) -> None:  # fmt: skip
    """A table as a file; rows that are there already are replaced.

    Args:
        path: The CSV file.
        rows: New rows.
        columns: Its columns.
        same: Those by which a row is known.
        arranged: Puts all rows in order; by default the columns of ``same`` do.
    """
    kept: list[Line] = []
    new = {tuple(str(r[k]) for k in same) for r in rows}
    if path.exists():
        with path.open(newline="") as file:
            kept = [dict(r) for r in csv.DictReader(file) if tuple(r[k] for k in same) not in new]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(columns), lineterminator="\n")
        writer.writeheader()
        both = [*kept, *rows]
        writer.writerows(sorted(both, key=lambda r: [str(r[k]) for k in same]) if arranged is None else arranged(both))


def seeds_of(path: Path, row: Line) -> int:
    """Seeds of the row that `write` would replace; 0 where there is none."""
    if not path.exists():
        return 0
    with path.open(newline="") as file:
        found = [int(old["seeds"]) for old in csv.DictReader(file) if all(old[k] == str(row[k]) for k in _SAME)]
    return max(found, default=0)
