"""Tools of the engine's tests: small models, one-line private runs, and releases read from parameters alone."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weightclip as wc
from weightclip.noise._streams import Streams

Data = tuple[Tensor, Tensor]


class Pinned(Streams):
    """For tests alone: draws by (seed, charge) and noise by (seed, charge), whatever the settings and the sums are."""

    @property
    def needs_content(self) -> bool:
        return False

    def for_release(self, charge: int, content: Any) -> Streams:
        return self


def pin(engine: wc.PrivacyEngine, seed: int = 0) -> None:
    """Give a run draws and noise that other runs share."""
    engine.streams = engine.loader.streams = Pinned.seeded(seed)


def mlp(width: int = 8, classes: int = 3, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, classes))


def cnn(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(3 * 9, 3)
    )  # fmt: skip


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.inner = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.last(h + 0.5 * torch.relu(self.inner(h)))


def residual(seed: int = 0) -> Residual:
    torch.manual_seed(seed)
    return Residual()


def tokens(seed: int = 0) -> nn.Module:
    """A sequence model: (records, 4 positions) token ids to (records, 4 positions, 3 classes)."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(5, 6), wc.nn.Project(2.0), nn.Linear(6, 3))


def table(n: int, seed: int = 0, features: int = 6, classes: int = 3) -> Data:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, features, generator=g), torch.randint(0, classes, (n,), generator=g)


def pictures(n: int, seed: int = 0) -> Data:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 1, 6, 6, generator=g), torch.randint(0, 3, (n,), generator=g)


@dataclass
class Run:
    """A private run and the user's loop."""

    engine: wc.PrivacyEngine
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: Any
    criterion: Any
    data: Data

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def train(self, passes: int = 1, forward: Callable[[Tensor], Tensor] | None = None) -> Run:
        """The loop of the README."""
        call = self.model if forward is None else forward
        for _ in range(passes):
            for x, y in self.loader:
                self.optimizer.zero_grad()
                self.criterion(call(x), y).backward()
                self.optimizer.step()
        return self

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def grads(self) -> dict[str, Tensor]:
        found = {}
        for name, p in self.model.named_parameters():
            assert p.grad is not None, name
            found[name] = p.grad.detach().clone()
        return found

    @functools.cached_property
    def batch(self) -> float:
        return self.engine.report()["public"]["expected_batch_size"]

    def layers(self) -> dict[str, dict[str, Any]]:
        return {row["name"]: row for row in self.engine.report()["layers"]}


def private(
    model: nn.Module,
    data: Data,
    *,
    sigma: float | None = 0.0,
    bounds: wc.Bounds | None = None,
    criterion: Any = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    batch: int | None = None,
    seed: int | None = 0,
    accountant: str = "pld",
    pinned: int | None = None,
    **settings: Any,
) -> Run:
    """make_private, or make_private_with_epsilon for sigma=None; SGD of rate 1, full batches by default."""
    made = (optimizer or (lambda p: torch.optim.SGD(p, lr=1.0)))(model.parameters())
    engine = wc.PrivacyEngine(accountant=accountant)
    settings.setdefault("generator", None if seed is None else torch.Generator().manual_seed(seed))
    settings["bounds"] = bounds or wc.Bounds(input_radius=1.0)
    loader = DataLoader(TensorDataset(*data), batch_size=batch or len(data[0]))
    common = {"module": model, "optimizer": made, "data_loader": loader}
    common["criterion"] = nn.CrossEntropyLoss() if criterion is None else criterion
    if sigma is None:
        parts = engine.make_private_with_epsilon(**common, **settings)
    else:
        parts = engine.make_private(**common, noise_multiplier=sigma, **settings)
    if pinned is not None:
        pin(engine, pinned)
    return Run(engine, *parts, data)


def release(run: Run) -> dict[str, Tensor]:
    """b times what one step of SGD with rate 1 took from each parameter, which are put back: a black box.

    Only parameters before and after the step are read; they are float32, so a few units in the last place are lost.
    """
    before = run.weights()
    run.train()
    after = run.weights()
    with torch.no_grad():
        for name, p in run.model.named_parameters():
            p.copy_(before[name])
    return {name: (before[name].double() - after[name].double()) * run.batch for name in before}


def layer_norms(moved: dict[str, Tensor], beta: float = 1.0) -> dict[str, float]:
    """Norm of a difference of releases per layer, weight and bias together, the bias times beta."""
    squares: dict[str, float] = {}
    for name, value in moved.items():
        layer, _, kind = name.rpartition(".")
        scale = beta if kind == "bias" else 1.0
        squares[layer] = squares.get(layer, 0.0) + float((scale * value).square().sum())
    return {layer: math.sqrt(v) for layer, v in squares.items()}


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: a[name] - b[name] for name in a}


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def fresh(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)
