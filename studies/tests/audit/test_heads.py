"""The image heads' trainer under audit, and a trainer that cheats."""

from __future__ import annotations

import pytest

from weightclip_studies.audit._heads import head_check, head_trainers


@pytest.mark.parametrize("name", list(head_trainers()))
def test_no_record_has_more_than_its_share(name: str) -> None:
    found = head_check(name, head_trainers()[name])
    assert not found.violation and 0.05 < found.measured <= 1 + 1e-9


@pytest.mark.parametrize("name", ["linear", "factors", "layer caps", "joint cap"])
def test_a_limit_larger_than_the_noise_is_caught(name: str) -> None:
    trainer = head_trainers()[name]
    limit = trainer._limit
    trainer._limit = lambda *args: (limit(*args)[0], 0.8 * limit(*args)[1])  # type: ignore[method-assign]
    assert head_check(name, trainer).violation
