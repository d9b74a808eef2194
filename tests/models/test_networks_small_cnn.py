"""The small networks of the literature."""

from __future__ import annotations

import torch
from torch import nn

from weightclip.models import SmallCNN


def test_parameter_counts(count):
    assert count(SmallCNN.for_mnist()) == 26_010
    assert count(SmallCNN.for_cifar10()) == 550_570


def test_sound(is_sound):
    is_sound(SmallCNN.for_mnist(), torch.rand(3, 1, 28, 28))
    is_sound(SmallCNN.for_cifar10(activation=nn.ReLU), torch.rand(2, 3, 32, 32))
