"""Every kind of layer traces as one graph and releases the eager gradient; what does not compile is refused.

Each kind runs once, settings taking turns, all of them with WEIGHTCLIP_FULL=1. The encoder of the speed benchmark is
traced by studies/tests/bench/test_step_large.py.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys
from pathlib import Path

import pytest
import torch
from tests.compile_kit import BOUNDS, KINDS, check, compiled, compiling, made_private, step
from tests.factors.zoo import ZOO, floats
from torch import Tensor, nn

import weightclip as wc

FULL = os.environ.get("WEIGHTCLIP_FULL") == "1"
SETTINGS = list(itertools.product(BOUNDS, (False, True)))
CASES = [(kind, *SETTINGS[(i + k) % 4]) for i, kind in enumerate(KINDS) for k in range(4 if FULL else 1)]
# models of the zoo where every record has a copy of some parameter: those need an uncompiled model
COPIED = set(ZOO) - {"windows", "products"}


@compiling
@pytest.mark.parametrize("kind,bounds,half", CASES)
def test_a_kind_of_layer_traces_as_one_graph(kind: str, bounds: str, half: bool, monkeypatch) -> None:
    make, records = KINDS[kind]
    check(make, records(), BOUNDS[bounds], half, monkeypatch)


def example_transformer() -> nn.Module:
    """The encoder of examples/transformer.py, tiny."""
    path = Path(__file__).parents[2] / "examples" / "transformer.py"
    sys.path.insert(0, str(path.parent))  # where the example finds its table
    spec = importlib.util.spec_from_file_location("transformer_example", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(path.parent))
    return module.Encoder(12, width=8, heads=2, depth=1, classes=3)


@compiling
@pytest.mark.parametrize("bounds,half", SETTINGS if FULL else [("joint cap", True)])
def test_a_transformer_traces_as_one_graph(bounds: str, half: bool, monkeypatch) -> None:
    tokens = torch.randint(0, 12, (8, 5), generator=torch.Generator().manual_seed(1))
    check(example_transformer, tokens, BOUNDS[bounds], half, monkeypatch)


class Attends(nn.Module):
    """nn.MultiheadAttention, whose projections are parts of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Cell(nn.Module):
    """A cell of torch in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 4)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return h


class Scan(nn.Module):
    """A recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(3, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


UNCOMPILED = {name: ZOO[name] for name in sorted(COPIED)} | {
    "attention of torch": (Attends, floats(5, 4)),
    "cell": (Cell, floats(4, 3)),
    "recurrent layer": (Scan, floats(4, 3)),
    "PReLU": (lambda: nn.Sequential(nn.Linear(3, 4), nn.PReLU()), floats(3)),
}


@compiling
@pytest.mark.parametrize("half", [False, True] if FULL else [False])
@pytest.mark.parametrize("name", list(UNCOMPILED) if FULL else list(UNCOMPILED)[::3])
def test_what_needs_an_uncompiled_model_is_refused_before_anything_is_released(name: str, half: bool) -> None:
    """Copies of a parameter for every record, and scans, are Python of the eager model: no wrong gradient gets out."""
    make, records = UNCOMPILED[name]
    run, bounds = made_private(make, records(), BOUNDS["joint cap"]), BOUNDS["joint cap"]
    before = run.weights()
    # torch itself refuses recurrent layers, and kernels that want one type under autocast
    refused = wc.ContractError, torch._dynamo.exc.Unsupported, RuntimeError
    with pytest.raises(refused):
        step(run, compiled(run), half)
    assert run.engine.steps == 0 and all(p.grad is None for p in run.model.parameters())
    assert all(torch.equal(value, before[key]) for key, value in run.weights().items())
    eager = made_private(make, records(), bounds)
    assert any(bool(g.any()) for g in step(eager, eager.model, half).values())


def test_every_model_of_the_zoo_is_traced_or_known_not_to_compile() -> None:
    """The zoo's "products" meets indices beyond its table on the test's large records: its two layers are kinds."""
    assert {"windows"} <= KINDS.keys() and {"bilinear", "bags"} <= KINDS.keys()
    assert set(ZOO) == COPIED | {"windows", "products"}


@compiling
def test_a_changed_gradient_is_told_apart(monkeypatch) -> None:
    """What the comparison would say of a compiled backward pass that hands over one per cent too much."""
    from weightclip.factors import _passes

    make, records = KINDS["dense over positions"]
    real = _passes._deliver

    def more(key: int, x: Tensor, d: Tensor, borrowed: bool, conf) -> None:
        real(key, x, 1.01 * d if borrowed else d, borrowed, conf)

    monkeypatch.setattr(_passes, "_deliver", more)
    with pytest.raises(AssertionError):
        check(make, records(), wc.Bounds(joint_cap=100.0), False, monkeypatch)
