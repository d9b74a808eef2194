"""The flat sum and its rounding slack."""

from __future__ import annotations

import math

import pytest
import torch
from tests.engine_kit import mlp, private, table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import weightclip as wc


def test_slack_grows_with_uses_and_float32_products_but_not_with_pieces() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 6)
            self.last = nn.Linear(6, 3)

        def forward(self, x):
            return self.last(self.a(torch.relu(self.a(x))))

    def slack(run) -> dict[str, float]:
        return dict(zip(run.engine.plan.layers, run.engine.training.release.slack, strict=True))

    whole, pieces = (slack(private(Twice(), table(64), max_physical_batch_size=k)) for k in (None, 1))
    assert whole == pieces
    assert 1 < whole["last"] < whole["a"] < 1.002
    product = wc.Product(dtype=torch.float32)
    coarse = slack(private(Twice(), table(64), bounds=wc.Bounds(input_radius=1.0, product=product)))
    chunked = wc.Bounds(input_radius=1.0, product=wc.Product(dtype=torch.float32, chunk=8))
    assert all(coarse[k] > slack(private(Twice(), table(64), bounds=chunked))[k] > whole[k] for k in whole)
    large = slack(private(Twice(), table(64), expected_batch_size=8192))
    assert all(whole[k] < large[k] < 1.02 for k in whole)


def test_pieces_are_summed_in_float64_and_noise_does_not_change_with_them() -> None:
    run = private(mlp(), table(64), sigma=1.0, max_physical_batch_size=1)
    release = run.engine.training.release
    assert (release.sum_dtype, release.noise_dtype) == (torch.float64, torch.float32)
    release.add(0, torch.ones_like(release.blocks[0].parameter))
    release.add(0, torch.full_like(release.blocks[0].parameter, 1e-9))
    assert release.sums[0] is not None and release.sums[0].double().sub(1).max() > 0  # float32 would have dropped it
    assert private(mlp(), table(64), sigma=1.0).engine.training.release.sum_dtype == torch.float32


def test_a_release_without_any_gradient_is_pure_noise_or_zero() -> None:
    for sigma in (0.0, 1.0):
        run = private(mlp(), table(8), sigma=sigma)
        engine = run.engine
        kept = torch.ones_like(engine.training.release.blocks[0].parameter)
        engine.training.release.add(0, kept)
        engine.training.release.clear()  # forgotten sums do not come back
        engine.training.release.release(engine.training.sensitivity.values, engine.streams, 0)
        grads = run.grads()
        assert all(bool(g.any()) == (sigma > 0) for g in grads.values())
        storage = {g.untyped_storage().data_ptr() for g in (p.grad for p in run.model.parameters()) if g is not None}
        assert kept.untyped_storage().data_ptr() not in storage and bool((kept == 1).all())


def test_recorded_graphs_read_one_slack_for_good() -> None:
    """A report reads the slack on the CPU; the copy on the device, whose address graphs hold, stays the same."""

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            storages.extend(a.untyped_storage() for a in args if isinstance(a, torch.Tensor))
            return func(*args, **(kwargs or {}))

    release = private(mlp(), table(8)).engine.training.release
    there = torch.ones(2, dtype=torch.float64, device="meta")  # any device but the CPU
    release.enlarged(there)
    reads = []
    for _ in range(2):
        storages: list = []
        with Seen():
            release.enlarged(there)
        reads.append(storages[:2])
        release.enlarged(torch.ones(2, dtype=torch.float64))
    assert [s._cdata for s in reads[0]] == [s._cdata for s in reads[1]]


@pytest.mark.parametrize("place", ["_draw", "_multiples", "release"])
def test_an_interrupted_step_leaves_nothing_to_the_next(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two draws in one sum would move by twice the sensitivity; the interrupted step stays charged."""
    data = table(8)
    run, alone = (private(mlp(), data, sigma=1.0, seed=1) for _ in range(2))

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run.engine.training.release, place, interrupt)
        with pytest.raises(KeyboardInterrupt):
            run.train()
    assert run.engine.steps == 1
    seen = []
    for each in (run, alone):
        each.engine.training.release.sigma = 0.0
        each.engine.steps = 0
        each.train()
        seen.append(each.grads())
    assert all(torch.equal(seen[0][name], seen[1][name]) for name in seen[0])


def test_one_factor_for_all_parameters_scales_the_noise_like_one_for_each() -> None:
    """Bit for bit, whether all layers share a limit or not."""
    for bounds in (wc.Bounds(), wc.Bounds(layer_radius=1.0, cotangent_radius=0.1), wc.Bounds(bias_scale=0.5)):
        run = private(mlp(), table(8), sigma=1.0, bounds=bounds)
        release, sensitivity = run.engine.training.release, run.engine.training.sensitivity
        flat, views = release.noise(sensitivity.values, run.engine.streams, 7)
        drawn = run.engine.streams.normal_(torch.empty_like(flat), "noise", 7)
        factors = release.factors(sensitivity.values).tolist()
        for view, part, factor in zip(views, release.split(drawn), factors, strict=True):
            torch.testing.assert_close(view, part * factor, rtol=0, atol=0)


def test_a_factor_that_is_no_number_is_not_taken_for_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    release = private(mlp(), table(8), sigma=1.0).engine.training.release
    values, streams = torch.ones(len(release.dims), dtype=torch.float64), wc.noise.Streams.secure()
    for wrong in (math.nan, math.inf):
        for place in range(len(release.blocks)):
            multiples = [1.0] * len(release.blocks)
            multiples[place] = wrong
            monkeypatch.setattr(release, "_multiples", lambda _, found=multiples: found)
            _, views = release.noise(values, streams, 0)
            assert not views[place].isfinite().any()
            assert all(bool(view.isfinite().all()) for i, view in enumerate(views) if i != place)


def test_a_sum_with_a_graph_behind_it_leaves_the_graph_behind() -> None:
    run = private(mlp(), table(8), sigma=0.0)
    release = run.engine.training.release
    leaf = torch.ones_like(release.blocks[0].parameter).requires_grad_()
    for _ in range(2):
        release.add(0, leaf * 2)
    kept: Tensor | None = release.sums[0]
    assert kept is not None and not kept.requires_grad and bool((kept == 4).all())
