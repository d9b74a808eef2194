"""Checks shared by the tests of all models."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn


def _is_sound(model: nn.Module, x: Tensor) -> None:
    """Records independent bit for bit, finite gradients everywhere, round trips, export with symbolic batch."""
    out = model(x)
    other = x.clone()
    other[0] = 10 * torch.randn_like(x[0])
    out_other = model(other)
    assert torch.equal(out[1:], out_other[1:])
    assert not torch.equal(out[0], out_other[0])
    for inputs in (x, torch.zeros_like(x), torch.ones_like(x)):
        model.zero_grad()
        nn.functional.cross_entropy(model(inputs), torch.zeros(len(x), dtype=torch.long)).backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        if inputs is x:
            dead = [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.any()]
            assert not dead, f"no gradient reaches {dead}"
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=1024)},))
    bigger = torch.cat([x, x[:1]])
    torch.testing.assert_close(program.module()(bigger), model(bigger), atol=1e-4, rtol=1e-4)
    fresh = copy.deepcopy(model)
    for p in fresh.parameters():
        nn.init.constant_(p, 0.1)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(x), out)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def is_sound() -> Callable[[nn.Module, Tensor], None]:
    return _is_sound


@pytest.fixture
def count() -> Callable[[nn.Module], int]:
    return lambda model: sum(p.numel() for p in model.parameters())
