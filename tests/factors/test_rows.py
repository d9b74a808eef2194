"""Which dimension holds the records."""

from __future__ import annotations

import pytest
import torch
from tests.oracle import Run
from torch import Tensor, nn

from weightclip.errors import ContractError
from weightclip.factors._passes import NONE, RECORDS, Layout, RowTable, layout_between


@pytest.mark.parametrize(
    ("one", "other", "layout"),
    [
        ((7, 3), (2, 3), RECORDS),
        ((28, 3), (8, 3), Layout(0, 4)),
        ((5, 7, 3), (5, 2, 3), Layout(1, 1)),
        ((7, 14), (7, 4), Layout(1, 2)),  # 7 positions, by accident as many as records
        ((7, 3), (7, 3), NONE),
        ((), (), NONE),
        ((7, 7), (2, 2), None),  # records against records
        ((8, 3), (2, 3), None),
        ((8, 3), (3, 3), None),
        ((7, 3), (2, 3, 1), None),
    ],
)
def test_the_layout_of_two_shapes(one, other, layout):
    assert layout_between(one, other) == layout


def test_a_layout_holds_for_its_own_sizes_only():
    table = RowTable()
    table.learn({"a": [(28, 3)]}, {"a": [(8, 3)]}, {})
    assert table.find("a", (20, 3), 5) == Layout(0, 4)
    assert table.find("a", (20, 3), 4) is None and table.find("a", (20, 3, 1), 5) is None
    assert table.find("b", (20, 3), 5) is None


def test_records_on_two_dimensions_are_refused():
    with pytest.raises(ContractError, match="different dimensions"):
        RowTable().learn({"a": [(7, 3), (3, 7)]}, {"a": [(2, 3), (3, 2)]}, {})
    with pytest.raises(ContractError, match="different dimensions"):
        RowTable().learn({"a": [(7, 3), (4, 3)]}, {"a": [(2, 3), (4, 3)]}, {})


class Each(nn.Module):
    """A layer that is called once for each record."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layer(row) for row in x])


class Pairs(nn.Module):
    """A layer on all pairs of records."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[:, None] * x[None]).sum(1)


@pytest.mark.parametrize(("model", "message"), [(Each, "7 times for 7 records and 2"), (Pairs, "one dimension must")])
def test_rows_that_are_nobodys_are_refused(model, message):
    with pytest.raises(ContractError, match=message):
        Run(model(), torch.randn(4, 3), 1.0)
