"""The K-norm mechanism: one record moves it by at most 1 in its own norm, and its noise has the stated law."""

from __future__ import annotations

import math

import pytest
import torch

import weightclip.noise._knorm as knorm
from weightclip.audit import Neighbours, falsify, pure_law, subjects
from weightclip.errors import WeightclipError
from weightclip.factors import Collector

ALIGNED = subjects()["aligned dense net"]
LOUD = torch.full((1, 4), 100.0), torch.tensor([1])
PAIRS = [Neighbours("loud", ALIGNED.ordinary(3), LOUD)]


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_claims_hold(p: float):
    law = pure_law(ALIGNED, p, PAIRS, trials=60)
    assert not law.violation and 0.3 < law.shift <= 1 and law.worst == "loud"


def test_wrong_noise_is_seen(monkeypatch: pytest.MonkeyPatch):
    original = knorm.KNormMechanism.sample
    monkeypatch.setattr(knorm.KNormMechanism, "sample", lambda self, *a: [0.7 * x for x in original(self, *a)])
    law = pure_law(ALIGNED, 2.0, PAIRS, trials=60)
    assert law.violation and law.shift <= 1


def test_wrong_bounds_are_seen(monkeypatch: pytest.MonkeyPatch):
    from dataclasses import replace

    original = knorm.Entrywise.__call__
    monkeypatch.setattr(
        knorm.Entrywise, "__call__",
        lambda self, *a: {k: replace(e, sensitivity=e.sensitivity * 0.5) for k, e in original(self, *a).items()},
    )  # fmt: skip
    assert pure_law(ALIGNED, 2.0, PAIRS, trials=10).shift <= 1 + 1e-3  # limited to what the noise is scaled for
    monkeypatch.setattr(Collector, "_scale", lambda self, *args: None)
    assert pure_law(ALIGNED, 2.0, PAIRS, trials=10).shift > 1.5


def test_the_falsifier_refuses_other_norms():
    from dataclasses import replace

    with pytest.raises(WeightclipError, match="pure_law"):
        falsify(replace(ALIGNED, mechanism=knorm.KNorm(1)))
