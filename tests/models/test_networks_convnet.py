"""The paper's ConvNet."""

from __future__ import annotations

import torch

from weightclip.models import ConvNet


def test_parameter_count_of_the_paper(count):
    assert count(ConvNet()) == 1_625_866
    assert count(ConvNet(group_norm=16)) == 1_625_866  # the safe normalisation has no parameters


def test_sound(is_sound):
    is_sound(ConvNet(size=8), torch.randn(3, 1, 8, 8))
    is_sound(ConvNet(in_channels=3, size=8, num_classes=4, group_norm=8, alpha=0.1), torch.randn(3, 3, 8, 8))


def test_standardised_convolutions_are_sound(is_sound, count):
    model = ConvNet(size=8, group_norm=8, alpha=0.5, weight_standardization=True)
    assert count(ConvNet(weight_standardization=True)) == 1_625_866
    is_sound(model, torch.randn(3, 1, 8, 8))
