"""The float64 weight gradient by taps equals the convolution's own."""

from __future__ import annotations

import random

import torch

from weightclip.factors._conv import by_taps


def test_by_taps_equals_convolution_backward() -> None:
    random.seed(1)
    torch.manual_seed(0)
    for _ in range(60):
        channels, out = random.randint(1, 4), random.randint(1, 4)
        kernel = (random.randint(1, 4), random.randint(1, 4))
        stride = random.choice([(1, 1), (1, 1), (2, 2), (1, 2), (3, 1)])
        dilation, padding = [(random.randint(a, 3), random.randint(a, 3)) for a in (1, 0)]
        x = torch.randn(3, channels, random.randint(10, 13), random.randint(10, 13))
        weight = torch.randn(out, channels, *kernel)
        d = torch.randn_like(torch.conv2d(x, weight, None, stride, padding, dilation))
        expected = torch.ops.aten.convolution_backward(
            d.double(), x.double(), weight.double(), None, stride, padding, dilation, False, (0, 0), 1,
            (False, True, False),
        )[1]  # fmt: skip
        assert torch.allclose(by_taps(x, d, kernel, stride, padding, dilation), expected, rtol=1e-10, atol=1e-10)
