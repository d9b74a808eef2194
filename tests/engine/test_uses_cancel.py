"""Uses of one layer that cancel: each is far larger than what is limited, and no sum of one of them may round."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weightclip as wc
from weightclip.factors import _collector, _dense, _joint

RECORDS, WIDTH = 128, 256


class Twice(nn.Module):
    """One layer on both halves of a record, added up."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2, bias=False)
        nn.init.zeros_(self.layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[:, 0]) + self.layer(x[:, 1])


def records(huge: float, nearly: float, extra: bool) -> TensorDataset:
    """Halves that cancel; one record brings a float32 sum of one use next to where it rounds the other way."""
    x = torch.zeros(RECORDS + 1 + extra, 2, WIDTH)
    x[:RECORDS, 0], x[:RECORDS, 1] = huge, -huge
    x[RECORDS, 0], x[RECORDS, 1] = nearly, -nearly
    if extra:
        x[-1, 0] = 0.04
    return TensorDataset(x, torch.zeros(len(x), dtype=torch.long))


def released(data: TensorDataset, physical: int | None) -> tuple[Tensor, float]:
    """The sum of one draw of all records, and the sensitivity that noise would be scaled for."""
    torch.manual_seed(0)
    model = Twice()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = wc.PrivacyEngine()
    _, _, loader, loss = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=RECORDS),
        criterion=nn.CrossEntropyLoss(), noise_multiplier=0.0, sample_rate=1.0, expected_batch_size=RECORDS + 1,
        max_physical_batch_size=physical,
    )  # fmt: skip
    for x, y in loader:
        loss(model(x), y).backward()
        optimizer.step()
        if model.layer.weight.grad is not None:
            break
    assert model.layer.weight.grad is not None
    return model.layer.weight.grad.double() * (RECORDS + 1), float(engine.training.sensitivity.values[0])


def moves_by_its_limit(physical: int | None = None) -> None:
    for huge, nearly in ((2.0**17, 1.48), (2.0**17, 0.98), (2.0**18, 2.96)):
        with_it, claimed = released(records(huge, nearly, True), physical)
        without, _ = released(records(huge, nearly, False), physical)
        assert float((with_it - without).norm()) <= claimed, (huge, nearly)


@pytest.mark.parametrize("physical", [None, 4096])
def test_uses_that_cancel_move_the_release_by_their_limit(physical: int | None) -> None:
    moves_by_its_limit(physical)


def test_sums_of_single_uses_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for room in (_joint, _dense):
        monkeypatch.setattr(room, "CANCELLED", 0.0)  # which makes such records small, and would do for these few
    moves_by_its_limit()
    monkeypatch.setattr(_collector, "Counter", lambda uses: dict.fromkeys(uses, 1))
    with pytest.raises(AssertionError):
        moves_by_its_limit()


def test_uses_that_all_but_vanish_count_as_a_part_of_their_own_norms() -> None:
    """So that no sum of one use over many records is so large that its rounding in float64 shows."""
    norms: list[Tensor] = []
    own = _joint._rank_one
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_joint, "_rank_one", lambda uses: norms.append(own(uses)) or norms[-1])
        released(records(2.0**17, 1.0, False), None)
    free = 2 * 2.0**17 * WIDTH**0.5 * 0.5**0.5  # both uses together
    assert float(norms[-1][0]) >= 2.0**-13 * free


def test_rows_of_one_record_are_one_product_where_products_are_added_in_groups() -> None:
    """Rows folded into the batch may cancel too: a group adds records, not rows."""
    seen: list[tuple[Tensor, Tensor, Tensor | None]] = []

    class Spy:
        def grouped(self, x, d, conf, m):
            return x.unflatten(0, (-1, m)), d.unflatten(0, (-1, m)), conf

        def sums(self, part, x, d, scales, conf, wide=False):
            seen.append((x, d, scales))
            return None, None

    class Part:
        _wc_form = Spy()
        weight = torch.zeros(3, 4)

        def __init__(self, group: int) -> None:
            self._wc_product = wc.Product(torch.float32, 1, group=group)

    x, d, scale = torch.randn(6, 5, 4), torch.randn(6, 5, 3), torch.rand(3)
    for group, shape in ((16, (3, 2, 5, 4)), (0, (6, 5, 4))):
        _collector.Use(None, Part(group), x, d, (), 2).scaled(scale)
        rows, _, scales = seen.pop()
        assert rows.shape == shape and scales is not None and len(scales) == shape[0]
