"""nn.MultiheadAttention and what torch builds from it: native outputs, exact per-record gradients."""

from __future__ import annotations

import pytest
import torch
from tests.oracle import Run, check, check_each, hostile, moves
from torch import Tensor, nn


class Net(nn.Module):
    """Attention of a sequence to itself or to another one, with masks, weights in the output."""

    def __init__(
        self, cross: bool = False, causal: bool = False, padded: bool = False, shown: bool = True, heads: bool = False,
        **options,
    ) -> None:  # fmt: skip
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, **options)
        self.other = nn.Linear(4, options.get("kdim", 4)) if cross else None
        self.causal, self.padded, self.shown, self.heads = causal, padded, shown, heads

    def forward(self, x: Tensor) -> Tensor:
        other = x if self.other is None else self.other(x[:, :3])
        mask = torch.ones(x.shape[1], other.shape[1], dtype=torch.bool).triu(1) if self.causal else None
        if mask is not None and self.heads:  # one for each record and head
            mask = mask.float().expand(2 * len(x), -1, -1)
        padding = (other[..., 0] > 0.5).index_fill(1, torch.tensor([0]), False) if self.padded else None
        turn = (lambda t: t) if self.attention.batch_first else (lambda t: t.transpose(0, 1))
        q, k = turn(x), turn(other)
        y, weights = self.attention(q, k, k, padding, self.shown, mask, average_attn_weights=not self.heads)
        return turn(y).flatten(1) if weights is None else torch.cat([turn(y).flatten(1), weights.flatten(1)], 1)


CASES = {
    "self": {"batch_first": True},
    "records on dimension 1": {},
    "masks": {"batch_first": True, "causal": True, "padded": True},
    "masks by head": {"batch_first": True, "causal": True, "heads": True},
    "cross": {"cross": True},
    "other sizes": {"cross": True, "kdim": 6, "vdim": 6, "batch_first": True, "padded": True},
    "extra keys": {"add_bias_kv": True, "add_zero_attn": True, "causal": True, "padded": True},
    "fused": {"shown": False, "batch_first": True, "causal": True},
    "fused, extra keys": {"cross": True, "add_bias_kv": True, "shown": False},
    "without biases": {"bias": False},
}


class Both(nn.Module):
    """Encoder and decoder, records on dimension 1."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Transformer(4, 2, 1, 1, 8, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(3)
        return self.model(x.transpose(0, 1), x[:, :3].transpose(0, 1), tgt_mask=mask).transpose(0, 1)


BUILT = {
    "encoder layer": lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), 2),
    "transformer": Both,
}
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor")


def shaken(model: nn.Module) -> nn.Module:
    """Biases of zero would hide mistakes."""
    for p in model.parameters():
        if p.dim() == 1:
            nn.init.normal_(p, std=0.5)
    return model


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_exact(name):
    torch.manual_seed(0)
    check(shaken(Net(**CASES[name])), torch.randn(8, 5, 4))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", BUILT)
def test_layers_built_from_it(name, training):
    torch.manual_seed(0)
    model = shaken(BUILT[name]()).train(training)  # without gradients eval() takes a fused kernel
    check(model, torch.randn(8, 5, 4))


@pytest.mark.parametrize("name", ["cross", "extra keys"])
def test_caps_of_layers_and_hostile_records(name):
    torch.manual_seed(0)
    net, x = shaken(Net(**CASES[name])), torch.randn(8, 5, 4)
    check_each(net, x)
    assert 0.27 <= moves(Run(net, x, 0.3), hostile(x)) <= 0.3 * (1 + 1e-4)
