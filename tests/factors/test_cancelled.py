"""Positions or uses of a record that cancel count as a part of their own norms, and no less."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weightclip.errors import WeightclipError
from weightclip.factors import Product, _dense, _embedding, _joint, _record_norms, make_layer_private
from weightclip.factors._collector import Use
from weightclip.factors._record_norms import CapNorm, Geometry, numbers

LEAST = 2.0**-12 * (1 - 1e-6)


def halves(shape: tuple[int, ...], dim: int = 1) -> Tensor:
    """Two equal halves along a dimension."""
    half = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return torch.cat([half, half], dim)


def opposite(shape: tuple[int, ...], dim: int = 1) -> Tensor:
    """Two halves that cancel."""
    half = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return torch.cat([half, -half], dim)


def dense() -> tuple[Tensor, Tensor]:
    x, d = halves((2, 3, 5)), opposite((2, 3, 4))
    return _dense.position_gram(x, d, 0.0), x.flatten(1).norm(dim=1) * d.flatten(1).norm(dim=1)


def table() -> tuple[Tensor, Tensor]:
    ids, d = torch.zeros(2, 6, dtype=torch.long), opposite((2, 3, 4))
    return _embedding.embedding_norm(ids, d, None), 6**0.5 * d.flatten(1).norm(dim=1)


def convolution(kind: CapNorm) -> tuple[Tensor, Tensor]:
    x, d = halves((2, 3, 4), 2), opposite((2, 5, 4), 2)
    geometry = Geometry((1,), (1,), (0,), (1,), 1)
    return (
        _record_norms.conv_record_norm(x, d, geometry, 0.0, kind), x.flatten(1).norm(dim=1) * d.flatten(1).norm(dim=1)
    )  # fmt: skip


def formed() -> tuple[Tensor, Tensor]:
    """Two uses of one convolution with cotangents that cancel."""
    layer: Any = nn.Conv1d(3, 5, 1, bias=False)
    make_layer_private(layer, cap=1.0)
    x, d = torch.randn(2, 3, 4), torch.randn(2, 5, 4)
    conf = numbers((1,), (0,), (1,), 1, False, (0,))
    uses = [Use(None, layer, x, sign * d, conf) for sign in (1.0, -1.0)]
    return _joint._formed(uses), 2 * x.flatten(1).norm(dim=1) * d.flatten(1).norm(dim=1)


CASES = {
    "dense": (_dense, dense), "table": (_embedding, table), "uses": (_joint, formed),
    "positions": (_record_norms, lambda: convolution(CapNorm.POSITION)),
    "exact": (_record_norms, lambda: convolution(CapNorm.EXACT)),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CASES))
def test_what_cancels_counts_as_a_part_of_its_norms(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module: ModuleType = CASES[name][0]
    norm, free = CASES[name][1]()
    assert bool((norm >= LEAST * free).all()) and bool((norm <= 2 * LEAST * free).all())
    monkeypatch.setattr(module, "CANCELLED", 0.0)  # the mistake: it vanishes
    norm, free = CASES[name][1]()
    assert bool((norm < LEAST * free).all())


def test_products_that_round_by_more_than_is_counted_are_refused() -> None:
    for wrong in ({"dtype": torch.bfloat16}, {"chunk": -1}, {"group": -1}):
        with pytest.raises(WeightclipError, match="Product"):
            Product(**wrong)
