"""Models under fully_shard: the release is that of one process that holds the whole model."""

from __future__ import annotations

import math
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed import jobs, shard_jobs
from tests.ranks_kit import Failed, mlp, private, results, together

import weightclip as wc
from weightclip.engine import _checkpoint_shards
from weightclip.noise import NOISE, Streams

FULL = os.environ.get("WEIGHTCLIP_FULL") == "1"
NAMES = list(shard_jobs.SETTINGS) if FULL else ["joint cap", "adaptive", "own parameter"]
NOISELESS = {"batch": 24, "bounds": wc.Bounds(layer_cap=1.0)}
REFUSED = {
    "weight norm": "need whole weights",
    "weight norm and cap": "need whole weights",
    "certified": "need whole weights",
    "half": "trained and not sharded",
    "mesh": "mesh",
    "cast": "use torch.autocast",
    "offload": "leave it out",
    "penalty": "besides the private loss",
    "penalty on the whole": "besides the private loss",
    "kept gradient": "besides the private loss",
    "not finite": "no longer finite",
    "another shape": "under fully_shard all ranks must run the same",
    "order": "ranks disagree on the order of sums",
}


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    return results(2, shard_jobs.everything, NAMES, NOISELESS, str(folder))


@pytest.mark.parametrize("name", NAMES)
def test_whole_noisy_runs_are_bit_for_bit_those_of_one_process(found, name: str) -> None:
    alone = shard_jobs.whole_runs([name], sharded=False)[name]
    start = (shard_jobs.SETTINGS[name].get("model", mlp))()
    assert not same(alone, [p.detach() for p in start.parameters()])
    assert all(same(alone, there["runs"][name]) for there in found)


@pytest.mark.skipif(not FULL, reason="starts eight processes: WEIGHTCLIP_FULL=1")
@pytest.mark.parametrize("world", [1, 3, 4])
def test_the_number_of_owners_changes_nothing(world: int) -> None:
    for there in results(world, shard_jobs.whole_runs, NAMES):
        for name, weights in there.items():
            assert same(weights, shard_jobs.whole_runs([name], sharded=False)[name])


def test_the_size_of_messages_changes_nothing(found) -> None:
    for there in found:
        assert same(there["in small messages"], there["runs"]["joint cap"])


def test_noiseless_releases_agree_within_the_slack(found) -> None:
    """Floating-point sums: only the order of additions differs."""
    alone, sensitivities, slack = shard_jobs.noiseless(NOISELESS, sharded=False)
    for sums, *_ in (there["noiseless"] for there in found):
        for k in range(2):  # weight and bias of a layer
            layer = slice(2 * k, 2 * k + 2)
            parts = [float((a - b).square().sum()) for a, b in zip(alone[layer], sums[layer], strict=True)]
            assert math.sqrt(sum(parts)) <= sensitivities[k] * (slack[k] - 1)
        assert float(sums[0].norm()) > 0.1


def test_rows_have_noises_of_their_own(found) -> None:
    """Standard normals of the stated size, no two rows alike, the same on every rank, others in the next run."""
    (first, alike), (second, _) = (there["noisy"] for there in found)
    assert alike and same(first, second)
    noise, again = (torch.cat([g.flatten() for g in gradients]) for gradients in (first, found[0]["noisy again"]))
    assert float(noise.std()) == pytest.approx(math.sqrt(2), rel=0.05)  # two layers, equal shares
    assert len(noise.unique()) > 0.99 * len(noise)
    assert abs(float(torch.corrcoef(torch.stack([noise, again]))[0, 1])) < 0.1


def test_gradients_are_not_averaged_by_fully_shard_while_an_engine_is_on(found) -> None:
    for during, after, error in (there["afterwards"] for there in found):
        assert during and not any(during) and all(after) and error < 1e-6


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(found, name: str) -> None:
    for there in found:
        failed = there["failures"][name]
        assert failed is not None and REFUSED[name] in failed.text, failed
        assert failed.kind in ("ContractError", "NotFinite"), failed
        assert "\n" not in failed.text


def test_an_exact_resume_in_one_process_is_the_same_run(found, folder: Path) -> None:
    assert len(list((folder / "saved").iterdir())) == 2  # the rows, and the file that names them
    whole = private(momentum=0.9, **jobs.EXACT).train(3).weights()
    weights, steps = shard_jobs.resumed(str(folder), 1, sharded=False)
    assert steps == 3 and same(weights, whole) and same(found[0]["saved"], whole)


@pytest.mark.parametrize(("then", "sharded"), [(1, True), (3, True), (2, False)] if FULL else [(3, True)])
def test_an_exact_resume_on_another_number_of_ranks_is_the_same_run(found, folder, then: int, sharded: bool) -> None:
    whole = private(momentum=0.9, **jobs.EXACT).train(4).weights()
    for weights, steps in results(then, shard_jobs.resumed, str(folder), 2, sharded):
        assert steps == 4 and same(weights, whole)


def test_a_checkpoint_of_another_time_or_kind_is_refused(found, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "saved", tmp_path / "saved")
    saved, later = (next(place.glob("weights-*")) for place in (tmp_path / "saved", folder / "later"))
    (rows,) = saved.glob("__1_*")
    (others,) = later.glob("__1_*")
    rows.write_bytes(others.read_bytes())  # of rank 1 from another step
    with pytest.raises(wc.WeightclipError, match="do not belong together"):
        shard_jobs.resumed(str(tmp_path), 1, sharded=False)
    for failed in together(2, shard_jobs.unreadable, str(tmp_path)) if FULL else ():
        assert isinstance(failed, Failed) and "cannot read the checkpoint" in failed.text
    shard_jobs.saved_whole(str(tmp_path))
    assert not saved.exists()  # replaced by a file
    for failed in together(2, shard_jobs.unreadable, str(tmp_path)) if FULL else ():
        assert isinstance(failed, Failed) and "before fully_shard" in failed.text


def test_an_index_that_would_run_code_is_refused(found, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "saved", tmp_path / "saved")
    (weights,) = (tmp_path / "saved").glob("weights-*")
    (weights / ".metadata").write_bytes(pickle.dumps(os.getcwd))
    with pytest.raises(ValueError, match="describes no tensor"):
        _checkpoint_shards._described(weights)
    with pytest.raises(wc.WeightclipError, match="do not belong together"):
        shard_jobs.resumed(str(tmp_path), 1, sharded=False)


def test_numbers_are_the_same_in_parts() -> None:
    streams = Streams.seeded(3)
    whole = streams.normal_(torch.empty(600_000), NOISE, 5)
    numbers = streams.numbers(torch.float32, NOISE, 5)
    for start, size in ((0, 10), (10, 0), (262_100, 100), (5, 599_995), (599_999, 1)):
        assert torch.equal(numbers.read_(torch.empty(size), start), whole[start : start + size])
