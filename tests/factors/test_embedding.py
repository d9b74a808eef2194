"""Embeddings: every row gets a dense gradient; repeated rows add up."""

from __future__ import annotations

import torch
from torch import nn


def test_a_row_hit_everywhere_meets_its_radius(made_private, exact):
    layer = nn.Embedding(5, 3)
    x = torch.full((1, 9), 2)
    d = torch.ones(1, 9, 3)
    d = d / d.norm()
    assert float(exact(layer, x, d).norm()) > 2.99  # sqrt(9)
    assert float(exact(made_private(layer, radius=0.5), x, d).norm()) > 0.499
    assert float(exact(made_private(layer, radius=0.5), x, d).norm()) <= 0.5 * (1 + 1e-5)


def test_padding_rows_get_nothing(made_private):
    twin = made_private(nn.Embedding(5, 3, padding_idx=1), cap=1.0)
    twin(torch.tensor([[1, 1, 2]])).sum().backward()
    assert not bool(twin.weight.grad[1].any()) and bool(twin.weight.grad[2].any())
    assert twin.weight.grad.layout == torch.strided
