"""Wide residual networks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weightclip.errors import WeightclipError
from weightclip.models import WideResNet
from weightclip.nn import SafeGroupNorm, StandardizedConv2d


@pytest.mark.parametrize(
    ("depth", "options", "expected"),
    [
        (40, {}, 8_944_266),  # the paper's count: convolutions with biases, normalisation without parameters
        (40, {"affine": True, "bias": False}, 8_949_210),  # the layout of Zagoruyko & Komodakis
        (16, {}, 2_747_530),
        (16, {"affine": True, "bias": False}, 2_748_890),
        (16, {"weight_standardization": True}, 2_747_530),
    ],
)
def test_parameter_counts(depth, options, expected, count):
    with torch.device("meta"):
        model = WideResNet(depth, 4, **options)
    assert count(model) == expected


def test_number_of_layers():
    with torch.device("meta"):
        model = WideResNet(16, 4)
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) == 1 + 12 + 3  # stem, six blocks of two, three 1x1 shortcuts
    assert sum(m.stride == (2, 2) for m in convolutions) == 4
    assert not any("BatchNorm" in type(m).__name__ for m in model.modules())


def test_shapes_at_full_size():
    model = WideResNet(16, 4)
    features = model.features(torch.randn(1, 3, 32, 32))
    assert features.shape == (1, 256, 8, 8)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"affine": True, "bias": False, "weight_standardization": True},
        {"convex": 0.5, "norm": "none", "activation": nn.Tanh},
    ],
)
def test_sound(options, is_sound):
    is_sound(WideResNet(10, 1, groups=4, **options), torch.randn(3, 3, 16, 16))


def test_options_reach_the_layers():
    model = WideResNet(10, 1, groups=8, alpha=0.25, weight_standardization=True)
    assert all(m.num_groups == 8 and m.alpha == 0.25 for m in model.modules() if isinstance(m, SafeGroupNorm))
    assert all(isinstance(m, StandardizedConv2d) for m in model.modules() if isinstance(m, nn.Conv2d))


def test_errors():
    with pytest.raises(WeightclipError, match="depth"):
        WideResNet(17)
    with pytest.raises(WeightclipError, match="norm"):
        WideResNet(16, norm="batch")  # type: ignore[arg-type]
