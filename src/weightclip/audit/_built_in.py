"""The trainers that ``weightclip audit`` examines: small, and built so that the bounds are attained where they can be.

A loose bound hides a wrong one: a missing factor of 1.1 shows only where the certificate is within 1.1 of the truth.
So several models are *aligned*: every layer's top singular vectors meet those of its neighbours, activations sit where
their slope is greatest, and the loss is capped, hence saturated at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from weightclip import nn as wnn
from weightclip.audit._subject import Records, Subject
from weightclip.certificate import Adaptive, Bounds
from weightclip.factors import Product
from weightclip.losses import CrossEntropy
from weightclip.noise import AdamAware, LeastVariance

RADIUS = math.sqrt(2) * math.sqrt(6) / 0.8  # brings six numbers to where GELU is steepest, behind a gain of 0.8


def gaussian_records(shape: tuple[int, ...]) -> Callable[[int, torch.Generator], Records]:
    """Standard normal inputs with random labels, 0 or 1."""
    return lambda n, g: (torch.randn(n, *shape, generator=g), torch.randint(0, 2, (n,), generator=g))


def token_records(n: int, generator: torch.Generator) -> Records:
    """Sequences of three random tokens of nine, with random labels 0, 1 and 2."""
    return torch.randint(0, 9, (n, 3), generator=generator), torch.randint(0, 3, (n,), generator=generator)


def aligned(gain: float, left: Tensor, right: Tensor) -> Tensor:
    """A matrix whose largest singular value is ``gain``, with these singular vectors; the others are 0.9 of it."""
    basis_left, basis_right = (torch.linalg.qr(torch.cat([v[:, None], _noise(len(v))], 1))[0] for v in (left, right))
    k = min(len(left), len(right))
    values = torch.full((k,), gain * 0.9)
    values[0] = gain
    signs = torch.sign(basis_left[:, 0] @ left) * torch.sign(basis_right[:, 0] @ right)
    matrix = basis_left[:, :k] @ torch.diag(values) @ basis_right[:, :k].T
    return matrix * signs


def _noise(n: int) -> Tensor:
    return torch.randn(n, n - 1, generator=torch.Generator().manual_seed(n))


def _set(layer: nn.Linear | nn.Conv2d, weight: Tensor) -> nn.Module:
    with torch.no_grad():
        layer.weight.copy_(weight)
        if layer.bias is not None:
            layer.bias.zero_()
    return layer


def _kernel(layer: nn.Conv2d, gain: float) -> nn.Module:
    """Every weight alike: constant images pass with the full gain of the kernel."""
    return _set(layer, torch.full_like(layer.weight, gain / layer.weight.numel()))


def _ones(n: int) -> Tensor:
    return torch.full((n,), n**-0.5)


def _opposite() -> Tensor:
    return torch.tensor([1.0, -1.0]) / math.sqrt(2)


def aligned_model() -> nn.Module:
    """Three dense layers whose certified gradient bounds are attained by one record of length ``RADIUS``."""
    return nn.Sequential(
        _set(nn.Linear(4, 6), aligned(0.8, _ones(6), _ones(4))), nn.GELU(),
        _set(nn.Linear(6, 6), aligned(0.5, _ones(6), _ones(6))), nn.ReLU(),
        _set(nn.Linear(6, 2), aligned(0.7, _opposite(), _ones(6))),
    )  # fmt: skip


def _seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def model() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            return make()

    return model


class _Twice(nn.Module):
    """x + (f(x) + f(x)): one user of f(x), two edges, and one layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _set(nn.Linear(5, 5), aligned(0.6, _ones(5), _ones(5)))
        self.last = _set(nn.Linear(5, 2), aligned(0.7, _opposite(), _ones(5)))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.inner(x))
        h = x + (h + h)
        return self.last(torch.relu(self.inner(h)))


def _convolutions() -> nn.Module:
    places = 49
    return nn.Sequential(
        _kernel(nn.Conv2d(1, 1, 3, padding=1, bias=False), 0.9), nn.ReLU(),
        _kernel(nn.Conv2d(1, 1, 3, padding=1), 0.8), nn.ReLU(), nn.Flatten(),
        _set(nn.Linear(places, 2), aligned(0.7, _opposite(), _ones(places))),
    )  # fmt: skip


def _pooling() -> nn.Module:
    """Overlapping windows that all choose the middle: the pool's gain of 2 is attained."""
    return nn.Sequential(
        _kernel(nn.Conv2d(1, 1, 1, bias=False), 0.9), nn.MaxPool2d(2, 1), nn.Flatten(),
        _set(nn.Linear(4, 2), aligned(0.7, _opposite(), _ones(4))),
    )  # fmt: skip


def _normalisation() -> nn.Module:
    """Inputs whose spread stays below the floor alpha: the gain 1/alpha is attained."""
    zero_mean = torch.tensor([1.0, -1.0, 1.0, -1.0]) / 2
    return nn.Sequential(
        _set(nn.Linear(4, 4), aligned(0.3, zero_mean, _ones(4))), wnn.SafeLayerNorm(4, alpha=0.4),
        _set(nn.Linear(4, 2), aligned(0.7, _opposite(), zero_mean)),
    )  # fmt: skip


def _one_layer() -> nn.Module:
    return _set(nn.Linear(4, 2, bias=False), aligned(1.0, _opposite(), _ones(4)))


def subjects() -> dict[str, Subject]:
    """All built-in trainers by name."""
    capped = CrossEntropy(cap=0.3)
    dense, deep = gaussian_records((4,)), _seeded(aligned_model)
    standardised = _seeded(
        lambda: nn.Sequential(wnn.StandardizedConv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(50, 2))
    )
    factors = _seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)))
    everything = [
        Subject("aligned dense net", deep, capped, Bounds(input_radius=RADIUS), dense),
        Subject("clipped weights", factors, capped, Bounds(weight_norm=0.6, input_radius=2.0), dense,
                allocation=LeastVariance(), optimizer=lambda weights: torch.optim.SGD(weights, lr=2.0)),
        Subject("radii on both factors", factors, nn.CrossEntropyLoss(),
                Bounds(layer_radius=1.5, cotangent_radius=0.2, bias_scale=0.5), dense, allocation=AdamAware()),
        Subject("joint cap", factors, nn.CrossEntropyLoss(), Bounds(joint_cap=1.0), dense),
        Subject("layer caps, small pieces", factors, nn.CrossEntropyLoss(), Bounds(layer_cap=0.5), dense, physical=4),
        Subject("convolutions", _convolutions, capped, Bounds(input_radius=2.0), gaussian_records((1, 7, 7))),
        Subject("overlapping pooling", _pooling, capped, Bounds(input_radius=2.0), gaussian_records((1, 3, 3))),
        Subject("normalisation", _normalisation, capped, Bounds(input_radius=2.0), dense),
        Subject("shared layer and residual", _Twice, capped, Bounds(input_radius=1.0), gaussian_records((5,))),
        Subject("tokens", _seeded(lambda: nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 3))),
                nn.CrossEntropyLoss(), Bounds(cotangent_radius=0.3, input_radius={"2": 2.0}), token_records),
        Subject("float32 sums", _one_layer,
                capped, Bounds(input_radius=1.0, product=Product(dtype=torch.float32)), dense, batch=4096.0),
        Subject("large batches", _one_layer, capped, Bounds(input_radius=1.0), dense, batch=4096.0),
        Subject("limits by private quantiles", factors, nn.CrossEntropyLoss(),
                Bounds(layer_radius=1.5, cotangent_radius=0.2, adaptive=Adaptive(noise=4.0)), dense),
        Subject("three views of each record", factors, nn.CrossEntropyLoss(),
                Bounds(layer_radius=1.5, cotangent_radius=0.2), dense, views=3),
        Subject("standardised kernels", standardised, capped, Bounds(input_radius=2.0), gaussian_records((1, 5, 5))),
        Subject("bfloat16 autocast", factors, nn.CrossEntropyLoss(), Bounds(layer_radius=1.5, cotangent_radius=0.2),
                dense, autocast=torch.bfloat16),
    ]  # fmt: skip
    return {s.name: s for s in everything}
