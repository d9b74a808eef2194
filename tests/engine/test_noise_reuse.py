"""Noise never meets two different sums, and no draw is released twice (SOUNDNESS section 10)."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from tests.engine_kit import Run, private, same_bits, table
from torch import Tensor, nn

import weightclip as wc
from weightclip.engine._digest import _mixed, tensors_digest

pytestmark = pytest.mark.filterwarnings("ignore::weightclip.errors.UncountedReleases")
FIXED = wc.Bounds(layer_radius=1.0, cotangent_radius=0.5)  # noise of one size whatever the weights are


def head(scale: float = 1.0) -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(6, 100)
    with torch.no_grad():
        layer.weight.mul_(scale)
    return layer


def started(rate: float = 0.1, **settings) -> Run:
    settings = {"sigma": 2.0, "seed": 3, "batch": 8, "bounds": FIXED, **settings}
    return private(settings.pop("make", head)(), settings.pop("data", table(32)), **settings,
                   optimizer=lambda p: torch.optim.SGD(p, lr=rate))  # fmt: skip


def steps(run: Run, count: int) -> list[Tensor]:
    """The releases of so many steps, all entries in a row."""
    found: list[Tensor] = []
    while len(found) < count:
        for x, y in run.loader:
            run.criterion(run.model(x), y).backward()
            run.optimizer.step()
            found.append(torch.cat([g.flatten() for g in run.grads().values()]))
            if len(found) == count:
                break
    return found


def alike(a: Tensor, b: Tensor) -> bool:
    """Whether two releases share their noise, which is most of them."""
    return abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) > 0.3


def one_seed_with_another_rate_has_other_noise() -> None:
    """Step 0 is the same release twice; from then on the weights differ, and so do the sums."""
    slow, fast = (steps(started(rate), 4) for rate in (0.1, 0.5))
    assert torch.equal(slow[0], fast[0])
    assert not any(alike(a, b) for a, b in zip(slow[1:], fast[1:], strict=True))


def one_seed_with_another_sigma_has_other_noise() -> None:
    """A sweep over sigma with one seed gave the sum exactly: (s2 r1 - s1 r2)/(s2 - s1)."""
    for q in (1.0, 0.25):
        few, many = (steps(started(sigma=s, sample_rate=q), 1)[0] for s in (2.0, 4.0))
        assert not alike(few, many)


def one_seed_with_other_records_has_other_noise() -> None:
    x, y = table(32)
    here, there = (steps(started(data=(x[:n], y[:n]), sample_rate=1.0, expected_batch_size=32.0), 1)[0]
                   for n in (31, 32))  # fmt: skip
    assert not alike(here, there)


def equal_sums_at_other_weights_have_other_noise() -> None:
    """Were they alike, equal noise would tell that two sums are equal: of empty draws here, of no record there."""
    a, b = (steps(started(make=lambda s=s: head(s), sample_rate=1e-6, rate=0.0), 1)[0] for s in (1.0, 1.0))
    assert torch.equal(a, b)
    slow, fast = (steps(started(rate, sample_rate=1e-6), 3) for rate in (0.1, 0.5))
    assert not any(alike(a, b) for a, b in zip(slow[1:], fast[1:], strict=True))


def an_exact_resume_with_another_rate_has_other_noise() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = started()
        steps(run, 2)
        run.engine.save(Path(folder) / "run")
        went_on = steps(run, 3)
        other = started()
        other.engine.load(Path(folder) / "run", exact=True)
        other.optimizer.param_groups[0]["lr"] = 0.5
        resumed = steps(other, 3)
    assert torch.equal(went_on[0], resumed[0])  # the same release: same weights, same sum
    assert not any(alike(a, b) for a, b in zip(went_on[1:], resumed[1:], strict=True))


def a_secure_run_that_is_set_back_has_other_noise() -> None:
    for _ in range(2):
        run = started(rate=0.0, seed=None, sample_rate=1.0)
        first = steps(run, 1)[0]
        run.engine.steps = 0  # or a process that was forked
        assert not alike(first, steps(run, 1)[0])


def limits_that_adapt_have_noise_of_their_own() -> None:
    """Counts of records are released beside the gradients: their noise is keyed by them too."""
    bounds = wc.Bounds(layer_radius=1.0, cotangent_radius=0.5, adaptive=wc.Adaptive(noise=2.0, rate=1.0))
    found = []
    for n in (31, 32):
        x, y = table(32)
        run = started(bounds=bounds, data=(x[:n], y[:n]), sample_rate=1.0, expected_batch_size=32.0)
        steps(run, 1)
        found.append(run.engine.report()["adaptive"]["limits"])
    moves = [[float(torch.tensor(v).log()) for v in limits.values()] for limits in found]
    # one record counts at most 1/2 of 32; equal noise would leave limits that near to each other
    assert max(abs(a - b) for a, b in zip(*moves, strict=True)) > 0.5 / 32 * 1.01


def charged_draws_are_never_handed_out_again() -> None:
    data = torch.arange(40.0)[:, None].repeat(1, 6), torch.zeros(40, dtype=torch.long)
    run = started(data=data, batch=10)
    seen: list[tuple[float, ...]] = []
    state = run.loader.state_dict()
    for _ in range(3):
        for x, y in run.loader:
            run.criterion(run.model(x), y).backward()
            run.optimizer.step()
            seen.append(tuple(x[:, 0].tolist()))
            break
        run.loader.load_state_dict(state)  # as if nothing had happened
        run.loader.rewind(0)
    assert run.engine.steps == 3 and len(set(seen)) == 3


CHECKS = [
    one_seed_with_another_rate_has_other_noise, one_seed_with_another_sigma_has_other_noise,
    one_seed_with_other_records_has_other_noise, equal_sums_at_other_weights_have_other_noise,
    an_exact_resume_with_another_rate_has_other_noise, a_secure_run_that_is_set_back_has_other_noise,
    limits_that_adapt_have_noise_of_their_own, charged_draws_are_never_handed_out_again,
]  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_the_engine_passes(check) -> None:
    check()


def test_a_draw_without_a_release_is_handed_out_again() -> None:
    """Nobody chooses among draws: until it is charged the next draw stays what it is."""
    for physical in (None, 3):
        run = started(max_physical_batch_size=physical)
        peeks = []
        for _ in range(3):
            batches = iter(run.loader)
            peeks.append(torch.cat([next(batches)[0] for _ in range(run.loader.pieces)]))
        assert torch.equal(peeks[0], peeks[1]) and torch.equal(peeks[0], peeks[2])
        whole = [x for x, _ in run.loader]
        assert len(whole) == len(run.loader) * run.loader.pieces
        steps_of = started(max_physical_batch_size=physical)
        first = torch.cat([x for x, _ in _one_draw(steps_of)])
        assert torch.equal(first, peeks[0]) and steps_of.engine.steps == 1


def _one_draw(run: Run):
    for x, y in run.loader:
        run.criterion(run.model(x), y).backward()
        run.optimizer.step()
        yield x, y
        if run.engine.steps:
            return


@pytest.mark.parametrize("mechanism", [None, wc.KNorm(2)])
def test_the_same_run_twice_is_the_same(mechanism) -> None:
    runs = [started(mechanism=mechanism) for _ in range(2)]
    for run in runs:
        steps(run, 5)
    assert same_bits(runs[0].weights(), runs[1].weights())


def test_digests_tell_bits_places_types_and_shapes_apart() -> None:
    a, key = torch.arange(6.0), b"k" * 32
    same = tensors_digest([a, None], key)
    assert same == tensors_digest([a.clone(), None], key)
    flipped = a.clone()
    flipped[0] = -0.0
    others = [[a], [None, a], [a.double(), None], [a.view(2, 3), None], [a.flip(0), None], [flipped, None]]
    assert len({same, tensors_digest([a, None], b"other"), *(tensors_digest(o, key) for o in others)}) == 8


def test_the_mix_of_a_device_sees_every_bit_and_place() -> None:
    """The arithmetic of a device, run here: words in other places, one bit, a swap, another key."""
    key, a = b"k" * 32, torch.randn(1000)
    seen = {tuple(_mixed([a], key).tolist()), tuple(_mixed([a], b"other").tolist())}
    for i in range(0, 1000, 13):
        b = a.clone()
        b.view(torch.int32)[i] ^= 1 << (i % 31)
        seen.add(tuple(_mixed([b], key).tolist()))
    swapped = a.clone()
    swapped[[0, 1]] = a[[1, 0]]
    seen |= {tuple(_mixed([t], key).tolist()) for t in (swapped, a[:-1], torch.cat([a, torch.zeros(1)]), a.double())}
    seen |= {tuple(_mixed([a.bfloat16()], key).tolist()), tuple(_mixed([a.to(torch.int8)], key).tolist())}
    assert len(seen) == 2 + 77 + 4 + 2
    assert torch.equal(_mixed([a[:500], a[500:]], key), _mixed([a], key))
