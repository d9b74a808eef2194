"""Ways of writing a model that people have: each trains and equals the oracle, or one line says what to do instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.stock.kit import RECORDS, Case, check, released
from tests.stock.models import floats, labels, text
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import weightclip as wc
from weightclip.factors import _recurrent, _swap


class Cells(nn.Module):
    """A recurrent cell in a loop over steps."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell, self.head = cell, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


class Tied(nn.Module):
    """The table of words is the head, by its weight and not by a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.body = nn.Embedding(40, 6), nn.Linear(6, 6)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.body(self.words(ids).mean(1))), self.words.weight)


class Again(nn.Module):
    """Activations are computed again in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.body, self.reentrant = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.body, self.first(x), use_reentrant=self.reentrant))


class Bags(nn.Module):
    """Bags of words, all in one line."""

    def __init__(self, offsets: bool) -> None:
        super().__init__()
        self.words, self.head, self.offsets = nn.EmbeddingBag(40, 6), nn.Linear(6, 3), offsets

    def forward(self, ids: Tensor) -> Tensor:
        if not self.offsets:
            return self.head(self.words(ids))
        return self.head(self.words(ids.flatten(), torch.arange(0, ids.numel(), ids.shape[1])))


def _normed(layer: nn.Module) -> nn.Module:
    return weight_norm(layer)


WORKS: dict[str, Callable[[], Case]] = {
    "LSTMCell": lambda: Case(Cells(nn.LSTMCell(5, 4)), floats(4, 5), labels()),
    "GRUCell": lambda: Case(Cells(nn.GRUCell(5, 4)), floats(4, 5), labels()),
    "RNNCell": lambda: Case(Cells(nn.RNNCell(5, 4, bias=False, nonlinearity="relu")), floats(4, 5), labels()),
    "RReLU": lambda: Case(
        nn.Sequential(nn.Linear(6, 8), nn.RReLU(0.2, 0.2), nn.Linear(8, 3)), floats(6), labels()
    ),  # one slope: the oracle draws other numbers
    "checkpoint": lambda: Case(Again(False), floats(6), labels()),
    "weight_norm": lambda: Case(
        nn.Sequential(_normed(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 3)), floats(6), labels()
    ),
    "weight_norm of a convolution": lambda: Case(
        nn.Sequential(_normed(nn.Conv1d(2, 4, 3)), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)), floats(2, 6), labels()
    ),
    "the weight of a table as a head": lambda: Case(Tied(), text()["input_ids"], labels(high=40)),
    "EmbeddingBag": lambda: Case(Bags(False), text()["input_ids"], labels()),
}


@pytest.mark.parametrize("name", WORKS)
def test_it_trains_and_is_the_oracle(name: str) -> None:
    torch.manual_seed(0)
    check(WORKS[name]())


def test_an_rrelu_that_draws_trains() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.RReLU(), nn.Linear(8, 3))
    found = released(Case(model, floats(6), labels()), 1.0)
    assert torch.isfinite(found).all() and 0 < float(found.norm()) <= RECORDS


def test_an_rrelu_beside_something_that_mixes_is_refused() -> None:
    class Mixes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0)

    model = nn.Sequential(nn.Linear(6, 8), nn.RReLU(), Mixes(), nn.Linear(8, 3))
    with pytest.raises(wc.ContractError, match="mixes records"):
        released(Case(model, floats(6), labels()), 1.0)


REFUSED = {
    "reentrant checkpointing": (lambda: Case(Again(True), floats(6), labels()), "use_reentrant=False"),
    "bags by offsets": (lambda: Case(Bags(True), text()["input_ids"], labels()), r"\(records, bag\)"),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's own advice
@pytest.mark.parametrize("name", REFUSED)
def test_one_line_says_what_to_do(name: str) -> None:
    make, line = REFUSED[name]
    with pytest.raises(wc.ContractError, match=line) as caught:
        released(make(), 1.0)
    assert "\n" not in str(caught.value)


# -- mistakes made on purpose ------------------------------------------------------------------------------------------


def _forgotten_state(gates: Tensor, hidden: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    i, _, g, o = (gates + hidden).chunk(4, 1)
    c = state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def test_mutants_die(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell without its forget gate; parameters past their layers that stay unnoticed; a norm that is not followed."""
    with monkeypatch.context() as patch:
        patch.setattr(_recurrent, "_lstm", _forgotten_state)
        with pytest.raises(AssertionError):
            test_it_trains_and_is_the_oracle("LSTMCell")
    with monkeypatch.context() as patch:
        patch.setattr(_swap, "is_parametrized", lambda module: False)
        with pytest.raises(wc.ContractError):
            test_it_trains_and_is_the_oracle("weight_norm")
