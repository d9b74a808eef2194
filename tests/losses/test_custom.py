"""A user's own function: mixing records is refused, the declared bound is enforced."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from weightclip.errors import ContractError, WeightclipError
from weightclip.losses import PerRecordLoss


def per_record_ce(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, reduction="none")


@pytest.mark.parametrize(
    "fn",
    [
        lambda z, y: per_record_ce(z - z.mean(0), y),
        lambda z, y: per_record_ce(z, y) / len(z),
        lambda z, y: per_record_ce(z, y.flip(0)),
        lambda z, y: per_record_ce(z, y).cumsum(0),
        lambda z, y: per_record_ce(z, y) + ((z - z.detach()) * z.detach().roll(1, 0)).sum(1),  # in the gradient only
    ],
)
def test_functions_that_mix_records_are_refused(fn: object) -> None:
    z, y = torch.randn(4, 3), torch.zeros(4, dtype=torch.long)
    with pytest.raises(ContractError, match="mixes records"):
        PerRecordLoss(fn, bound=1.0).gradient(z, y)  # type: ignore[arg-type]
    with pytest.raises(ContractError, match="mixes records"):
        PerRecordLoss(fn, bound=1.0, example=(z, torch.tensor([0, 1, 2, 0])))  # type: ignore[arg-type]


def test_per_record_loss_contract() -> None:
    z, y = torch.randn(4, 3), torch.zeros(4, dtype=torch.long)
    before = torch.get_rng_state()
    loss = copy.deepcopy(PerRecordLoss(lambda z, y: per_record_ce(z, y["label"]), bound=1.0))
    g = loss.gradient(z, {"label": y})  # type: ignore[arg-type]
    assert torch.linalg.vector_norm(g, dim=1).max() <= 1
    assert torch.equal(before, torch.get_rng_state())
    for wrong, hint in (
        (lambda z, y: F.cross_entropy(z, y), "one value per record"),
        (lambda z, y: torch.ones(len(z)), "differentiably"),
    ):
        with pytest.raises(ContractError, match=hint):
            PerRecordLoss(wrong, bound=1.0).gradient(z, y)
    with pytest.raises(WeightclipError, match="bound"):
        PerRecordLoss(per_record_ce, bound=0.0)
