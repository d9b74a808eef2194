"""Law of a run: a sound run passes, each kind of lie is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import weightclip.engine._checkpoint as checkpoint
from weightclip.audit import Subject, run_law, subjects
from weightclip.noise._release import Release
from weightclip.noise._streams import Streams
from weightclip.sampling._loader import PoissonLoader


@pytest.fixture
def subject() -> Subject:
    return subjects()["radii on both factors"]


@pytest.fixture
def loudest(subject: Subject):
    return torch.full((1, 4), 50.0), torch.tensor([0])


def test_a_sound_run(subject: Subject, loudest):
    law = run_law(subject, loudest, steps=20)
    assert law.failures == () and law.releases == law.charged == 20
    assert 0 < law.epsilon_exact <= law.epsilon_claimed
    assert law.noise.scale == pytest.approx(1.0, abs=0.1)


def test_random_draws(subject: Subject, loudest):
    law = run_law(replace(subject, rate=0.25), loudest, steps=24, resume=False)
    assert law.failures == () and law.sampling > 1e-4


def _double_release(patch: pytest.MonkeyPatch) -> None:
    original = Release.release

    def halved(self: Release, *args) -> None:
        self.sigma /= 2
        original(self, *args)
        self.sigma *= 2

    patch.setattr(Release, "release", halved)


def _same_noise(patch: pytest.MonkeyPatch) -> None:
    original = Streams.normal_
    patch.setattr(Streams, "normal_", lambda self, out, label, *ints: original(Streams.seeded(7), out, label, 7))


def _forgetful(patch: pytest.MonkeyPatch) -> None:
    original = checkpoint.load

    def load(engine, path, *, exact: bool) -> None:
        original(engine, path, exact=exact)
        engine.steps = 3

    patch.setattr(checkpoint, "load", load)


def _repeat(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Streams, "advance", lambda self, nonce: self)


LIES = [
    (_double_release, "noise (spread"),
    (_same_noise, "not independent"),
    (_forgetful, "charged"),
    (_repeat, "repeats its noise"),
]


@pytest.mark.parametrize(("lie", "words"), LIES)
def test_lies_are_named(
    lie: Callable[[pytest.MonkeyPatch], None], words: str, subject: Subject, loudest, monkeypatch: pytest.MonkeyPatch
):
    lie(monkeypatch)
    law = run_law(subject, loudest, steps=20)
    assert law.violation and any(words in f for f in law.failures), law.failures


def test_a_record_that_is_always_drawn_is_named(subject: Subject, loudest, monkeypatch: pytest.MonkeyPatch):
    import numpy as np

    original = PoissonLoader.indices
    monkeypatch.setattr(
        PoissonLoader, "indices",
        lambda self, draw: np.unique(np.append(original(self, draw), self._n - 1)) if self.sample_rate < 1
        else original(self, draw),
    )  # fmt: skip
    law = run_law(replace(subject, rate=0.25), loudest, steps=12, resume=False)
    assert any("not drawn independently" in f for f in law.failures)
