"""Canary rows through ``fit``: one odd record must not change what becomes of the others."""

from __future__ import annotations

import pytest

from weightclip.audit._estimators import canaries, estimator_check


@pytest.mark.parametrize("canary", canaries(), ids=lambda c: c.name)
def test_the_released_model_does_not_tell_of_one_row(canary):
    found = estimator_check(canary, runs=60)
    assert not found.violation and found.measured <= found.allowed
