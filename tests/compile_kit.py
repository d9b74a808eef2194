"""Tools of the tests under torch.compile: models of one kind of layer, and releases of a compiled and an eager step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from tests.engine_kit import Run, private
from tests.factors.zoo import Windows, floats, tokens
from torch import Tensor, nn

import weightclip as wc
from weightclip.factors import _passes

# warnings of torch about its own tracing
QUIET = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


class Pair(nn.Module):
    """nn.Bilinear over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Bilinear(4, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.pair(x, x[..., :3])


class Twice(nn.Module):
    """One layer, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


class Branches(nn.Module):
    """A residual sum, and two heads of one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.a, self.b = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = h + torch.relu(self.inner(h))
        return torch.cat([self.a(h), self.b(h)], 1)


def chain(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A model of these layers, made anew at each call."""
    return lambda: nn.Sequential(*(layer() for layer in layers))


# every kind of layer that has a private form of its own, wherever the zoo of tests/factors uses it, and more settings
KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "dense": (chain(lambda: nn.Linear(3, 4), nn.Tanh, lambda: nn.Linear(4, 2, bias=False)), floats(3)),
    "dense over positions": (chain(lambda: nn.Linear(3, 4), nn.Tanh, lambda: nn.Linear(4, 2)), floats(5, 3)),
    "convolution of one axis": (chain(lambda: nn.Conv1d(2, 3, 3, stride=2, padding=1)), floats(2, 7)),
    "convolution": (chain(lambda: nn.Conv2d(2, 4, 3, padding="same", groups=2), nn.ReLU,
                          lambda: nn.Conv2d(4, 3, 3, dilation=2)), floats(2, 7, 7)),
    "reflecting convolution": (chain(lambda: nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect")), floats(2, 5, 5)),
    "pointwise convolution": (chain(lambda: nn.Conv2d(2, 4, 1), nn.ReLU, lambda: nn.Conv2d(4, 3, 1, stride=2)),
                              floats(2, 5, 5)),
    "convolution of three axes": (chain(lambda: nn.Conv3d(2, 3, 2)), floats(2, 4, 4, 4)),
    "transposed convolution of one axis": (chain(lambda: nn.ConvTranspose1d(2, 3, 3, 2)), floats(2, 5)),
    "transposed convolution": (chain(lambda: nn.ConvTranspose2d(2, 3, 3, 2, output_padding=1)), floats(2, 5, 5)),
    "transposed convolution of three axes": (chain(lambda: nn.ConvTranspose3d(2, 3, 2)), floats(2, 3, 3, 3)),
    "standardized convolution": (chain(lambda: wc.nn.StandardizedConv2d(2, 3, 3)), floats(2, 5, 5)),
    "embedding": (chain(lambda: nn.Embedding(11, 4, padding_idx=0), lambda: nn.Linear(4, 2)), tokens(11, 6)),
    "bags": (chain(lambda: nn.EmbeddingBag(7, 3, mode="sum")), tokens(7, 5)),
    "means of bags": (chain(lambda: nn.EmbeddingBag(7, 3, mode="mean", padding_idx=2)), tokens(7, 5)),
    "maxima of bags": (chain(lambda: nn.EmbeddingBag(7, 3, mode="max")), tokens(7, 5)),
    "group norm": (chain(lambda: nn.Conv2d(2, 4, 1), lambda: nn.GroupNorm(2, 4)), floats(2, 5, 5)),
    "instance norm": (chain(lambda: nn.InstanceNorm2d(2, affine=True)), floats(2, 5, 5)),
    "layer norm": (chain(lambda: nn.LayerNorm(4), nn.Tanh, lambda: nn.LayerNorm((5, 4))), floats(5, 4)),
    "RMS norm": (chain(lambda: nn.RMSNorm(4)), floats(5, 4)),
    "safe norm": (chain(lambda: nn.Conv2d(2, 4, 1), lambda: wc.nn.SafeGroupNorm(2, 4)), floats(2, 5, 5)),
    "bilinear": (Pair, floats(5, 4)),
    "one layer twice": (Twice, floats(4)),
    "branches": (Branches, floats(4)),
    "windows": (Windows, floats(1, 8, 8)),
}  # fmt: skip

BOUNDS = {"joint cap": wc.Bounds(joint_cap=0.3), "radii": wc.Bounds(layer_radius=1.0, cotangent_radius=0.2)}


def compiling(test: Any) -> Any:
    """Torch's own warnings are no errors in this test."""
    for mark in QUIET:
        test = mark(test)
    return test


def compiled(run: Run, backend: Any = "aot_eager") -> Any:
    """The run's model as one graph, nothing being left of what was compiled before."""
    torch._dynamo.reset()
    return torch.compile(run.model, backend=backend, fullgraph=True)


def per_record(z: Tensor, y: Tensor) -> Tensor:
    """A loss with one value for each record, for outputs of any shape."""
    return (z.float() * y.view(-1, *(1,) * (z.dim() - 1))).flatten(1).tanh().sum(1)


def made_private(make: Callable[[], nn.Module], x: Tensor, bounds: wc.Bounds) -> Run:
    """A run without noise on all these records, whose model has the same weights every time."""
    torch.manual_seed(0)
    y = torch.linspace(-1, 1, len(x))
    return private(make(), (x, y), criterion=per_record, bounds=bounds, sample_rate=1.0)


def step(run: Run, forward: Any, half: bool) -> dict[str, Tensor]:
    """What one step of the ordinary loop releases."""
    for x, y in run.loader:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            loss = run.criterion(forward(x), y)
        loss.backward()
        run.optimizer.step()
    assert run.engine.steps == 1
    return run.grads()


class Deliveries:
    """Counts the products that reach the engine, by whether a compiled backward pass has handed them over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compiled = self.eager = 0
        real = _passes._deliver

        def deliver(key: int, x: Tensor, d: Tensor, borrowed: bool, conf: Any) -> None:
            self.compiled += borrowed
            self.eager += not borrowed
            real(key, x, d, borrowed, conf)

        monkeypatch.setattr(_passes, "_deliver", deliver)


def check(
    make: Callable[[], nn.Module], x: Tensor, bounds: wc.Bounds, half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph, all of whose products reach the engine, and which releases what the eager model does."""
    expected = step(eager := made_private(make, x, bounds), eager.model, half)
    run, counter = made_private(make, x, bounds), torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    seen = Deliveries(monkeypatch)
    found = step(run, compiled(run, counter), half)
    assert counter.frame_count >= 1 and seen.compiled > 0 and seen.eager == 0
    room = 2.0**-7 if half else 1e-5
    for name, value in expected.items():
        assert bool(value.any()) and found[name].dtype == torch.float32
        assert float((found[name] - value).norm()) <= room * float(value.norm()), name
