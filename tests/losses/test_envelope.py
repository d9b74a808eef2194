"""The envelope of cross-entropy is a convex B-Lipschitz loss, and both of its solvers find it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from weightclip.losses import BCEWithLogits, CrossEntropy


def norms(g: Tensor) -> Tensor:
    return torch.linalg.vector_norm(g, dim=1)


def huberised_logistic(d: Tensor, cap: float) -> Tensor:
    """log(1 + e^d), continued linearly with slope `cap` where it would be steeper."""
    edge = torch.logit(torch.tensor(cap, dtype=d.dtype)).expand_as(d)
    return torch.where(d < edge, F.softplus(d), F.softplus(edge) + cap * (d - edge))


def test_two_classes_and_one_logit_are_the_huberised_logistic() -> None:
    d = torch.linspace(-30, 30, 301, dtype=torch.float64)
    y = torch.zeros(301, dtype=torch.long)
    z = torch.stack([-d / 2, d / 2], 1)
    reference = huberised_logistic(d, 0.2)
    torch.testing.assert_close(BCEWithLogits(cap=0.2).values(d, y), reference)
    for envelope in (False, True):
        loss = CrossEntropy(cap=0.2 * math.sqrt(2), envelope=envelope)
        torch.testing.assert_close(loss.values(z, y), reference)
    # The iterative solver, with a third class that plays no part.
    third = torch.cat([z, torch.full((301, 1), -500.0, dtype=torch.float64)], 1)
    loss = CrossEntropy(cap=0.2 * math.sqrt(2), envelope=True)
    torch.testing.assert_close(loss.values(third, y), reference, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("cap", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("classes", [3, 10, 60])
def test_envelope_is_the_infimal_convolution(cap: float, classes: int) -> None:
    gen = torch.Generator().manual_seed(8)
    loss, plain = CrossEntropy(cap=cap, envelope=True), CrossEntropy()
    for scale in (1.0, 30.0, 3000.0):
        z = scale * torch.randn(200, classes, generator=gen, dtype=torch.float64)
        y = torch.randint(classes, (200,), generator=gen)
        f, g = loss.values(z, y), loss.gradient(z, y)
        assert (f <= plain.values(z, y) * (1 + 1e-12) + 1e-12).all()
        # No u does better than the envelope, and at active records the constraint is met with equality.
        for u in (torch.zeros_like(z), z / 2, z + torch.randn(z.shape, generator=gen, dtype=torch.float64)):
            assert (f <= plain.values(u, y) + cap * norms(z - u) + 1e-9 * scale).all()
        n, n0 = norms(g), norms(plain.gradient(z, y))
        torch.testing.assert_close(n, n0.clamp(max=cap), rtol=1e-6, atol=1e-12)
        # B-Lipschitz between any two points, and convex.
        w = z.roll(1, 0)
        assert ((f - loss.values(w, y)).abs() <= cap * norms(z - w) * (1 + 1e-9) + 1e-9).all()
        assert (loss.values((z + w) / 2, y) <= (f + loss.values(w, y)) / 2 + 1e-8 * scale).all()


@pytest.mark.parametrize("cap", [0.005, 0.1, 0.5, 1.0])
def test_both_solvers_of_the_envelope_agree(cap: float) -> None:
    gen = torch.Generator().manual_seed(14)
    loss = CrossEntropy(cap=cap, envelope=True)
    for classes in (3, 10, 200):
        for scale in (0.1, 1.0, 30.0, 3000.0):
            z = scale * torch.randn(100, classes, generator=gen, dtype=torch.float64)
            z[:10] = z[:10].round()  # ties
            z[10:20, 1:] = scale
            y = torch.randint(classes, (100,), generator=gen)
            soft = F.one_hot(y, classes).double()
            torch.testing.assert_close(loss.gradient(z, y), loss.gradient(z, soft), rtol=0, atol=1e-7 * cap)
