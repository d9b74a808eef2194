"""Randomness: independent streams, nothing shared, nothing saved, nothing that depends on threads."""

from __future__ import annotations

import copy
import io
import json
import pickle

import numpy as np
import pytest
import torch
from scipy import stats

from weightclip.errors import WeightclipError
from weightclip.noise._streams import _BLOCK, NOISE, SAMPLING, Streams


def draw(streams: Streams, n: int, label: str, *ints: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return streams.normal_(torch.empty(n, dtype=dtype), label, *ints)


@pytest.fixture(params=["secure", "seeded"])
def streams(request: pytest.FixtureRequest) -> Streams:
    return Streams.secure() if request.param == "secure" else Streams.seeded(7)


def test_same_label_and_integers_give_the_same_numbers_whatever_was_drawn_before(streams: Streams) -> None:
    first = draw(streams, 1000, NOISE, 3, 1)
    draw(streams, 777, NOISE, 4, 0)
    streams.numpy(SAMPLING, 3).random(5)
    assert torch.equal(first, draw(streams, 1000, NOISE, 3, 1))


def test_streams_differ_by_label_step_parameter_and_root(streams: Streams) -> None:
    base = draw(streams, 4000, NOISE, 3, 1)
    others = [
        draw(streams, 4000, NOISE, 3, 2),
        draw(streams, 4000, NOISE, 4, 1),
        draw(streams, 4000, NOISE, 3),
        draw(streams, 4000, NOISE, 1, 3),
        draw(streams, 4000, SAMPLING, 3, 1),
        draw(streams.advance(0), 4000, NOISE, 3, 1),
        draw(streams.advance(1), 4000, NOISE, 3, 1),
        draw(Streams.secure(), 4000, NOISE, 3, 1),
    ]
    for i, a in enumerate([base, *others]):
        for b in others[i:]:
            assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 0.09  # 5.7 standard deviations


def test_keys_are_domain_separated(streams: Streams) -> None:
    keys = [
        streams.key("a"),
        streams.key("a", 0),
        streams.key("a", 0, 0),
        streams.key("a", -1),
        streams.key("a\0"),
        streams.key("", 0),
        streams.key("a", 1 << 62),
    ]
    assert len(set(keys)) == len(keys)
    assert all(len(key) == 32 for key in keys)
    with pytest.raises(WeightclipError, match="63 bits"):
        streams.key("a", 1 << 64)


def test_normal_law_in_both_precisions(streams: Streams) -> None:
    for dtype in (torch.float32, torch.float64):
        z = draw(streams, 200_000, NOISE, 0, dtype=dtype).double().numpy()
        assert stats.kstest(z, "norm").pvalue > 1e-6
        assert abs(z.std() - 1) < 0.01
        assert abs(np.corrcoef(z[:-1], z[1:])[0, 1]) < 0.015


def test_writes_into_the_tensors_own_memory_and_only_there(streams: Streams) -> None:
    buffer = torch.zeros(3000)
    streams.normal_(buffer[1000:2000], NOISE, 1)
    assert torch.equal(buffer[1000:2000], draw(streams, 1000, NOISE, 1))
    assert not buffer[:1000].any() and not buffer[2000:].any()


def test_a_longer_buffer_starts_with_the_shorter_one(streams: Streams) -> None:
    assert torch.equal(draw(streams, 5000, NOISE, 2)[:100], draw(streams, 100, NOISE, 2))


def test_first_block_is_the_numpy_stream(streams: Streams) -> None:
    expected = streams.numpy(NOISE, 5).standard_normal(100, dtype=np.float32)
    assert np.array_equal(draw(streams, 100, NOISE, 5).numpy(), expected)


def test_big_buffers_do_not_depend_on_the_number_of_threads(streams: Streams) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        single = draw(streams, 3 * _BLOCK + 17, NOISE, 9)
        torch.set_num_threads(2)
        double = draw(streams, 3 * _BLOCK + 17, NOISE, 9)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(single, double)
    blocks = single[: 3 * _BLOCK].view(3, _BLOCK)
    correlations = torch.corrcoef(blocks) - torch.eye(3)
    assert correlations.abs().max() < 0.012  # blocks are different numbers


@pytest.mark.parametrize(
    "buffer",
    [torch.empty(10, dtype=torch.bfloat16), torch.empty(2, 5), torch.empty(10)[::2], torch.empty(4, dtype=torch.int64)],
)
def test_refuses_buffers_it_cannot_fill(buffer: torch.Tensor) -> None:
    with pytest.raises(WeightclipError, match="contiguous 1-D"):
        Streams.seeded(0).normal_(buffer, NOISE)


def test_seed_supplies_all_its_64_bits_and_the_generator_is_left_alone() -> None:
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()
    a = Streams.seeded(generator)
    assert torch.equal(before, generator.get_state())
    assert a.key("x") == Streams.seeded(5).key("x")
    # torch's CPU generator forgets the upper half of its seed
    assert a.key("x") != Streams.seeded(torch.Generator().manual_seed(5 + 2**32)).key("x")
    torch.rand(3, generator=generator)
    assert Streams.seeded(generator).key("x") == a.key("x")
    assert Streams.seeded(-1).key("x") == Streams.seeded(2**64 - 1).key("x")
    with pytest.raises(WeightclipError, match="64 bits"):
        Streams.seeded(2**64)


def test_secure_roots_differ_and_are_never_saved_nor_shown() -> None:
    a, b = Streams.secure(), Streams.secure()
    assert a.is_secure and a.advance(1).is_secure and a.key("x") != b.key("x")
    assert repr(a) == "Streams.secure()"
    for save in (pickle.dumps, copy.deepcopy, copy.copy, lambda s: s.state(), lambda s: torch.save(s, io.BytesIO())):
        with pytest.raises(WeightclipError, match="never saved"):
            save(a)
        with pytest.raises(WeightclipError, match="never saved"):
            save(a.advance(3))


def test_seeded_streams_resume_exactly() -> None:
    a = Streams.seeded(11).advance(2).advance(-4)
    state = json.loads(json.dumps(a.state()))
    for b in (Streams.from_state(state), pickle.loads(pickle.dumps(a)), copy.deepcopy(a)):
        assert not b.is_secure
        assert torch.equal(draw(a, 100, NOISE, 1), draw(b, 100, NOISE, 1))
    assert a.key("x") != Streams.seeded(11).advance(-4).advance(2).key("x")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("make", [Streams.secure, lambda: Streams.seeded(3)])
def test_cuda_streams(make) -> None:
    streams = make()
    a, b, c = (
        streams.normal_(torch.empty(1 << 20, device="cuda"), *args) for args in ((NOISE, 1), (NOISE, 1), (NOISE, 2))
    )
    assert torch.equal(a, b)
    assert abs(torch.corrcoef(torch.stack([a, c]))[0, 1]) < 0.006
    assert stats.kstest(a.double().cpu().numpy()[:200_000], "norm").pvalue > 1e-6


def test_pickled_parts_of_a_run_stay_parts() -> None:
    """A worker that is sent the streams of its part has these, not the run's, whose noise other parts would share."""
    run = Streams.seeded(3)
    for part in (run.child("tune/run", 1), run.child("tune/run", 2).advance(5), run.for_release(4, lambda: b"sum")):
        again = pickle.loads(pickle.dumps(part))
        assert again.key("noise", 0) == part.key("noise", 0) != run.key("noise", 0) and not again.is_secure
        with pytest.raises(WeightclipError, match="part of a run"):
            part.state()
    for secret in (Streams.secure(), Streams.secure().child("x"), Streams.secure().for_release(0, lambda: b"")):
        with pytest.raises(WeightclipError, match="never saved"):
            pickle.dumps(secret)
