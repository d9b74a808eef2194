"""Mistakes a shared search can make, each as a patch: a check that passes on the real one fails on the mutant."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.mutants import search_checks as checks
from tests.mutants.kit import Mutants

from weightclip.errors import NotFinite
from weightclip.search import _storage
from weightclip.search._storage import SharedBoard
from weightclip.tabular import Drawn, _search

pytest.importorskip("optuna", reason="needs the extra 'search'")
pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

Patch = pytest.MonkeyPatch
MUTANTS = Mutants()
mutant = MUTANTS.noticed_by


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda c: c.__name__)
def test_a_shared_search_passes(check: Callable[[], None]) -> None:
    check()


@mutant(checks.a_run_that_fails_is_done)
def a_run_that_fails_is_done_again(patch: Patch) -> None:
    take_part = _search.take_part

    def again(run, root, board) -> None:
        def until_it_works(streams, generator):
            while True:
                with contextlib.suppress(NotFinite):
                    return run(streams, generator)

        take_part(until_it_works, root, board)

    patch.setattr(_search, "take_part", again)


@mutant(checks.runs_of_all_workers_are_those_that_were_drawn)
def runs_of_a_second_worker_are_not_counted(patch: Patch) -> None:
    """Whoever joins adds runs of its own to those whose number the cost is computed from."""
    join = SharedBoard.join

    def more(self, settings, wait=5.0):
        join(self, settings, wait)
        drawn = self._agreed.drawn
        self._agreed = replace(self._agreed, drawn=Drawn(drawn.split, (*drawn.candidates, secrets.token_bytes(32))))
        self._list_runs()

    patch.setattr(SharedBoard, "join", more)


@mutant(checks.who_looks_for_a_run_takes_it_before_others_look)
def two_look_at_once(patch: Patch) -> None:
    patch.setattr(_storage, "_take_turns", lambda engine: None)


@mutant(checks.what_was_drawn_stays_when_a_search_is_resumed)
def the_number_of_runs_is_drawn_again_on_resume(patch: Patch) -> None:
    join = SharedBoard.join

    def again(self, settings, wait=5.0):
        join(self, settings, wait)
        self._agreed = replace(self._agreed, drawn=Drawn(secrets.token_bytes(32), (secrets.token_bytes(32),)))

    patch.setattr(SharedBoard, "join", again)


@mutant(checks.a_killed_worker_hides_no_run)
def the_run_of_a_killed_worker_is_forgotten(patch: Patch) -> None:
    trials = SharedBoard._trials
    patch.setattr(SharedBoard, "_trials", lambda self: [t for t in trials(self) if t.state.name != "RUNNING"])


@mutant(checks.one_attempt_counts_where_two_end)
def results_are_kept_by_run_alone(patch: Patch) -> None:
    patch.setattr(_storage, "_result", lambda number, attempt: f"result/{number}")


@mutant(checks.nothing_is_shown)
def scores_are_printed(patch: Patch) -> None:
    put = SharedBoard.put

    def loud(self, number, score, result):
        print(f"run {number}: {score}")
        put(self, number, score, result)

    patch.setattr(SharedBoard, "put", loud)


@mutant(checks.nothing_is_shown)
def optuna_logs(patch: Patch) -> None:
    real = _storage._optuna

    def chatty():
        optuna = real()
        optuna.logging.set_verbosity(optuna.logging.DEBUG)
        return optuna

    patch.setattr(_storage, "_optuna", chatty)


@mutant(checks.only_the_owner_reads_it_and_nothing_is_left)
def everybody_may_read_the_scores(patch: Patch) -> None:
    patch.setattr(_storage, "make_private_file", lambda file, place: file.touch())
    patch.setattr(_storage, "check_private_file", lambda file, place: None)


@mutant(checks.only_the_owner_reads_it_and_nothing_is_left)
def scores_stay_after_the_search(patch: Patch) -> None:
    patch.setattr(SharedBoard, "erase", SharedBoard.close)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_mutant_dies(name: str, monkeypatch: Patch) -> None:
    mutate, check = MUTANTS[name]
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check()
