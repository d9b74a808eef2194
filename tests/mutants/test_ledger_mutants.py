"""Mistakes a ledger can make, each as a patch: a check that passes on the real one fails on the mutant."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.mutants import ledger_checks as checks
from tests.mutants.kit import Mutants
from tests.mutants.ledger_checks import CHECKS

from weightclip.accounting import _ledger, _ledger_format
from weightclip.accounting._ledger import Ledger
from weightclip.accounting._ledger_format import Book
from weightclip.engine import _checkpoint
from weightclip.engine._engine import PrivacyEngine
from weightclip.engine._step import Training
from weightclip.sampling._loader import PoissonLoader


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_the_ledger_passes(check: Callable[[], None]) -> None:
    check()


Patch = pytest.MonkeyPatch
MUTANTS = Mutants()
mutant = MUTANTS.noticed_by


@mutant(checks.every_release_is_on_the_disk_before_it_is_seen)
def charged_after_the_release(patch: Patch) -> None:
    charge, after = PrivacyEngine.charge, Training.after_step

    def number(self) -> int:
        ledger, self._ledger = self._ledger, None
        try:
            return charge(self)
        finally:
            self._ledger = ledger

    def late(self, *args) -> None:
        self.engine.ledger.charge(None)
        after(self, *args)

    patch.setattr(PrivacyEngine, "charge", number)
    patch.setattr(Training, "after_step", late)


@mutant(checks.every_release_is_on_the_disk_before_it_is_seen)
def never_synced(patch: Patch) -> None:
    patch.setattr(_ledger, "_sync", lambda fd: None)


@mutant(checks.every_release_is_on_the_disk_before_it_is_seen)
def synced_before_it_is_written(patch: Patch) -> None:
    write, sync = _ledger._write, _ledger._sync

    def early(fd, data, at) -> None:
        sync(fd)
        write(fd, data, at)

    patch.setattr(_ledger, "_write", early)
    patch.setattr(_ledger, "_sync", lambda fd: None)


@mutant(checks.every_release_is_on_the_disk_before_it_is_seen)
def a_block_counts_as_one(patch: Patch) -> None:
    append = Ledger._append

    def fewer(self, fields, count=0) -> None:
        append(self, {**fields, "count": 1} if "count" in fields else fields, count)

    patch.setattr(Ledger, "_append", fewer)


@mutant(checks.a_killed_run_is_counted_whole)
def the_checkpoints_count_is_taken(patch: Patch) -> None:
    load = _checkpoint.load

    def believe(engine, path, *, exact) -> None:
        load(engine, path, exact=exact)
        engine.steps = _checkpoint._read(path)[0]["ledger"]["steps"]

    patch.setattr(_checkpoint, "load", believe)
    patch.setattr(PrivacyEngine, "mechanisms", lambda self: [self._mechanism(self.steps)])


@mutant(checks.a_killed_run_is_counted_whole)
def only_this_run_is_counted(patch: Patch) -> None:
    init = Ledger.__init__

    def forget(self, path, block=1) -> None:
        init(self, path, block)
        if self.book is not None:
            self.book._counts.clear()

    patch.setattr(Ledger, "__init__", forget)


@mutant(checks.changes_of_the_file_are_seen)
def checksums_are_not_looked_at(patch: Patch) -> None:
    patch.setattr(_ledger_format, "_open", lambda line, before: (line[:-44] + b"}", line[-34:-2].decode()))


@mutant(checks.changes_of_the_file_are_seen)
def checksums_do_not_cover_the_line_before(patch: Patch) -> None:
    whole = _ledger_format._check
    patch.setattr(_ledger_format, "_check", lambda payload, before: whole(payload, ""))


@mutant(checks.one_engine_at_a_time)
def no_lock(patch: Patch) -> None:
    patch.setattr(Ledger, "_lock", lambda self: None)


@mutant(checks.a_torn_line_is_counted)
def torn_lines_are_dropped(patch: Patch) -> None:
    patch.setattr(Book, "count_torn", lambda self: None)


@mutant(checks.a_torn_line_is_counted)
def torn_lines_are_cut_off_by_the_next_engine(patch: Patch) -> None:
    reload = Ledger._reload

    def cut(self) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Book, "count_torn", lambda self: None)
            reload(self)

    patch.setattr(Ledger, "_reload", cut)


@mutant(checks.neither_noise_nor_draws_come_twice)
def numbers_start_again(patch: Patch) -> None:
    init, charge = PrivacyEngine.__init__, Ledger.charge

    def fresh(self, *args, **settings) -> None:
        init(self, *args, **settings)
        self.steps = 0

    def number(self, left=None) -> int:
        charge(self, left)
        self._mine = getattr(self, "_mine", -1) + 1
        return self._mine

    patch.setattr(PrivacyEngine, "__init__", fresh)
    patch.setattr(Ledger, "charge", number)


@mutant(checks.neither_noise_nor_draws_come_twice)
def the_loader_goes_back(patch: Patch) -> None:
    def back(self, state) -> None:
        self.draws, self._unfinished = state["draws"], None
        self._number = lambda: state["draws"]  # in place of the engine's charges

    patch.setattr(PoissonLoader, "load_state_dict", back)


@mutant(checks.a_budget_counts_the_ledger)
def the_budget_is_for_this_run_alone(patch: Patch) -> None:
    patch.setattr(Ledger, "sigma_within", lambda self, sigma, *_: sigma)


@mutant(checks.a_budget_counts_the_ledger)
def the_steps_left_are_this_runs(patch: Patch) -> None:
    begin = Ledger.begin

    def note(self, *args) -> None:
        self.start = self.charges
        begin(self, *args)

    def left(self) -> int | None:
        return None if self.budget is None else self.budget - (self.steps - self._ledger.start)

    patch.setattr(Ledger, "begin", note)
    patch.setattr(PrivacyEngine, "steps_left", left)
    patch.setattr(PrivacyEngine, "refuse_overspending", lambda self: None)


@mutant(checks.an_older_ledger_does_not_go_with_the_checkpoint)
def any_ledger_goes_with_a_checkpoint(patch: Patch) -> None:
    patch.setattr(_checkpoint, "_check_file", lambda engine, ledger: None)


@mutant(checks.a_ledger_that_is_gone_stops_the_run)
def nobody_looks_whether_the_file_is_there(patch: Patch) -> None:
    patch.setattr(Ledger, "_refuse", lambda self: None)


@mutant(checks.without_a_ledger_a_resume_says_so)
def a_resume_without_a_ledger_is_silent(patch: Patch) -> None:
    load = _checkpoint.load

    def silent(engine, path, *, exact) -> None:
        with pytest.warns():
            load(engine, path, exact=exact)
        engine.uncounted = False

    patch.setattr(_checkpoint, "load", silent)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_mutant_is_caught(name: str, monkeypatch: Patch) -> None:
    mutate, check = MUTANTS[name]
    mutate(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check()
