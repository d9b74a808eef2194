"""Ranks compare what must be the same on all of them; who disagrees, stops."""

from __future__ import annotations

import torch
from tests.distributed import jobs
from tests.ranks_kit import Failed, results


def test_ranks_that_disagree_stop_with_one_line_each() -> None:
    words = {
        "sigma": "settings", "bounds": "settings", "seed": "the seed", "no seed": "generator=", "model": "the model",
        "length": "data set", "one record": "data set", "shards": "data set", "weights": "the weights",
        "step": "number of the step", "learning rate": "the weights",
    }  # fmt: skip
    for rank, found in enumerate(results(2, jobs.disagreements)):
        assert found.keys() == words.keys()
        for name, failed in found.items():
            assert isinstance(failed, Failed) and failed.kind == "ContractError", name
            assert f"rank {rank} stops" in failed.text and words[name] in failed.text, name
            assert "\n" not in failed.text


def test_every_rank_starts_from_the_weights_of_the_first() -> None:
    first, second = results(2, jobs.other_initial_weights)
    for a, b, start in zip(first, second, jobs.mlp(0).parameters(), strict=True):
        assert torch.equal(a, b) and torch.equal(a, start)
