"""Mistakes that only several processes can make: a check that passes on the engine fails on the mutant."""

from __future__ import annotations

from typing import Any

import pytest
from tests.mutants import shard_checks as shard_checks  # its checks and mutants join those of ranks
from tests.mutants.rank_checks import CHECKS, MUTANTS
from tests.ranks_kit import Failed, results


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """Answers of two ranks, in one group: processes cost more than steps."""
    return results(2, shard_checks.answers, list(MUTANTS))


@pytest.mark.parametrize("name", CHECKS)
def test_two_ranks_pass(found: list[dict[str, Any]], name: str) -> None:
    CHECKS[name][1]([there[name] for there in found])


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_die(found: list[dict[str, Any]], name: str) -> None:
    told = [there[name] for there in found]
    judge: Any = MUTANTS[name][1]
    assert not any(isinstance(outcome, Failed) for outcome in told), told  # it dies of what it does, not by an accident
    with pytest.raises(AssertionError):
        judge(told)
