"""The falsifier finds what is there: known maxima, and bounds made false on purpose."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import weightclip as wc
from weightclip.audit import Subject, falsify, subjects
from weightclip.audit._built_in import gaussian_records
from weightclip.audit._falsifier import label_candidates

SUBJECTS = subjects()


@pytest.mark.parametrize("name", ["aligned dense net", "overlapping pooling", "normalisation", "joint cap", "tokens"])
def test_bounds_hold_and_are_nearly_attained(name: str):
    found = falsify(SUBJECTS[name], restarts=10, steps=40)
    assert not found.violation
    assert max(found.joint, *(f.ratio for f in found.layers)) > 0.99
    assert all(0 <= f.typical <= f.bound for f in found.layers)


def test_the_loudest_record_attains_the_joint_length():
    subject = SUBJECTS["normalisation"]
    found = falsify(subject, restarts=10, steps=40)
    release = subject.start(found.loudest, 0.0).step()
    assert float(release.norm()) == pytest.approx(found.joint, rel=1e-5)
    assert found.joint > 0.99


@pytest.mark.parametrize("factor", [0.9, 0.5])
def test_a_bound_that_is_too_small_is_broken(factor: float, monkeypatch: pytest.MonkeyPatch):
    original = wc.certificate.Plan.evaluate

    def smaller(self, *args):
        return {k: replace(e, sensitivity=e.sensitivity * factor) for k, e in original(self, *args).items()}

    monkeypatch.setattr(wc.certificate.Plan, "evaluate", smaller)
    found = falsify(SUBJECTS["normalisation"], restarts=10, steps=40)
    assert found.violation and max(f.ratio for f in found.layers) == pytest.approx(1 / factor, rel=0.02)


def test_a_private_model_is_searched_where_it_stands():
    subject = SUBJECTS["clipped weights"]
    run = subject.start(subject.ordinary(8), 1.0)
    before = falsify(run, restarts=6, steps=20)
    for _ in range(3):
        run.step()
    weights = run.weights()
    after = falsify(run.engine, restarts=6, steps=20)
    assert all(torch.equal(a, b) for a, b in zip(weights, run.weights(), strict=True))
    assert not before.violation and not after.violation
    assert [f.bound for f in after.layers] == pytest.approx(list(wc.certify(run.model, None).sensitivities.values()))


@pytest.mark.parametrize("criterion", [nn.BCEWithLogitsLoss(), nn.HuberLoss(delta=0.5), nn.MultiMarginLoss()])
def test_other_losses(criterion: nn.Module):
    outputs = 3 if isinstance(criterion, nn.MultiMarginLoss) else 1

    def records(n: int, generator: torch.Generator):
        x = torch.randn(n, 4, generator=generator)
        if outputs > 1:
            return x, torch.randint(0, 3, (n,), generator=generator)
        return x, torch.rand(n, 1, generator=generator).round()

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(4, outputs)

    found = falsify(Subject("one layer", model, criterion, wc.Bounds(input_radius=2.0), records), restarts=12, steps=60)
    assert not found.violation
    assert found.layers[0].ratio > 0.9 or isinstance(criterion, nn.BCEWithLogitsLoss)


def test_labels_are_enumerated():
    assert label_candidates(wc.losses.CrossEntropy(), (5,), torch.tensor([0])).tolist() == [0, 1, 2, 3, 4]
    soft = label_candidates(wc.losses.CrossEntropy(), (3,), torch.zeros(1, 3))
    assert torch.equal(soft, torch.eye(3))
    assert {0.0, 1.0} <= set(label_candidates(wc.losses.BCEWithLogits(), (2,), torch.zeros(1, 2)).flatten().tolist())


def test_the_search_is_reproducible_and_leaves_torch_alone():
    state = torch.get_rng_state()
    a, b = (falsify(SUBJECTS["clipped weights"], restarts=4, steps=10, seed=3) for _ in range(2))
    assert torch.equal(state, torch.get_rng_state())
    assert a.layers == b.layers and torch.equal(a.loudest[0], b.loudest[0])
    other = gaussian_records((4,))(2, torch.Generator().manual_seed(0))
    assert falsify(SUBJECTS["clipped weights"], restarts=4, steps=10, ordinary=other).layers != a.layers
