"""Mistakes in gradients of single records on the CPU, made on purpose: caps on a small CNN are not the oracle's."""

from __future__ import annotations

import pytest
import torch
from tests.engine.test_caps_by_layer import gap

from weightclip.factors import _own
from weightclip.factors._own import Own


def norm_without_bias(self, beta):
    return (torch.linalg.vector_norm(self.weight, 2, 1, dtype=torch.float64) * (1 + 2.0**-23)).float()


def sums_without_scale(self, scale, like):
    keep = slice(None) if scale is None else scale > 0
    weight, bias = (None if p is None else p[keep].sum(0, dtype=torch.float64) for p in (self.weight, self.bias))
    return None if weight is None else weight.view(like.shape), bias


def sums_with_all_rows(self, scale, like):
    weight, bias = (None if p is None else _own._weighted(scale.double(), p) for p in (self.weight, self.bias))
    return None if weight is None else weight.view(like.shape), bias


MUTANTS = {
    "norm without bias": ("norm", norm_without_bias),
    "scale ignored in sums": ("sums", sums_without_scale),
    "rows of scale zero not dropped": ("sums", sums_with_all_rows),
}


@pytest.mark.parametrize("each", [False, True], ids=["joint", "each layer"])
@pytest.mark.parametrize("name", MUTANTS)
def test_the_oracle_notices(name: str, each: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Own, *MUTANTS[name])
    assert not gap(each, hostile=True) <= 1e-4  # nor is NaN
