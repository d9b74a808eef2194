"""The user's criterion becomes the right loss, or a refusal that names the way out."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from weightclip.errors import ContractError
from weightclip.losses import L1, BCEWithLogits, CrossEntropy, Huber, recognise

WEIGHTS = (0.2, 1.5, 0.7, 3.0)


NATIVE: list[tuple[nn.Module, tuple[int, ...], str]] = [
    (nn.CrossEntropyLoss(reduction="none", weight=torch.tensor(WEIGHTS), label_smoothing=0.1), (4,), "index"),
    (nn.CrossEntropyLoss(reduction="none"), (4,), "soft"),
    (nn.BCEWithLogitsLoss(reduction="none", pos_weight=torch.tensor([2.0, 3.0]), weight=torch.rand(2)), (2,), "unit"),
    (nn.MultiMarginLoss(reduction="none", margin=0.4, weight=torch.tensor(WEIGHTS)), (4,), "index"),
    (nn.HuberLoss(reduction="none", delta=0.3), (3,), "real"),
    (nn.SmoothL1Loss(reduction="none", beta=0.3), (3,), "real"),
    (nn.SmoothL1Loss(reduction="none", beta=0.0), (3,), "real"),
    (nn.L1Loss(reduction="none"), (3,), "real"),
]


@pytest.mark.parametrize("case", NATIVE, ids=lambda c: type(c[0]).__name__)
def test_recognised_losses_equal_torch(case: tuple[nn.Module, tuple[int, ...], str]) -> None:
    native, shape, kind = case
    gen = torch.Generator().manual_seed(11)
    z = 3 * torch.randn(20, *shape, generator=gen)
    y = torch.randint(shape[0], (20,), generator=gen)
    if kind != "index":
        y = torch.rand(20, *shape, generator=gen)
        y = y / y.sum(1, keepdim=True) if kind == "soft" else 3 * y if kind == "real" else y
    torch.testing.assert_close(recognise(native).values(z, y), native(z, y).reshape(20, -1).mean(1))


def test_recognise_functions_and_options() -> None:
    assert recognise(F.cross_entropy) == CrossEntropy()
    assert recognise(nn.CrossEntropyLoss(reduction="sum", ignore_index=0)) == CrossEntropy(ignore_index=0)
    assert recognise(partial(F.cross_entropy, label_smoothing=0.1)) == CrossEntropy(smoothing=0.1)
    assert recognise(F.huber_loss) == Huber(1.0)
    assert recognise(F.l1_loss) == L1()
    own = CrossEntropy(cap=0.1)
    assert recognise(own) is own
    assert hash(recognise(nn.BCEWithLogitsLoss(pos_weight=torch.tensor([2.0])))) == hash(
        BCEWithLogits(pos_weight=(2.0,))
    )


class MyCrossEntropy(nn.CrossEntropyLoss):
    pass


@pytest.mark.parametrize(
    ("criterion", "hint"),
    [
        (nn.NLLLoss(), "CrossEntropyLoss"),
        (F.nll_loss, "CrossEntropyLoss"),
        (nn.BCELoss(), "BCEWithLogitsLoss"),
        (nn.MSELoss(), "losses.MSE"),
        (F.mse_loss, "losses.MSE"),
        (nn.MultiMarginLoss(p=2), "p=1"),
        (nn.CrossEntropyLoss, "instance"),
        (MyCrossEntropy(), "PerRecordLoss"),
        (nn.KLDivLoss(), "PerRecordLoss"),
        (lambda z, y: z.sum(), "PerRecordLoss"),
        (partial(F.cross_entropy, **{"colour": "red"}), "colour"),
        (None, "PerRecordLoss"),
    ],
)
def test_refusals_name_the_way_out(criterion: object, hint: str) -> None:
    with pytest.raises(ContractError, match=hint) as error:
        recognise(criterion)
    assert "\n" not in str(error.value)
