"""The board of a search that several processes share: an Optuna storage, in an SQLite file or on a database server.

It holds what nobody may see before the search is over: how many runs there are, and the noisy scores of all of them.
So the file is its owner's alone, and everything is deleted when the winner is written.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import multiprocessing
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from weightclip.errors import WeightclipError
from weightclip.search._place import SQLITE, Place, begun, check_private_file, make_private_file, nothing
from weightclip.tabular import ALL_FAILED, FAILED, Drawn

_BEAT = 5.0  # seconds between two signs of life of a run that is under way
_PATIENCE = 120.0  # seconds without one after which another process does the run again
_POLL = 0.2
_PLAN = "plan"


class SearchOver(WeightclipError):
    """Another process has ended the search that this one takes part in, and has deleted its storage."""


@dataclass(frozen=True)
class Agreed:
    """What all processes of a search must have in common."""

    settings: str  #: everything public that decides about a run, as text
    drawn: Drawn  #: what was drawn before the first run
    cost: float  #: noise of one run, found once: its epsilon, or its noise multiplier

    def to_json(self) -> dict[str, Any]:
        """For the storage."""
        return {"settings": _digest(self.settings), "cost": self.cost, "split": self.drawn.split.hex(),
                "candidates": [key.hex() for key in self.drawn.candidates]}  # fmt: skip


class SharedBoard:
    """Runs of one search, given out to all processes on one storage; as an Optuna storage keeps them.

    ``encode`` makes a result JSON-ready values, ``decode`` takes them back.

    Formal guarantees:
        The number of runs, their candidates and the split are drawn once, by :meth:`begin`, and stored before the first
        run; whoever takes part later reads them. Only these runs are given out, whoever asks: the law of their number,
        which the cost is computed from, is that of the whole search, not of each process. A run whose process died is
        done again, with fresh noise; no score of the lost attempt was kept, so the repeated run has the law of the
        first. Where two attempts at one run end, score and result of one of them count, chosen by who came first. The
        winner is a function of what is stored when all runs are done: asked twice, it is the same.
    """

    def __init__(self, place: Place, encode: Callable[[Any], Any], decode: Callable[[Any], Any]) -> None:
        self.place, self._encode, self._decode = place, encode, decode
        self._optuna = _optuna()
        self._mine: dict[int, int] = {}  # run -> attempt
        self.patient = True  # whether to wait for the runs of others, and do those they leave
        parent = multiprocessing.parent_process()  # perhaps dead by now: a helper takes seconds to get here
        self._parent = os.getppid() if parent is None else parent.pid
        self._agreed: Agreed | None = None

    # -- begin, join, end ------------------------------------------------------------------------------------------

    def begin(self, agreed: Agreed) -> None:
        """Start a search; refused where one of this name is there."""
        with _one_line(self.place):
            if (file := self.place.file) is not None:
                make_private_file(file, self.place)
            self._open()
            directions = [self._optuna.study.StudyDirection.MAXIMIZE] * 2  # a score, and the number of its attempt
            try:
                self._study = self._storage.create_new_study(directions, self.place.name)
            except self._optuna.exceptions.DuplicatedStudyError:
                raise WeightclipError(begun(self.place)) from None
            self._storage.set_study_user_attr(self._study, _PLAN, agreed.to_json())
        self._agreed = agreed
        self._list_runs()

    def join(self, settings: str, wait: float = 5.0) -> None:
        """Take part in a search that was begun, perhaps long ago."""
        with _one_line(self.place):
            if (file := self.place.file) is not None:
                check_private_file(file, self.place)
            self._open()
            try:
                self._study = self._storage.get_study_id_from_name(self.place.name)
            except KeyError:
                raise WeightclipError(nothing(self.place)) from None
            until = time.monotonic() + wait
            while (plan := self._storage.get_study_user_attrs(self._study).get(_PLAN)) is None:
                if time.monotonic() > until:
                    self.erase()
                    raise WeightclipError(
                        f"the search in {self.place} was interrupted before its first run: start it without --resume."
                    )
                time.sleep(_POLL)
        if plan["settings"] != _digest(settings):
            raise WeightclipError(
                f"the search in {self.place} was begun with other options or on another table: repeat them."
            )
        keys = tuple(bytes.fromhex(key) for key in plan["candidates"])
        self._agreed = Agreed(settings, Drawn(bytes.fromhex(plan["split"]), keys), plan["cost"])
        self._list_runs()

    def erase(self) -> None:
        """Delete everything that was stored: what is in it is as private as the records."""
        with _one_line(self.place):
            if (file := self.place.file) is None:
                with contextlib.suppress(KeyError):
                    self._storage.delete_study(self._study)
            self.close()
            if file is not None:
                for ending in ("", "-journal", "-wal", "-shm"):
                    file.with_name(file.name + ending).unlink(missing_ok=True)

    def close(self) -> None:
        """Leave the storage as it is."""
        self._storage.remove_session()
        self._storage.engine.dispose()

    # -- the board -------------------------------------------------------------------------------------------------

    @property
    def agreed(self) -> Agreed:
        """What all processes of the search have in common."""
        assert self._agreed is not None, "begin or join first"
        return self._agreed

    @property
    def drawn(self) -> Drawn:
        """What was drawn before the first run."""
        return self.agreed.drawn

    def runs(self) -> Iterator[int]:
        """Runs nobody else does; then, if patient, waits for those of others and does the ones they have left."""
        watch = _Watch()
        while self.patient or os.getppid() == self._parent:  # a helper leaves with its parent
            with self._guarded():
                trials = self._trials()
                number = self._claim(trials, watch if self.patient else None)
            if number is not None:
                with self._beating(number):
                    yield number
            elif all(t.state.is_finished() for t in trials) or not self.patient and not any(_free(t) for t in trials):
                return
            else:
                time.sleep(_POLL)

    def put(self, number: int, score: float, result: Any) -> None:
        """Keep what came of a run; the result only where it can still win."""
        state, attempt = self._optuna.trial.TrialState.COMPLETE, self._mine.pop(number)
        coded = None if score == FAILED else self._encode(result)
        with self._guarded():
            best = max((t.values[0] for t in self._trials() if t.state.is_finished()), default=-float("inf"))
            if score >= best:
                self._storage.set_study_user_attr(self._study, _result(number, attempt), coded)
            with contextlib.suppress(self._optuna.exceptions.UpdateFinishedTrialError):  # another attempt came first
                self._storage.set_trial_state_values(self._id(number), state, [score, float(attempt)])

    def best(self) -> tuple[float, Any]:
        """Score and result of the run that won; of equal ones the first."""
        with self._guarded():
            trials = self._trials()
            assert all(t.state.is_finished() for t in trials), "not all runs are done"
            won = max(trials, key=lambda t: (t.values[0], -t.number))
            if won.values[0] == FAILED:
                raise WeightclipError(ALL_FAILED)
            stored = self._storage.get_study_user_attrs(self._study)[_result(won.number, int(won.values[1]))]
        return float(won.values[0]), self._decode(stored)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        url, arguments = self.place.url, {"pool_pre_ping": True}
        if (file := self.place.file) is not None:  # mode=rw: a file that was deleted is not made again
            url, arguments = f"{SQLITE}file:{quote(str(file))}?mode=rw&uri=true", {"connect_args": {"timeout": 60}}
        self._storage = self._optuna.storages.RDBStorage(url, engine_kwargs=arguments)
        if file is not None:
            _take_turns(self._storage.engine)

    def _list_runs(self) -> None:
        """As many trials as runs were drawn; whoever made them was perhaps killed half-way."""
        waiting = self._optuna.trial.create_trial(state=self._optuna.trial.TrialState.WAITING)
        with self._guarded():
            for _ in range(self._storage.get_n_trials(self._study), len(self.drawn.candidates)):
                self._storage.create_new_trial(self._study, waiting)

    def _trials(self) -> list[Any]:
        """Those of the runs that were drawn: of two processes that listed them at once, both may have added some."""
        count = len(self.drawn.candidates)
        trials = [t for t in self._storage.get_all_trials(self._study, deepcopy=False) if t.number < count]
        if len(trials) < count:
            raise self._over("another process has ended it and written its model")
        return trials

    def _over(self, why: str) -> SearchOver:
        return SearchOver(f"the search in {self.place} is over: {why}.")

    def _claim(self, trials: list[Any], watch: _Watch | None) -> int | None:
        states, attempt = self._optuna.trial.TrialState, secrets.randbits(48)
        for trial in trials:  # as they were a moment ago
            with contextlib.suppress(self._optuna.exceptions.UpdateFinishedTrialError):
                free = _free(trial)
                if free:
                    free = self._storage.set_trial_state_values(self._id(trial.number), states.RUNNING)
                elif not trial.state.is_finished() and watch is not None:
                    free = watch.is_dead(trial.number, trial.user_attrs)
                if free:
                    self._storage.set_trial_user_attr(self._id(trial.number), "owner", _myself())
                    self._mine[trial.number] = attempt
                    return trial.number
        return None

    def _id(self, number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._study, number)

    @contextlib.contextmanager
    def _beating(self, number: int) -> Iterator[None]:
        """Signs of life while a run is under way; a helper whose parent died ends itself."""
        over, trial = threading.Event(), self._id(number)

        def beat() -> None:
            while not over.wait(_BEAT):
                if not self.patient and os.getppid() != self._parent:
                    os._exit(1)
                with contextlib.suppress(Exception):  # the next one will tell
                    self._storage.set_trial_user_attr(trial, "beat", secrets.token_hex(8))

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """A storage that vanished means that the search is over."""
        with _one_line(self.place):
            file = self.place.file
            if file is not None and not file.exists():
                raise self._over("its file was deleted")
            try:
                yield
            except KeyError as error:
                raise self._over("another process has ended it and written its model") from error


class _Watch:
    """Whether the process of a run is alive, by its number on this machine, or by its signs of life."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Any, float]] = {}

    def is_dead(self, number: int, attributes: dict[str, Any]) -> bool:
        machine, _, process = attributes.get("owner", "").rpartition("/")
        if process and machine == _myself().rpartition("/")[0] and int(process) != os.getpid():
            multiprocessing.active_children()  # buries helpers that died: as long as nobody does, they have a number
            try:
                os.kill(int(process), 0)
            except ProcessLookupError:
                return True
            except OSError:
                pass
        sign, now = (attributes.get("owner"), attributes.get("beat")), time.monotonic()
        if self._seen.get(number, (None, 0.0))[0] != sign:
            self._seen[number] = sign, now
        # who was killed while it took the run has not signed for it; a run that is done twice counts once
        return now - self._seen[number][1] > (_PATIENCE if machine else min(_PATIENCE, _BEAT))


def _free(trial: Any) -> bool:
    return trial.state.name == "WAITING"


def _take_turns(engine: Any) -> None:
    """Whoever begins to read an SQLite file writes before another one reads: no two processes take the same run.

    Python's driver begins a transaction only where something is written, so both would find the run free.
    """
    event = importlib.import_module("sqlalchemy").event
    event.listen(engine, "connect", lambda connection, _: setattr(connection, "isolation_level", None))
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    engine.dispose()  # connections made before do not know of it


def _myself() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()}/{boot}/{os.getpid()}"


def _result(number: int, attempt: int) -> str:
    return f"result/{number}/{attempt}"


def _digest(settings: str) -> str:
    return hashlib.sha256(settings.encode()).hexdigest()


def _optuna() -> Any:
    try:
        optuna = importlib.import_module("optuna")
    except ImportError as error:
        raise WeightclipError(
            "a search that is shared or resumed needs Optuna: pip install 'weightclip[search]'."
        ) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


@contextlib.contextmanager
def _one_line(place: Place) -> Iterator[None]:
    """Whatever a database can complain about, as one line without its URL."""
    try:
        yield
    except ImportError as error:  # psycopg2, for instance
        raise WeightclipError(f"--storage {place}: {error.name or error} is needed for it: pip install it.") from error
    except Exception as error:
        if type(error).__module__.startswith(("sqlalchemy", "optuna", "alembic", "sqlite3", "psycopg")):
            raise WeightclipError(f"--storage {place}: the database refuses ({type(error).__name__}).") from error
        raise


def as_text(**settings: Any) -> str:
    """Public settings as one text, to be compared."""
    return json.dumps(settings, sort_keys=True, default=repr)
