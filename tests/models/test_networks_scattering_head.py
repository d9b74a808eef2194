"""Classifiers on scattering features."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weightclip.errors import WeightclipError
from weightclip.models import ScatteringHead
from weightclip.nn import Project


def test_parameter_counts(count):
    assert count(ScatteringHead("linear", 81, 7)) == 81 * 49 * 10 + 10
    assert count(ScatteringHead("mlp", 243, 8, hidden=(64,))) == 243 * 64 * 64 + 64 + 64 * 10 + 10
    cnn = ScatteringHead("cnn", 81, 7, hidden=(16, 32))  # 7 -> 3 by pooling
    assert count(cnn) == 81 * 16 * 9 + 16 + 16 * 32 * 9 + 32 + 32 * 9 * 10 + 10


@pytest.mark.parametrize("bound", [None, Project(1.0)])
@pytest.mark.parametrize("scale", [0.0, 1e-9, 1.0, 1e6])
def test_features_enter_the_body_with_norm_at_most_one(bound, scale):
    head = ScatteringHead("linear", 81, 4, bound=bound)
    norms = head.input(scale * torch.rand(8, 81, 4, 4)).flatten(1).norm(dim=1)
    assert (norms <= 1 + 1e-5).all()
    if scale >= 1:
        torch.testing.assert_close(norms, torch.ones(8))


def test_two_layouts_agree():
    head = ScatteringHead("mlp", 243, 4, hidden=(8,))
    x = torch.rand(2, 3, 81, 4, 4)
    assert torch.equal(head(x), head(x.flatten(1, 2)))
    assert torch.equal(head(x), head.body(head.input(x.flatten(1, 2))))


@pytest.mark.parametrize(
    ("kind", "options"),
    [("linear", {}), ("mlp", {"hidden": (8, 8)}), ("cnn", {"hidden": (4, 4), "activation": nn.Tanh, "groups": None})],
)
def test_sound(kind, options, is_sound):
    is_sound(ScatteringHead(kind, 81, 4, num_classes=3, **options), torch.rand(3, 81, 4, 4))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ScatteringHead("deep"), "kind"),
        (lambda: ScatteringHead("linear", hidden=(8,)), "hidden"),
        (lambda: ScatteringHead("mlp", hidden=()), "hidden"),
        (lambda: ScatteringHead("cnn", size=2, hidden=(4, 4, 4)), "nothing"),
        (lambda: ScatteringHead(size=2)(torch.zeros(1, 80, 2, 2)), "expects"),
    ],
)
def test_errors(call, message):
    with pytest.raises(WeightclipError, match=message):
        call()
