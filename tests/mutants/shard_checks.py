"""Mistakes that only a sharded model allows, with the checks that must notice; they join those of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tests.distributed import jobs, shard_jobs
from tests.mutants import rank_checks
from tests.mutants.rank_checks import MUTANTS, Answers, Patch, check, folder
from tests.ranks_kit import Failed, mlp, private

from weightclip.distributed import Rows, Shards
from weightclip.engine import _checkpoint, _checkpoint_shards
from weightclip.noise import ShardedRelease, Streams


def answers(names: list[str]) -> dict[str, Any]:
    """As those of ranks; asked here, so that the checks of this file are known on every rank."""
    return rank_checks.answers(names)


@check(lambda: shard_jobs.weights(private(shard_jobs.shard(mlp()), **jobs.EXACT).train(2)))
def the_sharded_release_is_that_of_one_process(found: Answers) -> None:
    alone = private(**jobs.EXACT).train(2).weights()
    for weights in found:
        assert all(torch.equal(a, b) for a, b in zip(alone, weights, strict=True))


@check(lambda: shard_jobs.noisy()[0])
def no_two_rows_share_noise(found: Answers) -> None:
    for gradients in found:
        noise = torch.cat([g.flatten() for g in gradients])
        assert len(noise.unique()) > 0.99 * len(noise) and 1.2 < float(noise.std()) < 1.6


@check(lambda: jobs.attempt(shard_jobs.with_a_kept_gradient))
def no_raw_gradient_is_left_to_fully_shard(found: Answers) -> None:
    for failed in found:
        assert failed is not None and "besides the private loss" in failed.text


def _half_written() -> tuple[Failed | None, int]:
    """Rank 1 fails while it writes its rows: (what it says, the step of the checkpoint that is there)."""
    dcp = _checkpoint_shards._dcp()
    with folder() as place:
        run = private(shard_jobs.shard(mlp())).train(1)
        run.engine.save(place)
        run.train(2)
        save = dcp.save

        def failing(*args: Any, **named: Any) -> None:
            save(*args, **named)
            raise OSError("no space left")

        dcp.save = failing
        try:
            failed = jobs.attempt(lambda: run.engine.save(place))
        finally:
            dcp.save = save
        return failed, _checkpoint._read(place, True)[0]["ledger"]["steps"]


@check(_half_written)
def a_checkpoint_is_committed_when_all_rows_are_written(found: Answers) -> None:
    for failed, steps in found:
        assert failed is not None and steps == 1


@MUTANTS.noticed_by(the_sharded_release_is_that_of_one_process)
def noise_of_rows_keyed_by_rank(patch: Patch) -> None:
    of_first = Streams.of_first
    patch.setattr(Streams, "of_first", lambda self, tell: of_first(self, tell).child("rank", dist.get_rank()))


@MUTANTS.noticed_by(the_sharded_release_is_that_of_one_process)
def the_release_is_averaged_like_a_gradient(patch: Patch) -> None:
    release = ShardedRelease.release

    def averaged(self: ShardedRelease, *args: Any) -> None:
        release(self, *args)
        for parameter in self.parameters:
            parameter.grad /= dist.get_world_size()

    patch.setattr(ShardedRelease, "release", averaged)


@MUTANTS.noticed_by(the_sharded_release_is_that_of_one_process)
def owners_release_before_the_sums_are_reduced(patch: Patch) -> None:
    def own(self: Rows, total: torch.Tensor, kind: torch.dtype, convert: Any) -> torch.Tensor:
        return convert(total)[self.begin : self.begin + self.local[0]].clone()

    patch.setattr(Rows, "sum_to_owner", own)


@MUTANTS.noticed_by(no_two_rows_share_noise)
def the_place_of_rows_is_forgotten(patch: Patch) -> None:
    patch.setattr(Rows, "start", property(lambda self: 0))


@MUTANTS.noticed_by(no_two_rows_share_noise)
def every_parameter_reads_the_same_numbers(patch: Patch) -> None:
    numbers = Streams.numbers

    def from_the_start(self: Streams, *args: Any) -> Any:
        found = numbers(self, *args)
        read = found.read_
        found.read_ = lambda out, start: read(out, 0)
        return found

    patch.setattr(Streams, "numbers", from_the_start)


@MUTANTS.noticed_by(no_raw_gradient_is_left_to_fully_shard)
def gradients_of_whole_parameters_are_not_looked_for(patch: Patch) -> None:
    patch.setattr(Shards, "refuse_gradients", lambda self: None)


@MUTANTS.noticed_by(a_checkpoint_is_committed_when_all_rows_are_written)
def committed_before_the_rows_are_written(patch: Patch) -> None:
    write: Callable[..., list[str]] = _checkpoint.write_shards
    commit = _checkpoint._commit

    def early(engine: Any, place: Any, tensors: Any) -> list[str]:
        ledger = {"steps": engine.steps}
        engine.ranks.tell(lambda: commit(place.parent, place.name, {"shards": []}, ledger))
        return write(engine, place, tensors)

    patch.setattr(_checkpoint, "write_shards", early)
