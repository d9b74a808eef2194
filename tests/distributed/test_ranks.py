"""One, two and four processes release the same; who disagrees, stops; nobody trains beside the others by accident."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.distributed import jobs
from tests.ranks_kit import private, results, together

import weightclip as wc
from weightclip.distributed import Ranks, find_ranks

FULL = os.environ.get("WEIGHTCLIP_FULL") == "1"


@pytest.fixture(scope="module")
def runs() -> dict[int, list[dict[str, list[torch.Tensor]]]]:
    names = list(jobs.SETTINGS)
    return {world: results(world, jobs.whole_runs, names if world < 4 or FULL else names[:2]) for world in (1, 2, 4)}


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", jobs.SETTINGS)
def test_whole_noisy_runs_are_bit_for_bit_those_of_one_process(runs, name: str) -> None:
    (alone,) = runs[1]
    start = (jobs.SETTINGS[name].get("model", jobs.mlp))()
    assert not same(alone[name], [p.detach() for p in start.parameters()])
    for world in (2, 4):
        found = [there[name] for there in runs[world] if name in there]
        assert all(same(alone[name], weights) for weights in found) and (found or world == 4)


def test_a_group_of_one_is_the_ordinary_engine(runs) -> None:
    here = private(momentum=0.9, **jobs.EXACT).train(3)
    assert same(here.weights(), runs[1][0]["joint cap"])


@pytest.mark.parametrize("world", [2, 4] if FULL else [3])
def test_noiseless_releases_agree_within_the_slack(world: int) -> None:
    """Float64 sums, the draw dealt out to all ranks: only the order of additions differs."""
    settings = {"batch": 24, "bounds": wc.Bounds(layer_cap=1.0)}
    ((alone, sensitivities, slack),) = results(1, jobs.noiseless, settings)
    found = results(world, jobs.noiseless, settings)
    for sums, *_ in found:
        for k in range(2):  # weight and bias of a layer
            layer = slice(2 * k, 2 * k + 2)
            parts = [float((a - b).square().sum()) for a, b in zip(alone[layer], sums[layer], strict=True)]
            distance = math.sqrt(sum(parts))
            assert distance <= sensitivities[k] * (slack[k] - 1)
        assert float(sums[0].norm()) > 0.1


def test_secure_noise_is_one_noise() -> None:
    first, second = results(2, jobs.secure_run), results(2, jobs.secure_run)
    for weights, report, pieces in first:
        assert same(weights, first[0][0]) and report["secure"] and report["ranks"] == 2 and pieces == 1
    assert not same(first[0][0], second[0][0])


@pytest.mark.parametrize(
    "settings", [{}, {"max_physical_batch_size": 4}, {"strict": True, "max_physical_batch_size": 5}], ids=str
)
def test_every_drawn_record_is_on_one_rank_and_all_ranks_run_equally_many_batches(settings) -> None:
    (alone,) = results(1, jobs.drawn, settings, 8)
    shares = results(3, jobs.drawn, settings, 8)
    assert len({len(share) for share in shares}) == 1
    assert len({tuple((draw, last) for _, draw, last in share) for share in shares}) == 1
    for draw in range(8):
        whole = sorted(value for values, d, _ in alone for value in values if d == draw)
        parts = sorted(value for share in shares for values, d, _ in share for value in values if d == draw)
        assert whole == parts
        sizes = [sum(len(values) for values, d, _ in share if d == draw) for share in shares]
        assert settings or max(sizes) - min(sizes) <= 1


def test_audits_find_nothing_on_two_ranks() -> None:
    for violation, shift, failures, scale, sampled, sampling in results(2, jobs.laws, 40 if FULL else 12):
        assert not violation and 0.5 < shift <= 1 + 1e-6
        assert failures == () and scale == pytest.approx(1.0, abs=0.1)
        assert sampled == () and sampling > 1e-4


def test_noise_is_scaled_for_the_largest_sensitivity_of_all_ranks() -> None:
    (spread, _), (seen, larger) = results(2, jobs.largest_sensitivities)
    assert spread == seen
    assert spread == pytest.approx(math.sqrt(2) * larger, rel=0.05)  # two layers, equal shares


def test_estimators_are_refused_before_a_record_is_read() -> None:
    for failed in together(2, jobs.estimator):
        assert failed.kind == "ContractError" and "train in one process" in failed.text


def test_ranks_that_make_different_calls_stop_with_their_names(tmp_path: Path) -> None:
    (step, before), (load, after) = together(2, jobs.other_calls, str(tmp_path))
    assert "disagree on what comes next (here: the number of the step" in step.text
    assert "disagree on what comes next (here: engine.load())" in load.text and same(before, after)


@pytest.mark.skipif(not FULL, reason="starts worker processes for every rank: WEIGHTCLIP_FULL=1")
def test_records_read_by_workers_are_those_of_one_process() -> None:
    alone = jobs.whole_runs(["records that draw"], steps=2)["records that draw"]
    assert all(same(alone, weights) for weights in results(2, jobs.with_workers))


def test_a_group_that_ends_during_training_ends_it() -> None:
    for failed in together(2, jobs.left_alone):
        assert "processes came or went" in failed.text


def test_a_group_that_comes_late_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = private()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(wc.ContractError, match="before PrivacyEngine"):
        run.train(1)
    assert run.engine.steps == 0


def test_torchrun_without_a_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(find_ranks()) is Ranks
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert type(find_ranks()) is Ranks  # not started by torchrun: a variable of somebody else's
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with pytest.raises(wc.ContractError, match="init_process_group"):
        wc.PrivacyEngine()
