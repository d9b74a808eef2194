"""Mistakes of SOUNDNESS section 2 in losses and enforced limits, made on purpose: the property tests must notice."""

from __future__ import annotations

import math

import pytest
import torch
from tests import _climber
from tests._networks import Case, simple_cases
from tests.mutants.bound_kit import caught, huber, set_weights
from torch import nn

import weightclip as wc
from weightclip.factors import _conv as conv_factors
from weightclip.factors import _dense as dense_factors
from weightclip.factors import make_layer_private
from weightclip.losses import BCEWithLogits, Cosine, CrossEntropy

aten = torch.ops.aten


# -- losses ------------------------------------------------------------------------------------------------------------


def test_cross_entropy_as_one(monkeypatch):
    case = simple_cases()["dense"]
    caught(case, lambda: monkeypatch.setattr(CrossEntropy, "bound", lambda self, shape, p=2: 1.0))


def test_temperature_forgotten(monkeypatch):
    model = set_weights(nn.Linear(2, 2, bias=False), [[50.0, 0.0], [0.0, 50.0]])
    case = Case(model, (2,), CrossEntropy(temperature=0.5), wc.Bounds(input_radius=1.0), classes=2)
    caught(case, lambda: monkeypatch.setattr(CrossEntropy, "bound", lambda self, shape, p=2: math.sqrt(2)))


def test_cosine_without_its_floor(monkeypatch):
    model = set_weights(nn.Linear(2, 2, bias=False), [[0.01, 0.0], [0.0, 0.01]])
    case = Case(model, (2,), Cosine(floor=0.1), wc.Bounds(input_radius=1.0), classes=2)
    caught(case, lambda: monkeypatch.setattr(Cosine, "bound", lambda self, shape, p=2: 1.0))


def test_several_outputs_as_one(monkeypatch):
    """n averaged outputs have an l2 bound of 1/sqrt(n), not 1/n."""
    model = nn.Linear(2, 4, bias=False)
    case = Case(model, (2,), BCEWithLogits(pos_weight=5.0), wc.Bounds(input_radius=1.0), classes=4)
    caught(case, lambda: monkeypatch.setattr(BCEWithLogits, "bound", lambda self, shape, p=2: 5.0 / shape[0]))


# -- limits in the bound but not in the code ---------------------------------------------------------------------------


@pytest.mark.parametrize("limit, name", [("cotangent", "radii"), ("radius", "radii"), ("cap", "cap"),
                                         ("cap", "cap of a conv"), ("cap", "cap over positions")])  # fmt: skip
def test_limits_that_are_not_enforced(limit, name, monkeypatch):
    original = _climber.make_layer_private

    def mutant(module, **options):
        original(module, **{**options, limit: None})

    case = simple_cases()[name]
    caught(case, lambda: monkeypatch.setattr(_climber, "make_layer_private", mutant))


def test_inputs_that_are_not_projected(monkeypatch):
    monkeypatch_target = _climber.InputProjection
    case = simple_cases()["dense"]
    caught(case, lambda: monkeypatch.setattr(_climber, "InputProjection", lambda r, d: monkeypatch_target(math.inf, d)))


def test_a_patch_norm_that_forgets_the_overlap(monkeypatch):
    """||x|| in place of ||U||_F inside the radius of a convolution."""
    model = nn.Sequential(nn.Conv1d(1, 1, 3, padding=1, bias=False), nn.Flatten())
    case = huber(model, (1, 16), 16, layer_radius=0.1, cotangent_radius=0.01, starts=[torch.ones(16)])

    def mutant(x, *geometry):
        return x.flatten(1).square().sum(1)

    caught(case, lambda: monkeypatch.setattr(conv_factors, "patch_norm_squared", mutant))


def test_records_that_are_not_finite(monkeypatch):
    """0 * nan is nan: scaling by zero is not enough."""

    def total() -> torch.Tensor:
        layer = nn.Linear(2, 2)
        make_layer_private(layer, cap=1.0)
        layer(torch.tensor([[1.0, 1.0], [math.nan, 1.0]])).sum().backward()
        assert layer.weight.grad is not None
        return layer.weight.grad

    assert bool(torch.isfinite(total()).all())

    def mutant(x, d, scale):
        return x, d * scale.view(-1, *(1,) * (d.dim() - 1))

    monkeypatch.setattr(dense_factors, "both_masked", mutant)
    assert not bool(torch.isfinite(total()).all())
