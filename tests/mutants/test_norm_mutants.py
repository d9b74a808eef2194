"""Certified norms and their drift without what makes them sound: each mistake, and the test that must notice."""

from __future__ import annotations

import pytest
import torch
from tests.bounds import test_narrow as narrow
from tests.bounds import test_operator_norms as norms
from tests.bounds import test_proved as proved
from tests.certificate import test_bank as bank
from tests.certificate import test_drift as drifts
from tests.mutants.kit import Mutants

from weightclip.bounds import _narrow, _operator_norms, _proved
from weightclip.certificate import _bank, _drift, _gains

MUTANTS = Mutants()
noticed_by = MUTANTS.noticed_by
Patch = pytest.MonkeyPatch


def cholesky() -> None:
    with pytest.MonkeyPatch.context() as patch:
        norms.test_large_symmetric_matrices_are_bounded_by_cholesky(1.0, patch)


@noticed_by(cholesky)
def a_factorisation_that_broke_off_is_taken_for_one_that_did_not(patch: Patch) -> None:
    real = torch.linalg.cholesky_ex

    class Done:
        def __init__(self, matrix) -> None:
            self.L, self.info = real(matrix).L, torch.zeros((), dtype=torch.int32)

    patch.setattr(torch.linalg, "cholesky_ex", Done)


@noticed_by(proved.check_blind)
def a_guess_without_its_residual(patch: Patch) -> None:
    patch.setattr(_proved, "residual_bound", lambda gram, mu, factor: mu)


@noticed_by(proved.check_rounding)
def a_residual_without_the_rounding_of_its_product(patch: Patch) -> None:
    patch.setattr(_proved, "frobenius", lambda t: _operator_norms.frobenius(t) * float(not torch.equal(t, t.tril())))


@noticed_by(narrow.check_narrow)
def a_cast_to_float16_that_loses_nothing(patch: Patch) -> None:
    patch.setattr(_narrow, "_CUT", 0.0)


@noticed_by(narrow.check_sums)
def sums_of_tensor_cores_without_rounding(patch: Patch) -> None:
    patch.setattr(_narrow, "_SUMS", 0.0)


@noticed_by(narrow.check_rows)
def rows_added_in_float32_without_rounding(patch: Patch) -> None:
    patch.setattr(_narrow, "_U32", 0.0)


@noticed_by(drifts.check_growth)
def drift_dropped(patch: Patch) -> None:
    patch.setattr(_gains, "drift", lambda module, now, then: torch.zeros((), dtype=torch.float64))


@noticed_by(drifts.check_growth)
def drift_since_the_step_before(patch: Patch) -> None:
    real = _gains.drift

    def last(module, now, then):
        found = real(module, now, then)
        then.copy_(now)
        return found

    patch.setattr(_gains, "drift", last)


@noticed_by(drifts.check_growth)
def weights_of_a_snapshot_renewed_and_its_norms_not(patch: Patch) -> None:
    real = _gains._kept_in

    def kept(place, value):
        return place if place is not None and value.dim() == 0 else real(place, value)

    patch.setattr(_gains, "_kept_in", kept)


@noticed_by(drifts.check_growth)
def a_snapshot_that_is_the_weights_themselves(patch: Patch) -> None:
    patch.setattr(_gains, "_kept_in", lambda place, value: value)


@noticed_by(drifts.test_norms_clipping_found_serve_only_the_weights_it_left)
def norms_that_clipping_found_serve_later_weights(patch: Patch) -> None:
    patch.setattr(_gains._Clipped, "norms_if_unchanged", lambda self, bank, weights: self.norms)


@noticed_by(drifts.check_shared)
def norms_that_clipping_found_outlive_writes_through_data(patch: Patch) -> None:
    patch.setattr(_gains, "_frobenius", lambda weights: [0.0] * len(weights))


@noticed_by(drifts.check_settled)
def norms_that_clipping_found_outlive_the_snapshot(patch: Patch) -> None:
    real = _gains.Gains.settle

    def settle(self: _gains.Gains) -> None:
        kept = self._clipped
        real(self)
        self._clipped = kept

    patch.setattr(_gains.Gains, "settle", settle)


@noticed_by(drifts.check_own_rule)
def every_dense_layer_has_the_norm_of_its_weight(patch: Patch) -> None:
    patch.setattr(_gains, "gain_is_norm", _gains.is_layer)


@noticed_by(bank.check_autocast)
def a_gram_matrix_rounded_like_the_passes(patch: Patch) -> None:
    patch.setattr(_bank, "_narrowed", lambda: False)


def unit_step() -> None:
    layer, then = torch.nn.Linear(8, 8), torch.zeros(8, 8)
    now = torch.eye(8)[:1].T @ torch.eye(8)[:1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_drift, "_worth", lambda matrix: True)
        assert float(_drift.drift(layer, now, then)) >= 1


@noticed_by(unit_step)
def a_root_too_many(patch: Patch) -> None:
    real = _drift.narrow_norm
    patch.setattr(_drift, "narrow_norm", lambda matrix, size: real(matrix / 4, size=size / 4).sqrt())


@pytest.mark.parametrize("name", MUTANTS)
def test_each_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, check = MUTANTS[name]
    check()
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check()
