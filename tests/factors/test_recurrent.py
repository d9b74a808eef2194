"""LSTM, GRU and RNN: native outputs, exact per-record gradients."""

from __future__ import annotations

import pytest
import torch
from tests.oracle import Run, check, check_each, hostile, moves
from torch import Tensor, nn

from weightclip.errors import ContractError


class Net(nn.Module):
    """A recurrent layer whose outputs and last states all count; optionally with a learned first state."""

    def __init__(self, layer: nn.RNNBase, learned: bool = False) -> None:
        super().__init__()
        self.layer = layer
        size = (layer.num_layers * (2 if layer.bidirectional else 1), 1, layer.hidden_size)
        self.start = nn.Parameter(torch.randn(size)) if learned else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.layer.batch_first else x.transpose(0, 1)
        records = x.shape[0 if self.layer.batch_first else 1]
        start = [] if self.start is None else [self.start.expand(-1, records, -1).contiguous()]
        y, state = self.layer(x, *start)
        y = y if self.layer.batch_first else y.transpose(0, 1)
        parts = state if isinstance(state, tuple) else (state,)
        return torch.cat([y.flatten(1), *(h.transpose(0, 1).flatten(1) for h in parts)], 1)


CASES = {
    **{f"{kind.__name__} {how}": (kind, options) for kind in (nn.LSTM, nn.GRU, nn.RNN) for how, options in (
        ("plain", {"batch_first": True}), ("deep", {"num_layers": 2, "bidirectional": True}))},
    "projected": (nn.LSTM, {"num_layers": 2, "proj_size": 2, "bidirectional": True}),
    "without biases": (nn.LSTM, {"bias": False, "batch_first": True}),
    "rectified": (nn.RNN, {"nonlinearity": "relu"}),
}  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections")


def made(name: str) -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    kind, options = CASES[name]
    return Net(kind(4, 3, **options)), torch.randn(8, 5, 4)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_exact(name):
    net, x = made(name)
    check(net, x)


@pytest.mark.parametrize("name", ["LSTM deep", "GRU plain"])
def test_caps_of_layers_and_hostile_records(name):
    net, x = made(name)
    check_each(net, x)
    assert 0.27 <= moves(Run(net, x, 0.3), hostile(x)) <= 0.3 * (1 + 1e-4)


def test_a_learned_first_state():
    torch.manual_seed(0)
    check(Net(nn.GRU(4, 3, 2, bidirectional=True), learned=True), torch.randn(8, 5, 4))


def test_dropout_between_layers():
    torch.manual_seed(0)
    net, x = Net(nn.LSTM(4, 3, 2, dropout=0.5, batch_first=True)), torch.randn(8, 5, 4)
    run = Run(net, x, 1.0)
    run.model.train()
    assert not torch.equal(run.model(x), run.model(x))
    run.model.eval()
    torch.testing.assert_close(run.model(x), net.eval()(x))


def test_packed_sequences_are_refused_with_a_fix():
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.GRU(4, 3, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            lengths = torch.full((len(x),), x.shape[1])
            return self.layer(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))[1][0]

    with pytest.raises(ContractError, match="PackedSequence.*pad"):
        Run(Packed(), torch.randn(4, 5, 4), 1.0)


def test_without_an_engine_the_layer_is_native():
    net, x = made("LSTM plain")
    run = Run(net, x, 1.0)
    with torch.no_grad():
        assert torch.equal(run.model(x), net(x))
