"""Checks shared by the tests of all layers."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn


def _gain(layer: Callable[[Tensor], Tensor], record: Tensor, p: float = 2) -> float:
    """Exact operator norm of the Jacobian at one float64 record (without its record dimension)."""
    jacobian = torch.autograd.functional.jacobian(lambda v: layer(v.unsqueeze(0)).squeeze(0), record)
    matrix = jacobian.reshape(-1, record.numel())  # type: ignore[union-attr]
    return torch.linalg.matrix_norm(matrix, ord=p).item()


def _records_independent(layer: nn.Module, x: Tensor) -> None:
    """Perturbing record 0 (also wildly) leaves every other record's output and gradient the same, bit for bit."""
    reference = x.clone().requires_grad_()
    out = layer(reference)
    cotangent = torch.randn_like(out)
    (grad,) = torch.autograd.grad(out, reference, cotangent)
    for replacement in (torch.zeros_like(x[0]), 1e3 * torch.randn_like(x[0])):
        other = x.clone()
        other[0] = replacement
        other.requires_grad_()
        out_other = layer(other)
        (grad_other,) = torch.autograd.grad(out_other, other, cotangent)
        assert torch.equal(out[1:], out_other[1:])
        assert torch.equal(grad[1:], grad_other[1:])
    assert not torch.equal(out[0], out_other[0])  # the check can fail


def _finite_at_degenerate(layer: nn.Module, shape: tuple[int, ...]) -> None:
    """Finite output and gradients for zero, constant and tiny records."""
    for x in (torch.zeros(2, *shape), torch.full((2, *shape), 3.0), 1e-30 * torch.randn(2, *shape)):
        x.requires_grad_()
        out = layer(x)
        assert out.isfinite().all()
        out.sum().backward()
        assert x.grad is not None and x.grad.isfinite().all()
        assert all(q.grad is None or q.grad.isfinite().all() for q in layer.parameters())


def _plain_module(layer: nn.Module, x: Tensor) -> None:
    """Exports with a symbolic number of records; deepcopy and state_dict round trips; a call with no record at all."""
    layer.eval()
    out = layer(x)
    batch = torch.export.Dim("batch", min=1, max=1024)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: batch},))
    bigger = torch.cat([x, x, x[:1]])
    torch.testing.assert_close(program.module()(bigger), layer(bigger))
    assert torch.equal(copy.deepcopy(layer)(x), out)
    fresh = copy.deepcopy(layer)
    for q in fresh.parameters():
        nn.init.constant_(q, 0.123)
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh(x), out)
    assert layer(x[:0]).shape == (0, *out.shape[1:])


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def gain() -> Callable[..., float]:
    return _gain


@pytest.fixture
def records_independent() -> Callable[[nn.Module, Tensor], None]:
    return _records_independent


@pytest.fixture
def finite_at_degenerate() -> Callable[[nn.Module, tuple[int, ...]], None]:
    return _finite_at_degenerate


@pytest.fixture
def plain_module() -> Callable[[nn.Module, Tensor], None]:
    return _plain_module
