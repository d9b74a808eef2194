"""Models that are split over processes are refused by name."""

from __future__ import annotations

from tests.distributed import jobs
from tests.ranks_kit import Failed, results, together


def test_splitting_a_model_is_refused_by_name() -> None:
    words = {"wrapped": "use fully_shard instead", "tensor": "tensor, sequence or context", "sequence": "sequence",
             "ddp": "DistributedDataParallel", "sampler": "DistributedSampler"}  # fmt: skip
    for found in results(2, jobs.refusals):
        for name, failed in found.items():
            assert isinstance(failed, Failed) and words[name] in failed.text and "\n" not in failed.text, name


def test_wrapping_afterwards_is_refused() -> None:
    for failed in together(2, jobs.wrapped_afterwards):
        assert "DistributedDataParallel averages raw gradients" in failed.text
