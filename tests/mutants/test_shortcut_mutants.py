"""Shortcuts without what makes them sound: the tests that stand guard must notice."""

from __future__ import annotations

import math

import pytest
import torch
from tests.bounds import test_operator_norms as norms
from tests.factors import test_limits as limits
from tests.losses import test_cross_entropy as entropy

from weightclip.bounds import _operator_norms
from weightclip.factors import _limits
from weightclip.factors._limits import CAP, COTANGENT, RADIUS, record_scale
from weightclip.losses import CrossEntropy


def test_an_eigenvalue_that_was_guessed_and_not_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_operator_norms, "_top", lambda gram: _operator_norms.lanczos(gram) * (1 + 1e-6))
    with pytest.raises(AssertionError):
        norms.test_large_symmetric_matrices_are_bounded_by_cholesky(1.0, monkeypatch)


@pytest.mark.parametrize("stranger", ["label", "nan"])
def test_a_batch_taken_for_usual_without_a_look(stranger: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entropy.test_a_stranger_in_the_batch_changes_no_bit_of_another_row(CrossEntropy(), stranger)
    monkeypatch.setattr(CrossEntropy, "_all_usual", lambda self, v, y: True)
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        entropy.test_a_stranger_in_the_batch_changes_no_bit_of_another_row(CrossEntropy(), stranger)


@pytest.mark.parametrize("flags", [RADIUS, COTANGENT, CAP, RADIUS | COTANGENT | CAP])
def test_a_record_without_a_finite_factor_gets_zero_and_changes_nobody(flags: int) -> None:
    """Whichever way the batch takes, a record's scale is its own, bit by bit."""
    g = torch.Generator().manual_seed(0)
    limits = torch.tensor([1.0, 0.5, 0.3])
    x, d = 3 * torch.rand(64, generator=g), 3 * torch.rand(64, generator=g)
    alone = record_scale(x, d, limits, flags)
    assert alone is not None and bool((alone > 0).all())
    for bad in ((float("nan"), 1.0), (1.0, float("inf")), (float("inf"), 1.0), (1.0, float("nan")), (1e38, 1e38)):
        more = record_scale(torch.cat([x, torch.tensor(bad[:1])]), torch.cat([d, torch.tensor(bad[1:])]), limits, flags)
        assert more is not None and torch.equal(more[:-1], alone)
        if bad != (1e38, 1e38):
            assert more[-1] == 0
        assert float(more[:-1].min()) >= _limits.SMALLEST


@pytest.mark.parametrize("mistake", ["whatever the cap", "whatever was written since"])
def test_a_cap_taken_for_kept_by_the_radii(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limits.caps_that_radii_do_not_keep_act()
    if mistake == "whatever the cap":
        monkeypatch.setattr(_limits, "_IMPLIED", 0.0)
    else:
        monkeypatch.setattr(_limits, "implied", lambda row: row._wc_implied is not None)
    with pytest.raises(AssertionError):
        limits.caps_that_radii_do_not_keep_act()


def test_scales_taken_for_normal_without_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros_for_what_is_no_norm() -> None:
        for bad in (math.nan, math.inf):
            assert _limits.within_one(torch.tensor([0.5, 2.0, bad])).tolist() == [1.0, 0.5, 0.0]

    zeros_for_what_is_no_norm()
    monkeypatch.setattr(_limits, "all_normal", lambda scale: True)
    with pytest.raises(AssertionError):
        zeros_for_what_is_no_norm()


def test_powers_of_the_closed_recursion_that_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    def constant(values, device):
        return torch.tensor([values[0], *(1.5 * value for value in values[1:])], dtype=torch.float64, device=device)

    norms.test_the_closed_recursion_is_an_upper_bound_at_every_depth()
    monkeypatch.setattr(_operator_norms, "constant", constant)
    with pytest.raises(AssertionError):
        norms.test_the_closed_recursion_is_an_upper_bound_at_every_depth()


def test_a_closed_recursion_that_forgets_a_scaling(monkeypatch: pytest.MonkeyPatch) -> None:
    def constant(values, device):
        return torch.tensor([*values[:-2], 0.0, values[-1]][-len(values) :], dtype=torch.float64, device=device)

    monkeypatch.setattr(_operator_norms, "constant", constant)
    with pytest.raises(AssertionError):
        norms.test_the_closed_recursion_is_an_upper_bound_at_every_depth()
