"""Mistakes that open models invite, each as a patch that a test of tests/engine must show."""

from __future__ import annotations

import pytest
import torch
from tests.engine import test_independence as independence
from tests.engine import test_open_models as tests
from tests.engine import test_sequences as sequences
from tests.engine.test_holes import REFUSED
from tests.holes import moved, usual
from tests.mutants.kit import Mutants
from torch import Tensor

import weightclip as wc
from weightclip.engine import _criterion, _gate, _independence, _install
from weightclip.engine._step import Training
from weightclip.factors._passes import Layout, RowTable

Patch = pytest.MonkeyPatch
MUTANTS = Mutants()
mutant = MUTANTS.noticed_by


@mutant(lambda: independence.test_mixing_that_double_precision_does_not_show_is_refused(independence.EyeProduct))
def double_precision_decides_about_everything(patch: Patch) -> None:
    """Numbers that overflow in the precision of the model, and there alone, hide one record behind another."""
    check = _install.check_independence

    def kept(probe, call, size, rowwise=False, places=True):
        return check(probe, call, size, rowwise) if places else None

    patch.setattr(_independence, "ContractError", _independence.MixesRecords)
    patch.setattr(_install, "check_independence", kept)


@mutant(sequences.test_a_length_at_which_records_mix_is_refused_when_it_comes)
def later_shapes_are_not_tested(patch: Patch) -> None:
    patch.setattr(Training, "_test", lambda self, passage, ends: False)
    patch.setattr(_install, "prepare", lambda owner, module, args, kwargs: next(iter(owner().tested)))


@mutant(lambda: sequences.test_copies_that_mix_or_change_records_are_refused(sequences.turned))
def copies_are_trusted(patch: Patch) -> None:
    patch.setattr(_gate, "copies_records", lambda value, edge, fold: True)


@mutant(lambda: sequences.test_copies_that_mix_or_change_records_are_refused(sequences.repeated))
def entries_may_be_repeated(patch: Patch) -> None:
    def by_record(value: Tensor, edge, fold: int) -> bool:
        record = torch.arange(len(value)).div(fold, rounding_mode="floor") + 1.0
        found, ones = (_gate.pulled_back(value, edge, g.view(-1, 1).expand_as(value)) for g in (record, 0 * record + 1))
        return bool((found == ones * (torch.arange(len(found)) + 1.0).view(-1, 1, 1)).all())

    patch.setattr(_gate, "copies_records", by_record)


@mutant(tests.test_the_models_own_loss_is_refused_with_the_fix_and_releases_nothing)
def the_wall_has_gaps(patch: Patch) -> None:
    patch.setattr(_gate._Wall, "backward", staticmethod(lambda ctx, gradient: (None,) * 4))


@mutant(lambda: sequences.test_every_position_in_one_view())
def rows_of_a_sequence_are_taken_for_records(patch: Patch) -> None:
    real = _criterion.PrivateCriterion.graded
    patch.setattr(_criterion.PrivateCriterion, "graded", lambda self, z, y, mask, fold=1: real(self, z, y, mask))


@mutant(sequences.test_longer_records_get_more_room_for_rounding_and_no_other_limit)
def room_for_rounding_of_the_first_shape_only(patch: Patch) -> None:
    real = _install.OpenPlan.learn
    patch.setattr(_install.OpenPlan, "learn", lambda self, seen: any(self.layers.values()) or real(self, seen))


def folded_rows_are_refused() -> None:
    make, act, match = REFUSED["positions folded into the batch"]
    with pytest.raises(wc.ContractError, match=match):
        moved(make, act, wc.Bounds())


@mutant(folded_rows_are_refused)
def rows_are_divided_by_records_without_asking(patch: Patch) -> None:
    patch.setattr(RowTable, "find", lambda self, place, shape, records: Layout(0, shape[0] // records))


@mutant(lambda: tests.test_batch_normalisation_in_training_is_refused_by_name_also_when_it_comes_later())
def batch_normalisation_is_let_in(patch: Patch) -> None:
    patch.setattr(_install, "refuse_mixing", lambda model: None)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_mutant_is_killed(name: str, monkeypatch: Patch) -> None:
    mutate, check = MUTANTS[name]
    mutate(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception, wc.WeightclipError)):
        check()


def test_without_a_mutant_the_checks_pass() -> None:
    folded_rows_are_refused()
    assert moved(tests.Base, usual, wc.Bounds()) <= 1 + 1e-4
