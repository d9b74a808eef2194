"""Contrastive training in small: loss, views, repetition, interruption."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from weightclip.errors import WeightclipError
from weightclip_studies.images.extractor import (
    ContrastiveTraining,
    Processes,
    Recipe,
    Views,
    describe_extractor,
    load_extractor,
    pictures,
    train_extractor,
)
from weightclip_studies.images.extractor import _contrast as module
from weightclip_studies.images.extractor._draws import Draws
from weightclip_studies.images.extractor._views import view

TINY = Recipe(width=2, images=48, steps=6, pairs=12, processes=Processes(size=32, leaves=6, generated=0.25))


def quiet(line: str) -> None:
    pass


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_the_contrast_by_hand() -> None:
    z = torch.nn.functional.normalize(torch.randn(6, 5, generator=torch.Generator().manual_seed(0)), dim=1)
    losses = []
    for i in range(6):
        others = [j for j in range(6) if j != i]
        logits = torch.stack([z[i] @ z[j] / 0.2 for j in others])
        losses.append(-logits.log_softmax(0)[others.index((i + 3) % 6)])
    assert torch.allclose(module.contrast(z, 0.2), torch.stack(losses).mean())
    apart = torch.eye(4).repeat(2, 1)  # partners equal, all others at right angles
    assert (
        float(module.contrast(apart, 0.05))
        < 1e-6
        < float(module.contrast(apart.roll(1, 0)[[0, 1, 2, 3, 6, 7, 4, 5]], 0.05))
    )


def test_the_rate_warms_up_and_falls_to_nothing() -> None:
    rates = [replace(TINY, warm=0.1).rate_at(t / 100) for t in range(102)]
    assert rates[10] == TINY.rate == max(rates) and rates[0] == 0 and rates[1] == pytest.approx(TINY.rate / 10)
    assert rates[10:] == sorted(rates[10:], reverse=True) and rates[55] == pytest.approx(TINY.rate / 2)
    assert rates[100] == rates[101] == 0  # a clock may be looked at too late


def test_views_differ_as_they_may_and_repeat() -> None:
    images = pictures(6, TINY.processes, 0)
    settings = Views(size=24, hole=0.5)
    one, again, other = (view(images, settings, Draws("v", s)) for s in (0, 0, 1))
    assert one.shape == (6, 3, 24, 24) and float(one.min()) >= 0 and float(one.max()) <= 1
    assert torch.equal(one, again) and not torch.equal(one, other)
    plain = Views(size=32, smallest=1.0, jittered=0.0, grey=0.0)
    for image, seen in zip(images.float() / 255, view(images, plain, Draws("v", 0)), strict=True):
        # only mirroring and the ratio of the sides are left
        assert min(float((seen - image).abs().mean()), float((seen - image.flip(-1)).abs().mean())) < 0.1
    grey = view(images, replace(plain, grey=1.0), Draws("v", 0))
    assert torch.equal(grey[:, 0], grey[:, 2])


def test_a_view_depends_on_its_own_picture() -> None:
    images = pictures(4, TINY.processes, 0)
    changed = torch.cat([images[:1], 255 - images[1:]])
    assert torch.equal(view(images, Views(), Draws("v", 0))[0], view(changed, Views(), Draws("v", 0))[0])


def test_the_loss_falls() -> None:
    training = ContrastiveTraining(replace(TINY, steps=50, width=4, warm=0.1), say=quiet)
    first = float(module.contrast(training.model(training.batch(0)).detach(), 0.2))
    training.run()
    assert training.losses[-1][1] < first - 0.5 and training.losses[-1][1] < math.log(23) - 0.5


def test_training_repeats_and_goes_on_where_it_was_stopped(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(module, "_EVERY", 2)
    whole = ContrastiveTraining(TINY, say=quiet)
    assert whole.run()
    first = ContrastiveTraining(TINY, folder=tmp_path, say=quiet)
    assert not first.run(within=0.0) and first.step == 2
    second = ContrastiveTraining(TINY, folder=tmp_path, say=quiet)
    assert second.step == 2 and second.run() and second.seconds > first.seconds
    assert same(whole.result(), second.result()) and whole.losses == second.losses
    assert not same(whole.result(), ContrastiveTraining(TINY, say=quiet).result())
    with pytest.raises(WeightclipError, match="another recipe"):
        ContrastiveTraining(replace(TINY, rate=1.0), folder=tmp_path, say=quiet)


def test_the_rate_follows_the_clock(tmp_path, monkeypatch) -> None:
    now, asked = [0.0], []
    monkeypatch.setattr(module, "_EVERY", 4)
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    real = ContrastiveTraining._one

    def one(self, step: int, done: float) -> torch.Tensor:
        now[0] += 1.0 if step < 8 else 3.0  # others begin to use the machine
        asked.append(done)
        return real(self, step, done)

    monkeypatch.setattr(ContrastiveTraining, "_one", one)
    training, kept = ContrastiveTraining(TINY, folder=tmp_path, length=32.0, say=quiet), []
    assert training.run(keep=lambda: kept.append(training.done), every=10.0)
    assert training.step == 16 == training.taken().steps and training.recipe == TINY
    assert asked[4:9] == [4 / 32, 5 / 32, 6 / 32, 7 / 32, 8 / 32] and asked[12:] == [20 / 32, 23 / 32, 26 / 32, 29 / 32]
    assert kept == [20 / 32]  # a checkpoint, but none at the end
    again = ContrastiveTraining(TINY, folder=tmp_path, length=32.0, say=quiet)
    assert again.step == 16 and again.done == 1 and again.run() and again.step == 16


def test_pixels_keep_single_precision(monkeypatch) -> None:
    inside, seen, real = [], [], ContrastiveTraining.batch

    @contextlib.contextmanager
    def autocast(*args, **kwargs) -> Iterator[None]:
        inside.append(1)
        yield
        inside.pop()

    monkeypatch.setattr(module.torch, "autocast", autocast)
    monkeypatch.setattr(
        ContrastiveTraining, "batch", lambda self, step: (seen.append(len(inside)), real(self, step))[1]
    )
    monkeypatch.setattr(module, "view", lambda *a: (seen.append(len(inside)), view(*a))[1])
    ContrastiveTraining(TINY, say=quiet)._one(0, 0.0)
    assert seen == [0, 0, 0]


def test_a_compiler_that_fails_is_not_used(monkeypatch) -> None:
    def broken(x):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", lambda model: broken)
    with pytest.warns(UserWarning, match="no compiler"):
        training = ContrastiveTraining(replace(TINY, steps=1), compiled=True, say=quiet)
    plain = ContrastiveTraining(replace(TINY, steps=1), say=quiet)
    assert training.run() and plain.run() and same(training.result(), plain.result())


def test_algorithms_are_tuned_while_it_trains_and_not_afterwards(monkeypatch) -> None:
    seen, before = [], torch.backends.cudnn.benchmark
    real = ContrastiveTraining._one
    monkeypatch.setattr(ContrastiveTraining, "_one", lambda self, *step: (
        seen.append(torch.backends.cudnn.benchmark), real(self, *step))[1])  # fmt: skip
    assert ContrastiveTraining(replace(TINY, steps=1), say=quiet).run()
    assert seen == [True] and torch.backends.cudnn.benchmark is before is False


def test_a_recipe_survives_a_file() -> None:
    assert Recipe.from_dict(TINY.to_dict()) == TINY


def test_an_interrupted_extractor_goes_on_and_leaves_a_snapshot(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(module, "_EVERY", 1)
    assert train_extractor(TINY, tmp_path / "w", tmp_path, minutes=60.0, within=0.0, say=quiet) is None
    run = ContrastiveTraining.run
    monkeypatch.setattr(ContrastiveTraining, "run", lambda self, within, keep: run(self, within, keep, every=0.0))
    stored = train_extractor(TINY, tmp_path / "w", tmp_path, minutes=0.005, say=quiet)
    assert stored is not None and stored.recipe.steps > 1 and stored.recipe == replace(TINY, steps=stored.recipe.steps)
    assert stored.facts["device"] == "cpu" and stored.facts["done"] == 1
    assert (tmp_path / "w" / f"{stored.name}.png").exists()
    snapshot = describe_extractor(tmp_path / "snapshot", stored.name)
    assert snapshot.facts["done"] < 1 and load_extractor(tmp_path / "snapshot", stored.name).width == 2
    assert train_extractor(TINY, tmp_path / "w", tmp_path / "none", say=quiet) == stored  # not made again
