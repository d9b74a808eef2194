"""How a run on text is trained, and the draws of those that do not use the engine's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import weightclip as wc

METHODS = ("cap", "factors", "quantiles", "opacus", "non-private")


@dataclass(frozen=True)
class Recipe:
    """What is done with releases, or paid for before them, beside what every run does.

    Attributes:
        final: Learning rate at the end as a part of that at the first step; it falls along a straight line.
        corrected: Whether the noise's variance is taken off Adam's second moment.
        lowpass: Weight of the past in a running mean of releases, which the optimiser gets in their place.
        warm: Noise multiplier of class means from which the head starts, paid for within the budget; 0: by chance.
    """

    final: float = 0.1
    corrected: bool = False
    lowpass: float = 0.0
    warm: float = 0.0


@dataclass(frozen=True)
class Settings:
    """How a run is trained; all of it public.

    Attributes:
        method: One of `METHODS`.
        rate: Learning rate of Adam at the first step.
        clip: The cap: over all layers (cap, opacus), of each layer (quantiles: where it starts), or of the gradient at
            each layer's output (factors).
        batch: Expected batch size.
        epochs: Passes over the data.
        averaging: Decay of the average of weights that is evaluated.
        recipe: What else is done.
    """

    method: str
    rate: float
    clip: float = 1.0
    batch: int = 4096
    epochs: int = 20
    averaging: float = 0.95
    recipe: Recipe = Recipe()

    def told(self) -> dict[str, Any]:
        """All of it as JSON, without a recipe that adds nothing: trials that were made before there were any count."""
        return {k: v for k, v in asdict(self).items() if k != "recipe" or self.recipe != Recipe()}

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


def draws(x: Tensor, y: Tensor, batch: int, seed: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Poisson draws without end; an empty one holds the first record."""
    n, generator = len(x), _generator(seed)
    while True:
        rows = torch.nonzero(torch.rand(n, generator=generator) < batch / n).squeeze(1)
        rows = (rows if len(rows) else torch.zeros(1, dtype=torch.long)).to(x.device)
        yield x[rows], y[rows]


def shuffled(x: Tensor, y: Tensor, batch: int, seed: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of one size without end."""
    generator = _generator(seed)
    while True:
        order = torch.randperm(len(x), generator=generator).to(x.device)
        for rows in order.split(batch)[: max(1, len(x) // batch)]:
            yield x[rows], y[rows]


def _generator(seed: int | None) -> torch.Generator:
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator
