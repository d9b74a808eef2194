"""One training run on text: the engine's caps, radii or quantiles, Opacus, or no privacy, with one recipe for all."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weightclip as wc
from weightclip.nn import ParameterAverage

METHODS = ("cap", "factors", "quantiles", "opacus", "non-private")


@dataclass(frozen=True)
class Settings:
    """How a run is trained; all of it public.

    Attributes:
        method: One of `METHODS`.
        rate: Learning rate of Adam at the first step; it falls to a tenth along a straight line.
        clip: The cap: over all layers (cap, opacus), of each layer (quantiles: where it starts), or of the gradient at
            each layer's output (factors).
        batch: Expected batch size.
        epochs: Passes over the data.
        averaging: Decay of the average of weights that is evaluated.
    """

    method: str
    rate: float
    clip: float = 1.0
    batch: int = 4096
    epochs: int = 20
    averaging: float = 0.95

    def steps(self, n: int) -> int:
        """Number of releases."""
        return self.epochs * max(1, round(n / self.batch))

    def bounds(self) -> wc.Bounds:
        """What the engine enforces."""
        if self.method == "factors":
            return wc.Bounds(layer_radius=2.0, cotangent_radius=self.clip)
        if self.method == "quantiles":
            return wc.Bounds(layer_cap=self.clip, adaptive=wc.Adaptive())
        return wc.Bounds(max_grad_norm=self.clip)


@dataclass(frozen=True)
class Fit:
    """What a run gave: outputs of the averaged weights on the records asked for, and its time."""

    scores: Tensor
    seconds: float
    steps: int


def fit(
    model: nn.Module, x: Tensor, y: Tensor, ask: Tensor, settings: Settings, sigma: float, seed: int,
    *, piece: int | None = None, precision: torch.dtype | None = None,
) -> Fit:  # fmt: skip
    """Train on (x, y) and score ``ask``; the time is that of the steps alone.

    Args:
        model: The model; moved and trained in place.
        x: Records.
        y: Labels.
        ask: Records to score.
        settings: How.
        sigma: Noise multiplier; 0 and the method "non-private" for none.
        seed: Of draws and noise.
        piece: Records of a physical batch.
        precision: Of autocast, or None.

    Formal guarantees:
        Those of the engine, or of Opacus, for ``settings.steps`` draws of rate batch/n with multiplier ``sigma``; the
        seed makes the noise repeatable, which is for experiments only.
    """
    device = x.device
    model.to(device).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=settings.rate)
    steps, data = settings.steps(len(x)), TensorDataset(x, y)
    loss = nn.CrossEntropyLoss()
    average = ParameterAverage(model, settings.averaging)
    run = _engine if settings.method in ("cap", "factors", "quantiles") else _opacus
    if settings.method == "non-private":
        run = _plain
    began = 0.0
    with torch.autocast(device.type, precision or torch.bfloat16, enabled=precision is not None):
        for done in run(model, optimizer, data, loss, settings, sigma, seed, piece):
            if done == 0:  # set up: what follows are steps
                began = _clock(device)
            else:
                average.update()
            if done == steps:
                break
            for group in optimizer.param_groups:
                group["lr"] = settings.rate * (1 - 0.9 * done / steps)
        seconds = _clock(device) - began
        with average.apply(), torch.no_grad():
            scores = torch.cat([model.eval()(part).float() for part in ask.split(512)])
    return Fit(scores.cpu(), seconds, steps)


def _engine(model, optimizer, data, loss, settings: Settings, sigma: float, seed: int, piece) -> Iterator[int]:
    engine = wc.PrivacyEngine()
    _, _, loader, _ = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=settings.batch), criterion=loss,
        noise_multiplier=sigma, bounds=settings.bounds(), max_physical_batch_size=piece,
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    step = engine.fused_step()
    yield 0
    try:
        while True:
            for x, y in loader:
                before = engine.steps
                step(x, y)
                if engine.steps > before:
                    yield engine.steps
    finally:
        engine.detach()


def _opacus(model, optimizer, data, loss, settings: Settings, sigma: float, seed: int, piece) -> Iterator[int]:
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        wrapped = GradSampleModule(model)
        private = DPOptimizer(
            optimizer, noise_multiplier=sigma, max_grad_norm=settings.clip, expected_batch_size=settings.batch,
            generator=torch.Generator(data.tensors[0].device).manual_seed(seed),
        )  # fmt: skip
        yield 0
        try:
            for done, (x, y) in enumerate(_draws(data, settings.batch, seed), 1):
                starts = range(0, len(x), piece or len(x))  # gradients of single records fill the memory
                for start in starts:
                    part = slice(start, start + (piece or len(x)))
                    private.signal_skip_step(start != starts[-1])
                    private.zero_grad()
                    loss(wrapped(x[part]), y[part]).backward()
                    private.step()
                yield done
        finally:
            wrapped.to_standard_module()


def _plain(model, optimizer, data, loss, settings: Settings, sigma: float, seed: int, piece) -> Iterator[int]:
    yield 0
    for done, (x, y) in enumerate(_draws(data, settings.batch, seed), 1):
        optimizer.zero_grad()
        for a, b in zip(x.split(piece or len(x)), y.split(piece or len(x)), strict=True):
            (loss(model(a), b) * (len(a) / len(x))).backward()
        optimizer.step()
        yield done


def _draws(data: TensorDataset, batch: int, seed: int) -> Iterator[tuple[Tensor, ...]]:
    """Poisson draws."""
    n, generator = len(data), torch.Generator().manual_seed(seed)
    while True:
        rows = torch.nonzero(torch.rand(n, generator=generator) < batch / n).squeeze(1)
        rows = rows if len(rows) else torch.zeros(1, dtype=torch.long)
        yield tuple(t[rows.to(t.device)] for t in data.tensors)


def _clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def accuracy(found: Fit, labels: Any) -> float:
    """Share of right answers."""
    return float((found.scores.argmax(1) == torch.as_tensor(labels)).double().mean())
