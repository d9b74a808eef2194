"""How rules are tried: the bound of a small function's graph against its exact Jacobian at many points."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weightclip.bounds import Numerics, plus, times
from weightclip.certificate._graph import Graph, trace

EXPONENTS = (1, 2, math.inf)


class Function(nn.Module):
    """A function as a module, so that it can be traced; tensors become buffers, modules submodules."""

    def __init__(self, function: Callable[..., Tensor], **members: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in members.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        """The function, with this module as its first argument where it takes two."""
        return self.function(self, x) if self.function.__code__.co_argcount > 1 else self.function(x)


@dataclass
class Tried:
    """Largest ratio of exact quantity to bound, per exponent, and of the output's norm to its bound."""

    gain: dict[float, float]
    output: float


def gain_of(graph: Graph, p: float) -> float:
    """Certified gain of the whole graph, input to output, in the p-norm."""
    bound: list[Any] = [0.0] * len(graph.nodes)
    bound[graph.output] = 1.0
    for i in reversed(range(len(graph.nodes))):
        node = graph.nodes[i]
        if node.rule is not None:
            gains = node.rule(node.op, p).gains
        elif node.layer is not None:
            assert node.op.module is not None
            gains = (node.layer.gain(node.op.module, node.op, p, Numerics(torch.float64)),)
        else:
            continue
        for edge, gain in zip(node.edges, gains, strict=True):
            bound[edge] = plus(bound[edge], times(bound[i], gain))
    return float(bound[0])


def output_of(graph: Graph, x: float) -> float:
    """Certified l2 bound of the graph's output for inputs of l2 norm at most x."""
    outputs: list[Any] = []
    for node in graph.nodes:
        inputs = [outputs[e] for e in node.edges]
        if node.rule is not None:
            outputs.append(node.rule(node.op, 2.0).output(inputs))
        elif node.layer is not None:
            assert node.op.module is not None
            gain = node.layer.gain(node.op.module, node.op, 2, Numerics(torch.float64))
            outputs.append(node.layer.output(node.op.module, node.op, gain, inputs[0]))
        else:
            outputs.append(x)
    return float(outputs[graph.output])


def induced_norm(jacobian: Tensor, p: float) -> float:
    """Induced p-norm of a matrix."""
    if p == 2:
        return float(torch.linalg.matrix_norm(jacobian, 2))
    return float(jacobian.abs().sum(0 if p == 1 else 1).max())


def points(shape: Sequence[int], generator: torch.Generator) -> list[Tensor]:
    """Zero, constants (ties), kinks, and random points of many sizes."""
    found = [torch.zeros(shape, dtype=torch.float64), torch.full(tuple(shape), 0.7, dtype=torch.float64)]
    found.append(torch.randint(-3, 4, tuple(shape), generator=generator).double())
    for size in (1e-4, 0.3, 1.0, 3.0, 30.0):
        found.append(size * torch.randn(tuple(shape), generator=generator, dtype=torch.float64))
    spike = torch.zeros(math.prod(shape), dtype=torch.float64)
    spike[math.prod(shape) // 2] = 5.0
    found.append(spike.view(tuple(shape)))
    return found


def attempt(module: nn.Module, shape: Sequence[int], seed: int = 0, exponents: Sequence[float] = EXPONENTS) -> Tried:
    """Trace, bound, and look for a point where a bound is exceeded. Also: records do not see each other."""
    module = module.double()
    generator = torch.Generator().manual_seed(seed)
    graph = trace(module, torch.zeros(2, *shape, dtype=torch.float64))
    gains = {p: gain_of(graph, p) for p in exponents}
    worst = {p: 0.0 for p in exponents}
    most = 0.0
    trials = points(shape, generator)
    with torch.no_grad():
        together = module(torch.stack(trials))
        alone = torch.cat([module(x.unsqueeze(0)) for x in trials])
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-9)
    for x, y in zip(trials, together, strict=True):
        jacobian = torch.autograd.functional.jacobian(lambda v: module(v.unsqueeze(0)).flatten(), x)
        jacobian = jacobian.reshape(-1, x.numel())
        for p in exponents:
            if math.isfinite(gains[p]):
                exact = induced_norm(jacobian, p)
                assert exact <= gains[p] * (1 + 1e-9) + 1e-12, f"p = {p}: {exact} > {gains[p]}"
                worst[p] = max(worst[p], exact / gains[p] if gains[p] else 0.0)
        bound = output_of(graph, float(x.norm()))
        assert float(y.norm()) <= bound * (1 + 1e-9) + 1e-12, f"output {float(y.norm())} > {bound}"
        most = max(most, float(y.norm()) / bound if bound and math.isfinite(bound) else 0.0)
    return Tried(worst, most)


@pytest.fixture
def tried() -> Callable[..., Tried]:
    """Try a function or module: ``tried(f, shape, **members)``."""

    def run(
        target: Any, shape: Sequence[int], *, seed: int = 0, exponents: Sequence[float] = EXPONENTS, **members: Any
    ):
        module = target if isinstance(target, nn.Module) else Function(target, **members)
        return attempt(module, shape, seed, exponents)

    return run


@pytest.fixture
def traced() -> Callable[..., Graph]:
    """The graph of a function or module on inputs of a shape."""

    def run(target: Any, shape: Sequence[int], dtype: torch.dtype = torch.float32, **members: Any) -> Graph:
        module = target if isinstance(target, nn.Module) else Function(target, **members)
        return trace(module, torch.zeros(2, *shape, dtype=dtype))

    return run
