"""Poisson draws have many sizes: a compiled model is compiled for the first, for any other, and never again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch._dynamo.testing
from tests.compile_kit import compiled, compiling
from tests.engine_kit import Data, cnn, mlp, pictures, private, table
from torch import Tensor, nn

import weightclip as wc


class Words(nn.Module):
    """A token model: embedding, norm, a dense layer over positions, the mean."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.norm, self.head = nn.Embedding(5, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.words(ids)))).mean(1)


def sentences(n: int) -> Data:
    g = torch.Generator().manual_seed(0)
    return torch.randint(0, 5, (n, 4), generator=g), torch.randint(0, 3, (n,), generator=g)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Data], wc.Bounds]] = {
    "cnn": (cnn, pictures, wc.Bounds(layer_radius=1.0, cotangent_radius=0.5)),
    "tokens": (Words, sentences, wc.Bounds(layer_cap=0.3)),
    "joint cap": (cnn, pictures, wc.Bounds(joint_cap=0.3)),
    "weights": (mlp, table, wc.Bounds(input_radius=1.0)),
}


def train(kind: str, fused: bool, marked: bool) -> tuple[list[int], list[int]]:
    """Sizes of the draws of one pass, and how many graphs were compiled when each was done."""
    make, draw, bounds = MODELS[kind]
    run = private(make(), draw(160), bounds=bounds, batch=9)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    forward, sizes, graphs = compiled(run, counter), [], []
    step = run.engine.fused_step(forward) if fused else None
    for x, y in run.loader:
        if marked:
            torch._dynamo.mark_dynamic(x, 0)
        if step is None:
            run.optimizer.zero_grad()
            run.criterion(forward(x), y).backward()
            run.optimizer.step()
        else:
            step(x, y)
        sizes.append(len(x))
        graphs.append(counter.frame_count)
    assert run.engine.steps == len(sizes) and len(set(sizes)) >= 6, "the draws have too few sizes to show anything"
    return sizes, graphs


@compiling
@pytest.mark.parametrize("fused", [False, True], ids=["loop", "fused step"])
@pytest.mark.parametrize("kind", MODELS)
def test_no_size_is_compiled_after_the_second(kind: str, fused: bool) -> None:
    sizes, graphs = train(kind, fused, marked=False)
    second = next(i for i, size in enumerate(sizes) if size != sizes[0])
    assert graphs[second - 1] == graphs[0] < graphs[second] == graphs[-1]


@compiling
@pytest.mark.parametrize("kind", MODELS)
def test_a_marked_dimension_is_compiled_once(kind: str) -> None:
    _, graphs = train(kind, False, marked=True)
    assert graphs[0] == graphs[-1] > 0


@compiling
def test_the_count_sees_a_model_whose_graph_holds_its_size() -> None:
    """Without dynamic shapes every size is another graph: what the tests above would show of such a model."""
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False, recompile_limit=64):
        sizes, graphs = train("weights", False, marked=False)
    assert graphs[-1] == len(set(sizes))
