"""Strict numerics: one public shape, records in secret random places of it (SOUNDNESS section 8, place)."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats
from tests.engine_kit import cnn, difference, layer_norms, mlp, pictures, private, release, table
from tests.sampling_kit import Numbers, draws, poisson, tensors

import weightclip as wc
from weightclip.sampling._draws import Cutter


@pytest.mark.parametrize("dataset", [tensors(60), Numbers(60), Numbers(60, "dict")], ids=["fast", "loader", "dict"])
@pytest.mark.parametrize("size", [None, 8])
def test_every_piece_has_one_public_shape(dataset, size: int | None) -> None:
    loader, infos = poisson(dataset, max_physical_batch_size=size, strict=True)
    rows = size or loader.b_max
    for t, got in enumerate(draws(loader, infos)):
        assert sorted(got) == loader.indices(t).tolist()
        pieces = [i for i in infos if i.draw == t]
        assert len(pieces) == loader.pieces == (1 if size is None else -(-loader.b_max // size))
        for piece in pieces:
            assert piece.rows == rows and piece.mask is not None and piece.mask.shape == (rows,)
    prefix = [i.mask[: int(i.mask.sum())].all() for i in infos if i.mask is not None and 0 < i.mask.sum() < rows]
    assert not all(prefix)  # not the first rows


def test_with_every_record_drawn_the_shape_is_their_number() -> None:
    loader, infos = poisson(tensors(7), q=1.0, strict=True)
    assert sorted(draws(loader, infos)[0]) == list(range(7)) and infos[0].rows == 7


def a_records_place_does_not_depend_on_the_others() -> None:
    """The place of record 0 is uniform over all rows of all pieces, alone or with company, through the public API."""
    for n in (1, 6):
        places: Counter[int] = Counter()
        for seed in range(400):
            data = torch.arange(1.0, n + 1)[:, None].repeat(1, 6), torch.zeros(n, dtype=torch.long)
            loader, infos = poisson(torch.utils.data.TensorDataset(*data), q=0.999999, seed=seed, strict=True,
                                    max_physical_batch_size=9)  # fmt: skip
            rows = torch.cat([x[:, 0] for x, _ in loader])
            places[int((rows == 1).nonzero())] += 1
        count = -(-loader.b_max // 9) * 9
        groups = np.array([places[k] for k in range(count)])
        groups = groups[: count // 9 * 9].reshape(9, -1).sum(1)
        assert stats.chisquare(groups).pvalue > 1e-4


def test_a_records_place_does_not_depend_on_the_others() -> None:
    a_records_place_does_not_depend_on_the_others()


def test_places_are_an_injection_of_the_whole_draw() -> None:
    pairs = Counter()
    for seed in range(3000):
        pieces = list(Cutter(2, 2, True).cut(0, np.array([5, 9]), 2, np.random.default_rng(seed)))
        where = {int(i): 2 * p.number + int(s) for p in pieces for i, s in zip(p.indices, p.slots, strict=True)}  # type: ignore[arg-type]
        pairs[where[5], where[9]] += 1
    assert len(pairs) == 12 and stats.chisquare(list(pairs.values())).pvalue > 1e-4


@pytest.mark.parametrize(("make", "data"), [(mlp, table), (cnn, pictures)], ids=["mlp", "cnn"])
@pytest.mark.parametrize("size", [None, 5])
@pytest.mark.parametrize("bounds", [wc.Bounds(input_radius=1.0), wc.Bounds(joint_cap=0.2)], ids=["weights", "cap"])
def test_the_sum_is_the_same_up_to_rounding(make, data, size: int | None, bounds: wc.Bounds) -> None:
    runs = [private(make(), data(24), batch=8, bounds=bounds, pinned=0, strict=s, max_physical_batch_size=size)
            for s in (False, True)]  # fmt: skip
    for run in runs:
        run.train()
        assert run.engine.steps == 3
    for name, value in runs[0].grads().items():
        torch.testing.assert_close(value, runs[1].grads()[name], rtol=1e-4, atol=1e-6)


def test_one_record_stays_within_the_sensitivity() -> None:
    x, y = table(13)
    here, there = (private(mlp(), (x[:n], y[:n]), batch=12, sample_rate=1.0, strict=True,
                           max_physical_batch_size=8, bounds=wc.Bounds(layer_radius=1.0, cotangent_radius=0.3))
                   for n in (12, 13))  # fmt: skip
    limits = there.layers()
    for layer, moved in layer_norms(difference(release(there), release(here))).items():
        assert moved <= limits[layer]["sensitivity"] * (1 + 1e-4)


def test_fused_steps_take_scattered_rows() -> None:
    runs = [private(mlp(), table(24), sigma=1.0, batch=8, strict=True) for _ in range(2)]
    step = runs[0].engine.fused_step()
    for x, y in runs[0].loader:
        step(x, y)
    runs[1].train()
    for name, value in runs[0].weights().items():
        assert torch.equal(value, runs[1].weights()[name])


def test_the_default_lists_place_as_not_covered() -> None:
    for strict in (False, True):
        gaps = private(mlp(), table(8), strict=strict).engine.report()["not_covered"]
        assert any(line.startswith("place") for line in gaps) is not strict
