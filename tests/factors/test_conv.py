"""Convolutions: patch norms without patches, and caps between exact and free."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from weightclip.factors import CapNorm
from weightclip.factors._conv import channel_sums, patch_norm_squared


@pytest.mark.parametrize("seed", range(20))
def test_patch_norms_against_unfold(seed):
    draw = random.Random(seed)
    size = (draw.randint(5, 8), draw.randint(5, 8))
    k, s, d, p = ((draw.randint(1, 3), draw.randint(1, 3)) for _ in range(4))
    d = tuple(min(e, 2) for e in d)
    x = torch.randn(3, 2, *size, generator=torch.Generator().manual_seed(seed))
    if any(n + 2 * q < e * (j - 1) + 1 for n, q, e, j in zip(size, p, d, k, strict=True)):
        pytest.skip("the kernel does not fit")
    patches = F.unfold(x.double(), k, d, p, s)
    out = tuple((n + 2 * q - e * (j - 1) - 1) // t + 1 for n, q, e, j, t in zip(size, p, d, k, s, strict=True))
    got = patch_norm_squared(x, out, k, s, d, p).double()
    torch.testing.assert_close(got, patches.square().sum((1, 2)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make, shape", [
    (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), (4, 9)),
    (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (2, 5, 5)),
    (lambda: nn.Conv2d(3, 2, (2, 3), dilation=(2, 1), bias=False), (3, 6, 6)),
    (lambda: nn.Conv3d(1, 2, 2, stride=2, padding="valid"), (1, 4, 4, 4)),
])  # fmt: skip
def test_caps(make, shape, made_private, exact):
    torch.manual_seed(0)
    layer = make()
    x = torch.randn(6, *shape)
    d = torch.randn_like(layer(x)).detach()
    native = exact(layer, x, d, 0.5)
    norms = native.norm(dim=1)
    cap = float(norms.median())
    want = native * (cap / norms).clamp(max=1).unsqueeze(1)
    sizes = []
    for caps in (CapNorm.FREE, CapNorm.CHANNEL, CapNorm.POSITION, CapNorm.EXACT, CapNorm.CHEAPEST):
        got = exact(made_private(layer, cap=cap, beta=0.5, caps=caps), x, d, 0.5)
        sizes.append(got.norm(dim=1))
        assert bool((sizes[-1] <= want.norm(dim=1) * (1 + 1e-4)).all())  # never more than exact clipping
        if caps >= CapNorm.POSITION:
            torch.testing.assert_close(got, want, rtol=2e-4, atol=1e-5)
    assert bool((sizes[0] <= sizes[1] * (1 + 1e-4)).all())  # channel Grams never below the free bound


def test_a_transposed_cap_holds(made_private, exact):
    torch.manual_seed(0)
    layer = nn.ConvTranspose2d(2, 3, 3, stride=2)
    x = torch.randn(5, 2, 3, 3)
    d = torch.randn_like(layer(x)).detach()
    norms = exact(made_private(layer, cap=0.5, beta=0.7), x, d, 0.7).norm(dim=1)
    assert float(norms.max()) <= 0.5 * (1 + 1e-4)


@pytest.mark.parametrize("alone", [False, True])
def test_bias_gradients_are_scaled_sums_and_their_rounding_is_allowed_for(alone):
    d = torch.randn(9, 4, 31, 29) * torch.logspace(-3, 3, 9).view(-1, 1, 1, 1)
    scale = torch.rand(9)
    scale[2], d[2] = 0.0, float("nan")
    exact = d.nan_to_num(0.0).double().sum((2, 3)) * scale.double()[:, None]
    for i in (None, 0, 5):  # the whole batch, and records by themselves
        some = slice(None) if i is None else slice(i, i + 1)
        found, wanted = channel_sums(d[some], scale[some], alone), exact[some].sum(0)
        # within a record (positions + 8) 2^-24 of the sum of magnitudes: the share that sum_slack adds
        free = (d[some].nan_to_num(0.0).double().abs().sum((2, 3)) * scale.double()[some, None]).sum(0)
        allowed = (31 * 29 + 8) * 2.0**-24 if alone else 1e-14
        assert bool(((found - wanted).abs() <= allowed * free + 1e-300).all())
    rows = [channel_sums(d[i : i + 1], scale[i : i + 1], alone) for i in range(9)]
    torch.testing.assert_close(channel_sums(d, scale, alone), sum(rows), rtol=1e-12, atol=1e-9)
