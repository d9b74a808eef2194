"""Exact law of one step: hostile neighbours, known shifts, and trainers made unsound."""

from __future__ import annotations

import math

import pytest
import torch

from weightclip.accounting._accounting import gdp_delta, gdp_epsilon
from weightclip.audit import Neighbours, StepLaw, falsify, hostile_neighbours, rounding_neighbours, step_law, subjects
from weightclip.audit._one_step import Shift
from weightclip.noise._mechanisms import Allocation, floored

SUBJECTS = subjects()


@pytest.mark.parametrize("name", ["radii on both factors", "tokens", "layer caps, small pieces"])
def test_no_pair_moves_the_release_too_far(name: str):
    subject = SUBJECTS[name]
    loudest = falsify(subject, restarts=6, steps=20).loudest
    pairs = hostile_neighbours(subject, loudest)
    law = step_law(subject, pairs)
    assert not law.violation and law.worst.shift > 0.8
    for pair in pairs:
        assert len(pair.larger[0]) == len(pair.base[0]) + 1 == len(pair.larger[1])
    if loudest[0].is_floating_point():
        assert {"huge record", "zero record", "not a number entry", "infinite entry", "near-empty batch",
                "inside the projection", "outside the projection"} <= {p.name for p in pairs}  # fmt: skip


def test_shift_of_a_known_record():
    subject = SUBJECTS["large batches"]  # one layer, no bias, capped loss: every record of full length moves it by 1
    x = torch.full((1, 4), 0.5)
    pair = Neighbours("known", subject.ordinary(5), (x, torch.tensor([1])))
    half = Neighbours("half", subject.ordinary(5), (x / 2, torch.tensor([1])))
    full, small = step_law(subject, [pair, half]).shifts
    assert full.shift == pytest.approx(1.0, abs=5e-3) and small.shift == pytest.approx(0.5, abs=5e-3)


def test_rounding_pairs_provoke_float32():
    subject = SUBJECTS["float32 sums"]
    loudest = falsify(subject, restarts=4, steps=10).loudest
    pairs = rounding_neighbours(subject, loudest, 4096)
    law = step_law(subject, pairs)
    plain = step_law(subject, [Neighbours("plain", subject.ordinary(4), loudest)]).worst.shift
    assert not law.violation  # the slack covers it
    assert law.worst.shift > 1.05 * plain  # and is needed: one record moves the sum by more than its gradient


def test_unsound_noise_shows(monkeypatch: pytest.MonkeyPatch):
    subject = SUBJECTS["overlapping pooling"]
    loudest = falsify(subject, restarts=6, steps=30).loudest
    pairs = [Neighbours("loudest", subject.ordinary(3), loudest)]
    assert not step_law(subject, pairs).violation
    monkeypatch.setattr(Allocation, "scales", lambda self, delta, dims, sigma: sigma * floored(delta))
    law = step_law(subject, pairs)
    assert law.violation and law.worst.shift == pytest.approx(math.sqrt(2), rel=0.01)
    assert law.epsilon(1.0, 1e-5) == pytest.approx(gdp_epsilon(law.worst.shift, 1e-5))
    assert law.curve(1.0, [0.0, 1.0])[1] > gdp_delta(1.0, 1.0)


def test_verdicts():
    assert not Shift("", 1.0, True).violation
    assert Shift("", 1.00001, True).violation
    assert Shift("", 0.1, False).violation  # noise that depends on the data is a leak by itself
    assert Shift("", math.nan, True).violation
    law = StepLaw("x", (Shift("a", 0.5, True), Shift("b", math.inf, True)))
    assert law.worst.name == "b" and law.curve(1.0, [1.0]) == [1.0] and law.epsilon(1.0, 1e-5) == math.inf
