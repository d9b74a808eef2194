"""The multi-layer perceptron."""

from __future__ import annotations

import torch
from torch import nn

from weightclip.models import MLP
from weightclip.nn import SafeGroupNorm


def test_parameter_counts(count):
    assert count(MLP(105)) == 105 * 16 + 16 + 16 * 2 + 2
    assert count(MLP(105, hidden=(), out_features=3)) == 105 * 3 + 3
    assert count(MLP(10, hidden=(8, 4), out_features=1, bias=False)) == 80 + 32 + 4


def test_linear_without_hidden_layers():
    model, x = MLP(6, hidden=()), torch.randn(3, 6)
    layer = model.layers[0]
    assert isinstance(layer, nn.Linear) and len(model.layers) == 1
    assert torch.equal(model(x), layer(x))


def test_group_norm_sits_before_the_activation():
    kinds = [type(layer) for layer in MLP(6, (8,), activation=nn.Tanh, group_norm=4, alpha=0.5).layers]
    assert kinds == [nn.Linear, SafeGroupNorm, nn.Tanh, nn.Linear]


def test_sound(is_sound):
    is_sound(MLP(6, (8, 8), 3), torch.randn(4, 6))
    is_sound(MLP(12, (8,), 3, nn.Tanh, group_norm=2, alpha=0.1), torch.randn(4, 3, 2, 2))
