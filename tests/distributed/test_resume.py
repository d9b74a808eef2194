"""Checkpoints know nothing of the number of processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.distributed import jobs
from tests.ranks_kit import Failed, private, results, together


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("world", "then"), [(2, 1), (1, 2), (2, 3)])
def test_an_exact_resume_on_another_number_of_ranks_is_the_same_run(tmp_path: Path, world: int, then: int) -> None:
    whole = private(momentum=0.9, **jobs.EXACT).train(5).weights()
    results(world, jobs.saved, str(tmp_path), 3)
    assert not (tmp_path / "nobody").exists()  # rank 0 writes, the others need no folder
    for weights, steps, _ in results(then, jobs.resumed, str(tmp_path), 2, True):
        assert steps == 5 and same(weights, whole)


def test_an_ordinary_resume_has_new_noise_the_same_on_all_ranks(tmp_path: Path) -> None:
    results(2, jobs.saved, str(tmp_path), 3, None)
    first, second = (results(2, jobs.resumed, str(tmp_path), 1, False, None) for _ in range(2))
    for (weights, steps, _), other in ((first[0], first[1]), (second[0], second[1])):
        assert steps == 4 and same(weights, other[0])
    assert not same(first[0][0], second[0][0])


def test_a_checkpoint_that_cannot_be_read_stops_all_ranks(tmp_path: Path) -> None:
    for rank, failed in enumerate(together(2, jobs.without_a_checkpoint, str(tmp_path))):
        assert isinstance(failed, Failed) and "cannot read the checkpoint" in failed.text
        assert rank == 0 or "stops with rank 0" in failed.text
