"""Embeddings: every row gets a dense gradient; repeated rows add up."""

from __future__ import annotations

import math

import torch
from torch import nn

from weightclip.factors import Product, make_layer_private
from weightclip.factors._embedding import EMBEDDING


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


def test_rows_of_a_table_are_added_in_float64_where_products_are_single_records() -> None:
    """Product(float32, 1) forms products of one record each: a table's rows have no such products."""
    b = 8192
    for extra in (0, 1):
        ids = torch.zeros(b + extra, 1, dtype=torch.long)
        d = torch.full((b + extra, 1, 1), 1.0)
        d[: b // 2, 0, 0] = 1.0 + 2.0**-10
        layer = nn.Embedding(2, 1)
        make_layer_private(layer, cap=math.inf, product=Product(torch.float32, 1))
        total, _ = EMBEDDING.sums(layer, ids, d, torch.ones(b + extra), ())
        assert total is not None and total.dtype == torch.float64
        assert float(total[0, 0]) == float(d.double().sum())
