"""Of the private loss, gradient and reduction can be traced; admission and collecting are the engine's own Python."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from tests.compile_kit import compiling
from tests.engine_kit import mlp, private, table
from torch import Tensor, nn

import weightclip as wc
from weightclip.losses import CrossEntropy

BOUNDS = wc.Bounds(joint_cap=1.0)
numbers = lambda: torch.rand(8, 3, generator=torch.Generator().manual_seed(2))  # noqa: E731
labels = lambda: table(8)[1]  # noqa: E731


def quartic(z: Tensor, y: Tensor) -> Tensor:
    """A loss of the user's own."""
    return (z - y).pow(4).sum(1)


LOSSES: dict[str, tuple[Any, Any]] = {
    "cross-entropy": (nn.CrossEntropyLoss(), labels),
    "smoothed": (nn.CrossEntropyLoss(label_smoothing=0.1), labels),
    "weighted": (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5])), labels),
    "ignored labels": (nn.CrossEntropyLoss(ignore_index=1), labels),
    "capped": (wc.losses.CrossEntropy(cap=0.3), labels),
    "binary": (nn.BCEWithLogitsLoss(), lambda: numbers().round()),
    "absolute": (nn.L1Loss(), numbers),
    "Huber": (nn.HuberLoss(), numbers),
    "square": (nn.MSELoss(), numbers),
    "own function": (quartic, numbers),
}
DIFFERENTIATED = {"square", "own function"}  # gradients by torch.autograd.grad, which torch traces on request


@compiling
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a .functools.lru_cache:UserWarning")  # of constants
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_gradient_and_reduction_trace_as_one_graph(name: str, half: bool, monkeypatch) -> None:
    loss, target = LOSSES[name]
    criterion = private(mlp(), (table(8)[0], target()), criterion=loss, bounds=BOUNDS).criterion
    z, y = 3 * table(8, seed=5, features=3)[0], target()
    z = z.bfloat16() if half else z
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    traced = torch.compile(criterion.graded, backend=counter, fullgraph=True)
    asked: Any = contextlib.nullcontext()
    if name in DIFFERENTIATED:
        if not hasattr(torch._dynamo.config, "trace_autograd_ops"):
            pytest.skip("this torch traces no torch.autograd.grad")
        asked = torch._dynamo.config.patch(trace_autograd_ops=True)
    for mask in (None, torch.arange(8) < 6):
        value, (gradient,) = criterion.graded(z, y, mask)
        with monkeypatch.context() as as_elsewhere, asked:
            # looks at the labels for a shorter way to the same bits, on the CPU and without a compiler
            as_elsewhere.setattr(CrossEntropy, "_all_usual", lambda *_: False)
            found, (other,) = traced(z, y, mask)
        torch.testing.assert_close(found, value)
        torch.testing.assert_close(other, gradient)
        assert bool(gradient.any()) and (mask is None or not other[6:].any())
    assert counter.frame_count > 0


@compiling
def test_a_compiled_loss_function_releases_what_the_eager_one_does() -> None:
    """Model and private loss in one compiled function: the model is a graph, the loss beside it runs as it is."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    run, eager = (private(mlp(), table(8), bounds=BOUNDS) for _ in range(2))
    whole = torch.compile(lambda x, y: run.criterion(run.model(x), y), backend=counter)
    for x, y in run.loader:
        whole(x, y).backward()
        run.optimizer.step()
    eager.train()
    assert counter.frame_count > 0 and run.engine.steps == 1
    for name, value in eager.grads().items():
        torch.testing.assert_close(run.grads()[name], value, rtol=1e-5, atol=1e-7)


@compiling
def test_fullgraph_around_the_private_loss_says_what_is_not_traced() -> None:
    torch._dynamo.reset()
    run = private(mlp(), table(8), bounds=BOUNDS)
    whole = torch.compile(lambda x, y: run.criterion(run.model(x), y), backend="aot_eager", fullgraph=True)
    x, y = next(iter(run.loader))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="PrivateCriterion._private"):
        whole(x, y)
    assert run.engine.steps == 0 and all(p.grad is None for p in run.model.parameters())
