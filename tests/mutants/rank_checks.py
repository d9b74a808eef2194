"""What two processes are asked, how the answers must look, and mistakes that several processes can make."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.distributed import jobs
from tests.mutants.kit import Mutants
from tests.ranks_kit import Failed, private, table

from weightclip.accounting import read
from weightclip.distributed import ManyRanks, SharedLedger
from weightclip.engine import _engine, _together
from weightclip.engine._digest import tensors_digest
from weightclip.engine._step import Training
from weightclip.noise import NOISE, GridSums, Release, Streams
from weightclip.sampling import PoissonLoader, Share

Answers = list[Any]  # one for each rank
Check = tuple[Callable[[], Any], Callable[[Answers], None]]
CHECKS: dict[str, Check] = {}
Patch = pytest.MonkeyPatch
MUTANTS = Mutants()


def check(job: Callable[[], Any]) -> Callable[[Callable[[Answers], None]], Callable[[Answers], None]]:
    """What all ranks do, beside the function that judges their answers."""

    def keep(judge: Callable[[Answers], None]) -> Callable[[Answers], None]:
        CHECKS[judge.__name__] = (job, judge)
        return judge

    return keep


def answers(names: list[str]) -> dict[str, Any]:
    """On each rank: what every check asks, answered by the engine (under the check's name) and by these mutants."""
    found: dict[str, Any] = {name: job() for name, (job, _) in CHECKS.items()}
    for name in names:
        mutate, judge = MUTANTS[name]
        with pytest.MonkeyPatch.context() as patch:
            mutate(patch)
            try:
                found[name] = CHECKS[judge.__name__][0]()
            except Exception as error:
                found[name] = Failed(type(error).__name__, str(error))
        dist.barrier()
    return found


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """One place for all ranks."""
    place = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(place, src=0)
    yield Path(str(place[0]))
    dist.barrier()


# -- checks ------------------------------------------------------------------------------------------------------------


@check(lambda: private(**jobs.EXACT).train(2).weights())
def the_release_is_that_of_one_process(found: Answers) -> None:
    alone = private(**jobs.EXACT).train(2).weights()
    for weights in found:
        assert all(torch.equal(a, b) for a, b in zip(alone, weights, strict=True))


@check(lambda: jobs.drawn({}, 200))
def draws_are_poisson_over_all_records(found: Answers) -> None:
    x, q, draws = table()[0], 0.25, 200
    number = {value: i for i, value in enumerate(x[:, 0].tolist())}
    taken = np.zeros((draws, len(x)), dtype=int)
    for value, draw in ((v, d) for share in found for values, d, _ in share for v in values):
        taken[draw, number[value]] += 1
    assert taken.max() == 1, "a record is in one sum twice"
    sizes, together = taken.sum(1), taken[:, 0::2] * taken[:, 1::2]
    assert abs(taken.mean() - q) < 0.03 and 5 < sizes.var() < 14  # n q (1 - q) = 9
    assert abs(together.mean() - q * q) < 0.02


def _sums() -> dict[float, list[torch.Tensor]]:
    """Releases with and without noise, on data sets that differ in a record of rank 1; same seed, same weights."""
    found = {}
    for sigma, change in itertools.product((0.0, 1.0), (0.0, 3.0)):
        x, y = table(8)
        x[1] += change
        run = private(data=(x, y), batch=8, sigma=sigma, lr=0.0).train(1)
        found[sigma + change] = [p.grad.clone() for p in run.model.parameters()]
    return found


@check(_sums)
def noise_never_meets_two_different_sums(found: Answers) -> None:
    for sums in found:
        noise = [[a - b for a, b in zip(sums[1.0 + c], sums[c], strict=True)] for c in (0.0, 3.0)]
        assert float((sums[0.0][0] - sums[3.0][0]).abs().max()) > 1e-4
        assert float((noise[0][0] - noise[1][0]).abs().max()) > 1e-2


def _failing_charge() -> tuple[Failed | None, bool, int]:
    with folder() as place:
        run = private(seed=None, ledger=place / "run.ledger").train(2)
        before = run.weights()
        dist.barrier()
        if dist.get_rank() == 0:
            os.remove(place / "run.ledger")
        failed = jobs.attempt(lambda: run.train(3))
        return failed, all(torch.equal(a, b) for a, b in zip(before, run.weights(), strict=True)), run.engine.steps


@check(_failing_charge)
def nothing_is_applied_that_was_not_charged(found: Answers) -> None:
    for failed, same, steps in found:
        assert failed is not None and failed.kind == "ContractError" and same and steps == 2


def _counted() -> tuple[int, int, int, float]:
    with folder() as place:
        run = private(seed=None, ledger=place / "run.ledger").train(3)
        dist.barrier()
        ledger = run.engine.ledger
        told = ledger.charges, run.engine.steps, read(place / "run.ledger").charges, run.engine.get_epsilon(1e-5)
        run.engine.detach()
        return told


@check(_counted)
def every_rank_knows_the_count(found: Answers) -> None:
    for charges, steps, written, epsilon in found:
        assert charges == steps == written == 3 and epsilon == found[0][3] > 0


@check(jobs.largest_sensitivities)
def noise_covers_the_rank_with_the_largest_limits(found: Answers) -> None:
    larger = found[1][1]
    for spread, _ in found:
        assert spread > 0.9 * 2**0.5 * larger


@check(jobs.disagreements)
def ranks_that_disagree_stop(found: Answers) -> None:
    for told in found:
        assert all(failed is not None and failed.kind == "ContractError" for failed in told.values())


# -- mutants -----------------------------------------------------------------------------------------------------------


def _noisy_parts(patch: Patch, share: float) -> None:
    """Every rank adds ``share`` of the noise to its own sum."""
    exchange, add = Release.exchange, GridSums.add

    def early(self: Release, add_up: Callable[[torch.Tensor], None]) -> None:
        noise = torch.empty(sum(self.sizes))
        Streams.secure().normal_(noise, NOISE, 0)
        assert self.exact is not None
        add(self.exact, [share * self.sigma * part for part in self.split(noise)])
        exchange(self, add_up)

    patch.setattr(Release, "exchange", early)


@MUTANTS.noticed_by(the_release_is_that_of_one_process)
def noise_on_every_rank(patch: Patch) -> None:
    _noisy_parts(patch, 1.0)


@MUTANTS.noticed_by(the_release_is_that_of_one_process)
def noise_before_the_reduction(patch: Patch) -> None:
    _noisy_parts(patch, 0.5**0.5)
    patch.setattr(Release, "_draw", lambda self, noise, *args: noise.zero_())


@MUTANTS.noticed_by(the_release_is_that_of_one_process)
def divided_by_the_number_of_ranks(patch: Patch) -> None:
    add_up = ManyRanks.sum_to_first

    def averaged(self: ManyRanks, tensor: torch.Tensor) -> None:
        add_up(self, tensor)
        tensor.div_(self.count, rounding_mode="trunc")

    patch.setattr(ManyRanks, "sum_to_first", averaged)


@MUTANTS.noticed_by(the_release_is_that_of_one_process)
def a_rank_is_dropped(patch: Patch) -> None:
    add_up = ManyRanks.sum_to_first

    def without_the_last(self: ManyRanks, tensor: torch.Tensor) -> None:
        add_up(self, tensor.zero_() if self.rank == self.count - 1 else tensor)

    patch.setattr(ManyRanks, "sum_to_first", without_the_last)


@MUTANTS.noticed_by(draws_are_poisson_over_all_records)
def equal_draws_on_two_shards(patch: Patch) -> None:
    indices = PoissonLoader.indices

    def of_a_shard(self: PoissonLoader, draw: int) -> np.ndarray:
        found = indices(self, draw)
        return found[found < self._n // 2] * 2 + dist.get_rank()

    patch.setattr(PoissonLoader, "indices", of_a_shard)
    patch.setattr(Share, "of", lambda self, pieces: _whole(pieces))


def _whole(pieces: Any) -> Iterator[Any]:
    """Every rank runs the whole draw."""
    found = list(pieces)
    yield found[0]._replace(indices=np.sort(np.concatenate([p.indices for p in found])), last=True)


@MUTANTS.noticed_by(draws_are_poisson_over_all_records)
def records_on_several_ranks(patch: Patch) -> None:
    patch.setattr(Share, "of", lambda self, pieces: _whole(pieces))


@MUTANTS.noticed_by(draws_are_poisson_over_all_records)
def a_seed_for_every_rank(patch: Patch) -> None:
    patch.setattr(Streams, "shared", lambda self, tell: self.advance(dist.get_rank()))
    patch.setattr(_engine, "agree_on_run", lambda engine: None)


@MUTANTS.noticed_by(draws_are_poisson_over_all_records)
def sampled_by_a_distributed_sampler(patch: Patch) -> None:
    def block(self: PoissonLoader, draw: int) -> np.ndarray:
        order = np.random.default_rng(draw // 4).permutation(self._n)  # an epoch is four draws
        return np.sort(order[12 * (draw % 4) : 12 * (draw % 4 + 1)])

    patch.setattr(PoissonLoader, "indices", block)


@MUTANTS.noticed_by(noise_never_meets_two_different_sums)
def a_retry_with_the_old_noise(patch: Patch) -> None:
    """Noise is keyed by what rank 0 has itself: a retry with another part of rank 1 finds the same."""
    exchange, kept = Release.exchange, dict[int, list[torch.Tensor]]()

    def remembering(self: Release, add_up: Callable[[torch.Tensor], None]) -> None:
        kept[0] = [t.clone() for t in self.collected() if t is not None]
        exchange(self, add_up)

    patch.setattr(Release, "exchange", remembering)
    patch.setattr(Training, "content", lambda self: tensors_digest(kept[0], self.engine.streams.key("x")))


@MUTANTS.noticed_by(nothing_is_applied_that_was_not_charged)
def charged_after_the_release(patch: Patch) -> None:
    def spend(self: Training, release: Callable[[int], None]) -> None:
        self.draw = self.info = None
        release(self.engine.steps)
        with torch.no_grad():  # and applied by an optimiser that does not wait
            for parameter in self.release.parameters:
                parameter.sub_(parameter.grad)
        self.engine.charge()

    patch.setattr(Training, "spend", spend)


@MUTANTS.noticed_by(every_rank_knows_the_count)
def a_stale_ledger(patch: Patch) -> None:
    on_first = SharedLedger._on_first

    def forgetful(self: SharedLedger, act: Callable[[], Any]) -> Any:
        before = self._charges, self._state, self._mechanisms
        outcome = on_first(self, act)
        self._charges, self._state, self._mechanisms = before
        return outcome

    patch.setattr(SharedLedger, "_on_first", forgetful)


@MUTANTS.noticed_by(noise_covers_the_rank_with_the_largest_limits)
def unsynchronised_clipping(patch: Patch) -> None:
    patch.setattr(ManyRanks, "largest", lambda self, values: values)


@MUTANTS.noticed_by(ranks_that_disagree_stop)
def nobody_compares_weights(patch: Patch) -> None:
    patch.setattr(_together, "_checksum", lambda tensors: b"")


@MUTANTS.noticed_by(ranks_that_disagree_stop)
def nobody_compares_records(patch: Patch) -> None:
    patch.setattr(_together, "_glance", lambda engine: str(len(engine.loader.dataset)).encode())
