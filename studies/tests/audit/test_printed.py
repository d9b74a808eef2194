"""The printed algorithm is caught, each flaw by itself and by the factor that theory predicts."""

from __future__ import annotations

import math

import numpy as np
import pytest

from weightclip.audit import Caught
from weightclip_studies.audit import catch_printed


@pytest.fixture(scope="module")
def cases() -> dict[str, Caught]:
    return {c.name: c for c in catch_printed(trials=60_000)}


def test_claimed_one_audited_far_above(cases: dict[str, Caught]):
    assert cases["all flaws together"].result.epsilon_lower >= 5


def test_every_flaw_is_caught_by_itself(cases: dict[str, Caught]):
    assert len(cases) == 11 and all(c.result.violation for c in cases.values())


@pytest.mark.parametrize(
    ("name", "shift"),
    [
        ("K layers accounted as one", 3.0),
        ("product of norms starts at k", 4.0),
        ("the bias's 1 is missing", math.sqrt(1 + 16)),
        ("divides by the batch's largest input", 19.8),
    ],
)
def test_shifts_are_those_of_theory(cases: dict[str, Caught], name: str, shift: float):
    assert cases[name].shift == pytest.approx(shift, rel=0.01)


def test_shifts_of_the_other_flaws(cases: dict[str, Caught]):
    assert 2 < cases["convolutions without their overlap"].shift <= 3
    assert cases["power iteration for the norm"].shift > 1.5
    assert 32 < cases["layers without parameters have gain 1"].shift <= 64 * math.sqrt(2)
    assert cases["redraws empty batches"].shift == pytest.approx(1.0, rel=0.01)  # only the sampling leaks
    assert cases["divides by the realised batch size"].shift == pytest.approx(0.0, abs=1e-6)  # only the noise level


def test_true_curves_lie_above_the_claim(cases: dict[str, Caught]):
    grid = np.array([0.0, 0.5, 1.0])
    for case in cases.values():
        assert (case.curve(grid) > [case.claim(float(e)) for e in grid]).all(), case.name
