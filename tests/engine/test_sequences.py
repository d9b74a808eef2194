"""Sequences under caps: a record is a whole sequence, of any length, whatever idiom its loss is written in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine.test_open_models import CAP, LARGE, close, oracle
from tests.engine_kit import private
from torch import Tensor, nn

import weightclip as wc


class Language(nn.Module):
    """(records, T) tokens to (records, T, 5) next-token scores, whatever T is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.mix, self.head = nn.Embedding(5, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.table(ids)
        return self.head(torch.tanh(self.mix(h.cumsum(1))))


def sentences(n: int = 8, length: int = 6) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 5, (n, length), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, 3:] = -100
    labels[1] = -100
    return ids, labels


def next_token(z: Tensor, y: Tensor) -> Tensor:
    """The mean over all positions of one sequence, those without a label included."""
    return F.cross_entropy(z[:, :-1].transpose(1, 2), y[:, 1:], reduction="none").mean(1).sum()


def shifted(criterion: Any, z: Tensor, y: Tensor) -> Tensor:
    z, y = z[..., :-1, :].contiguous(), y[..., 1:].contiguous()
    return criterion(z.view(-1, z.shape[-1]), y.view(-1))


IDIOMS: dict[str, tuple[Any, Callable[[Any, Tensor, Tensor], Tensor]]] = {
    "shift, contiguous and view": (nn.CrossEntropyLoss(), shifted),
    "the same in double precision": (nn.CrossEntropyLoss(), lambda c, z, y: shifted(c, z.double(), y)),
    "CausalLM": (wc.losses.CausalLM(), lambda c, z, y: c(z, y)),
    "classes on dimension 1": (nn.CrossEntropyLoss(), lambda c, z, y: c(z[:, :-1].transpose(1, 2), y[:, 1:])),
}


@pytest.mark.parametrize("idiom", IDIOMS)
@pytest.mark.parametrize("pieces", [None, 3])
def test_a_record_of_a_language_model_is_a_sequence(idiom: str, pieces: int | None) -> None:
    criterion, act = IDIOMS[idiom]
    ids, labels = sentences()
    expected, _ = oracle(Language(), ids, labels, next_token, LARGE)
    run = private(Language(), (ids, labels), bounds=wc.Bounds(max_grad_norm=LARGE), criterion=criterion,
                  max_physical_batch_size=pieces)  # fmt: skip
    for x, y in run.loader:
        act(run.criterion, run.model(x), y).backward()
        run.optimizer.step()
    close(run, expected)


def test_every_position_in_one_view() -> None:
    ids, labels = sentences()
    run = private(Language(), (ids, labels), bounds=wc.Bounds(max_grad_norm=LARGE))
    loss = lambda z, y: F.cross_entropy(z.transpose(1, 2), y, reduction="none").mean(1).sum()  # noqa: E731
    expected, _ = oracle(Language(), ids, labels, loss, LARGE)
    for x, y in run.loader:
        run.criterion(run.model(x).view(-1, 5), y.view(-1)).backward()
        run.optimizer.step()
    close(run, expected)


def turned(z: Tensor) -> Tensor:
    return z.transpose(0, 1).contiguous().view(-1, 5)


def repeated(z: Tensor) -> Tensor:
    return z.as_strided(z.shape, (30, 0, 1)).contiguous().view(-1, 5)


def scaled(z: Tensor) -> Tensor:
    return (2 * z).view(-1, 5)


@pytest.mark.parametrize("act", [turned, repeated, scaled])
def test_copies_that_mix_or_change_records_are_refused(act) -> None:
    ids, labels = sentences()
    run = private(Language(), (ids, labels), bounds=wc.Bounds())
    for x, y in run.loader:
        with pytest.raises(wc.ContractError):
            run.criterion(act(run.model(x)), y.reshape(-1))


def test_lengths_may_vary_and_each_is_tested_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from weightclip.engine import _install

    seen: list[Any] = []
    real = _install.check_independence

    def counting(probe, call, *rest):
        seen.append(tuple(call.tensors[0].shape[1:]))
        return real(probe, call, *rest)

    monkeypatch.setattr(_install, "check_independence", counting)
    ids, labels = sentences()
    run = private(Language(), (ids, labels), bounds=wc.Bounds(max_grad_norm=CAP), criterion=wc.losses.CausalLM())
    for length in (6, 4, 5, 4, 6):
        for x, y in run.loader:
            run.criterion(run.model(x[:, :length]), y[:, :length]).backward()
            run.optimizer.step()
    assert seen == [(6,), (4,), (5,)]
    assert run.engine.steps == 5


class Sly(Language):
    """Mixes records of one length only."""

    def forward(self, ids: Tensor) -> Tensor:
        z = super().forward(ids)
        return z - z.mean(0, keepdim=True) if ids.shape[1] == 4 else z


def test_a_length_at_which_records_mix_is_refused_when_it_comes() -> None:
    ids, labels = sentences()
    run = private(Sly(), (ids, labels), bounds=wc.Bounds(), criterion=wc.losses.CausalLM(), sigma=1.0)
    for x, y in run.loader:
        with pytest.raises(wc.ContractError, match="mixes records"):
            run.criterion(run.model(x[:, :4]), y[:, :4])
    assert run.engine.steps == 0
    run.train()
    assert run.engine.steps == 1


def test_longer_records_get_more_room_for_rounding_and_no_other_limit() -> None:
    ids, labels = sentences(length=40)
    run = private(Language(), (ids, labels), bounds=wc.Bounds(max_grad_norm=CAP), criterion=wc.losses.CausalLM(),
                  example=torch.zeros(1, 4, dtype=torch.long), sigma=1.0)  # fmt: skip
    before = run.engine.certificate().sensitivities
    run.train()
    after = run.engine.certificate().sensitivities
    assert all(after[k] > before[k] >= CAP for k in before)
    assert all(after[k] == pytest.approx(CAP, rel=1e-2) for k in before)
