"""Cross-entropy's shared pass over values and gradients: a record's row never depends on who else is in the batch."""

from __future__ import annotations

import math

import pytest
import torch

from weightclip.losses import CrossEntropy

LOSSES = [CrossEntropy(), CrossEntropy(temperature=0.3), CrossEntropy(scale_by_temperature=True, temperature=2.0)]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("stranger", ["label", "ignored", "nan", "inf", "huge", "near overflow"])
def test_a_stranger_in_the_batch_changes_no_bit_of_another_row(loss: CrossEntropy, stranger: str) -> None:
    g = torch.Generator().manual_seed(0)
    for classes in (2, 10):
        z, y = 5 * torch.randn(64, classes, generator=g), torch.randint(0, classes, (64,), generator=g)
        other, label = torch.randn(1, classes, generator=g), torch.tensor([1])
        if stranger in ("label", "ignored"):
            label = torch.tensor([classes if stranger == "label" else -100])
        else:
            other[0, 0] = {"nan": math.nan, "inf": math.inf, "huge": 3e38, "near overflow": 2e30}[stranger]
        values, gradient = loss.both(z, y)
        more_values, more = loss.both(torch.cat([z, other]), torch.cat([y, label]))
        assert torch.equal(values, more_values[:-1]) and torch.equal(gradient, more[:-1])
        assert bool(torch.isfinite(more).all()) and bool(torch.isfinite(more_values).all())
        if stranger in ("label", "ignored", "nan", "inf"):
            assert not more[-1].any() and not more_values[-1].any()
        torch.testing.assert_close(gradient, loss.gradient(z, y), rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(values, loss.values(z, y), rtol=1e-5, atol=1e-7)


def test_an_ignored_class_is_ignored() -> None:
    loss, z = CrossEntropy(ignore_index=1), torch.randn(3, 4)
    values, gradient = loss.both(z, torch.tensor([0, 1, 2]))
    assert not values[1] and not gradient[1].any() and bool(gradient[0].any()) and bool(gradient[2].any())


def test_outputs_that_overflow_only_without_the_temperature_are_the_same_for_every_batch() -> None:
    loss = CrossEntropy(temperature=1e10)
    z, y = torch.full((1, 4), 3e38), torch.tensor([1])
    _, alone = loss.both(z, y)
    _, beside = loss.both(torch.cat([z, torch.full((1, 4), math.nan)]), torch.tensor([1, 0]))
    assert torch.equal(alone[0], beside[0])


def test_the_shared_pass_does_not_look_at_the_default_type() -> None:
    z, y = torch.randn(3, 4), torch.tensor([0, 1, 3])
    expected = CrossEntropy().both(z, y)
    torch.set_default_dtype(torch.float64)
    try:
        found = CrossEntropy().both(z, y)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
