"""Ordinary user code that once broke the guarantee: what it does to a release, read from parameters alone.

Every hole is a model and a loop. `moved` trains on n and on n + 1 records without noise and compares how far the
release moved, layer by layer, with the sensitivity the noise of that release is scaled for: at most 1.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from tests.engine_kit import Run, difference, layer_norms, private, table
from torch import Tensor, nn

import weightclip as wc
from weightclip.factors import plain_forward

Step = Callable[[Run, Tensor, Tensor], None]
CERTIFIED = wc.Bounds(input_radius=1.0)


def moved(make: Callable[[], nn.Module], step: Step, bounds: wc.Bounds = CERTIFIED, size: float = 30.0) -> float:
    """How far one record moves a release, in units of what its noise is scaled for (the worst layer)."""
    x, y = table(9)
    x[8], y[8] = size * x[8], (y[8] + 1) % 3
    sums: list[dict[str, Tensor]] = []
    limits: dict[str, float] = {}
    for n in (8, 9):
        torch.manual_seed(0)
        run = private(make(), (x[:n], y[:n]), bounds=bounds, batch=8, sample_rate=1.0,
                      optimizer=lambda p: torch.optim.SGD(p, lr=0.0))  # fmt: skip
        for a, b in run.loader:
            step(run, a, b)
        limits = {path: row["sensitivity"] for path, row in run.layers().items()}  # weights have not moved
        sums.append({k: 8 * g for k, g in run.grads().items()})
    return max(norm / limits[path] for path, norm in layer_norms(difference(sums[1], sums[0])).items())


def usual(run: Run, x: Tensor, y: Tensor, **arguments: Any) -> None:
    run.criterion(run.model(x, **arguments), y).backward()
    run.optimizer.step()


class Net(nn.Module):
    """first -> relu -> something -> last; subclasses say what happens in between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def between(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(torch.relu(self.first(x))))


class Attribute(Net):
    kind = "float"

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.loud, self.numbers, self.tensor = 1.0, False, [1.0], torch.ones(())
        self.register_buffer("buffer", torch.ones(()))

    def between(self, h: Tensor) -> Tensor:
        return h * self.scale * self.numbers[0] * self.buffer * (100.0 if self.loud else 1.0)


def annealed(change: Callable[[Any], None]) -> Step:
    def step(run: Run, x: Tensor, y: Tensor) -> None:
        change(run.model)
        usual(run, x, y)

    return step


class Tensors(Net):
    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.ones(8)

    def between(self, h: Tensor) -> Tensor:
        return h * self.plain


class WarmUp(Net):
    """Counts its own calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def between(self, h: Tensor) -> Tensor:
        self.calls += torch.is_grad_enabled() and not torch.compiler.is_compiling()
        return h * (1.0 if self.calls < 60 else 100.0)


def warmed(run: Run, x: Tensor, y: Tensor) -> None:
    run.model.calls = 1000  # type: ignore[assignment]
    usual(run, x, y)


class Residual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.block = wc.nn.ConvexResidual(nn.Tanh(), 0.5)

    def between(self, h: Tensor) -> Tensor:
        return self.block(h)


class Temperature(Net):
    def forward(self, x: Tensor, temperature: float = 1.0, mode: str = "calm") -> Tensor:
        h = torch.relu(self.first(x))
        return self.last(h * (50.0 if mode == "loud" else 1.0)) / temperature


class Mode(Net):
    """Louder in training than in evaluation."""

    def between(self, h: Tensor) -> Tensor:
        return h * (1000.0 if self.training else 1.0)


def train_then_eval(run: Run, x: Tensor, y: Tensor) -> None:
    run.model.train()
    z = run.model(x)
    run.model.eval()
    run.criterion(z, y).backward()
    run.optimizer.step()


class Hooked(Net):
    on = False

    def between(self, h: Tensor) -> Tensor:
        if self.on and h.requires_grad:
            h.register_hook(lambda g: -50 * g)
        return h


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:  # type: ignore[override]
        return -50 * g


class Custom(Net):
    def between(self, h: Tensor) -> Tensor:
        return Reversal.apply(h)  # type: ignore[return-value]


def hook_for_one_pass(run: Run, x: Tensor, y: Tensor) -> None:
    handle = run.model.first.register_forward_hook(lambda m, a, out: 50 * out)  # type: ignore[union-attr]
    z = run.model(x)
    handle.remove()
    run.criterion(z, y).backward()
    run.optimizer.step()


def parameter_hook(run: Run, x: Tensor, y: Tensor) -> None:
    for p in run.model.parameters():
        p.register_hook(lambda g: 100 * g)
    usual(run, x, y)


def data_write_before_backward(run: Run, x: Tensor, y: Tensor) -> None:
    loss = run.criterion(run.model(x), y)
    before = run.model.last.weight.data.clone()  # type: ignore[union-attr]
    run.model.last.weight.data.mul_(50)  # type: ignore[union-attr]
    loss.backward()
    run.model.last.weight.data.copy_(before)  # type: ignore[union-attr]
    run.optimizer.step()


class Divided(Net):
    """A constant divisor that a projection by name is taken to bound."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()
        self.divisor = 1.0

    def between(self, h: Tensor) -> Tensor:
        return self.inner(h) / self.divisor


class Repeated(Net):
    """Runs a layer more often than it did at make_private."""

    times = 1

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        z = self.last(h)
        for _ in range(self.times - 1):
            z = z + self.last(h)
        return z


def another_thread_is_tracing(run: Run, x: Tensor, y: Tensor) -> None:
    inside, done = threading.Event(), threading.Event()

    def trace() -> None:
        with plain_forward():
            inside.set()
            done.wait()

    other = threading.Thread(target=trace)
    other.start()
    inside.wait()
    try:
        usual(run, 1000 * x, y)
    finally:
        done.set()
        other.join()


def compiled_wrapper(run: Run, x: Tensor, y: Tensor) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(run.model, backend="aot_eager")
    run.criterion(compiled(x), y).backward()
    run.optimizer.step()


class Wrapper(nn.Module):
    """Around the private model: scales its output in place."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).mul_(50.0)


def compiled_wrapper_in_place(run: Run, x: Tensor, y: Tensor) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(Wrapper(run.model), backend="aot_eager")
    run.criterion(compiled(x), y).backward()
    run.optimizer.step()


HOLES: dict[str, tuple[Callable[[], nn.Module], Step]] = {
    "float": (Attribute, annealed(lambda m: setattr(m, "scale", 100.0))),
    "bool": (Attribute, annealed(lambda m: setattr(m, "loud", True))),
    "list": (Attribute, annealed(lambda m: m.numbers.__setitem__(0, 100.0))),
    "buffer through .data": (Attribute, annealed(lambda m: m.buffer.data.fill_(100.0))),
    "plain tensor": (Tensors, annealed(lambda m: m.plain.fill_(100.0))),
    "warm-up counter": (WarmUp, warmed),
    "weight of a residual block": (Residual, annealed(lambda m: setattr(m.block, "weight", 1000.0))),
    "number among the arguments": (Temperature, lambda run, x, y: usual(run, x, y, temperature=0.02)),
    "word among the arguments": (Temperature, lambda run, x, y: usual(run, x, y, mode="loud")),
    "forward in train, loss in eval": (Mode, train_then_eval),
    "hook on an activation": (Hooked, annealed(lambda m: setattr(m, "on", True))),
    "backward formula of its own": (Custom, usual),
    "compiled with a backward formula of its own": (Custom, compiled_wrapper),
    "compiled wrapper that scales in place": (Net, compiled_wrapper_in_place),
    "hook for one pass": (Net, hook_for_one_pass),
    "hook on a parameter": (Net, parameter_hook),
    "write through .data before backward": (Net, data_write_before_backward),
    "constant divisor behind a projection by name": (Divided, annealed(lambda m: setattr(m, "divisor", 0.01))),
    "more uses than certified": (Repeated, annealed(lambda m: setattr(m, "times", 7))),
    "another thread traces": (Net, another_thread_is_tracing),
}
