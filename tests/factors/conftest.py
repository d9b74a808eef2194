"""Layers with a private form, and their exact per-record gradients."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from weightclip import nn as wnn
from weightclip.factors import make_layer_private


@dataclass(frozen=True)
class Case:
    """A layer and the shape of one record of its input (None: token ids)."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    tokens: bool = False

    def layer(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """A fresh layer with parameters of ordinary size."""
        torch.manual_seed(0)
        layer = self.make()
        for q in layer.parameters():
            if q.dim() == 1:
                nn.init.normal_(q)
        return layer.to(dtype)

    def inputs(self, records: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        """A batch of inputs."""
        generator = torch.Generator().manual_seed(seed)
        if self.tokens:
            return torch.randint(0, 5, (records, *self.shape), generator=generator)
        return torch.randn(records, *self.shape, generator=generator).to(dtype)


CASES = {
    "dense": Case(lambda: nn.Linear(4, 3), (4,)),
    "dense without bias": Case(lambda: nn.Linear(4, 3, bias=False), (4,)),
    "dense over positions": Case(lambda: nn.Linear(4, 3), (5, 4)),
    "conv1d": Case(lambda: nn.Conv1d(2, 3, 3, stride=2, padding=1), (2, 7)),
    "conv2d": Case(lambda: nn.Conv2d(2, 4, 3, padding="same", groups=2), (2, 5, 4)),
    "conv2d circular": Case(lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (2, 4, 4)),
    "conv2d dilated": Case(lambda: nn.Conv2d(1, 2, 2, stride=2, dilation=2, padding=1, bias=False), (1, 6, 5)),
    "conv3d": Case(lambda: nn.Conv3d(1, 2, 2), (1, 3, 3, 3)),
    "transposed": Case(lambda: nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, output_padding=1), (2, 3, 3)),
    "embedding": Case(lambda: nn.Embedding(5, 3, padding_idx=0), (4,), True),
    "safe group norm": Case(lambda: wnn.SafeGroupNorm(2, 4, affine=True), (4, 3, 2)),
    "safe layer norm": Case(lambda: wnn.SafeLayerNorm(4, affine=True), (3, 4)),
    "group norm": Case(lambda: nn.GroupNorm(2, 4), (4, 3)),
    "layer norm": Case(lambda: nn.LayerNorm(4), (3, 4)),
    "rms norm": Case(lambda: nn.RMSNorm(4), (3, 4)),
    "instance norm": Case(lambda: nn.InstanceNorm2d(3, affine=True), (3, 2, 4)),
    "bag": Case(lambda: nn.EmbeddingBag(5, 3, mode="mean", padding_idx=0), (4,), True),
    "largest of a bag": Case(lambda: nn.EmbeddingBag(5, 3, mode="max"), (4,), True),
}


def record_gradients(layer: nn.Module, x: Tensor, d: Tensor, beta: float = 1.0) -> Tensor:
    """Per-record gradients of (weight, beta bias), one row each, from the layer as it is."""
    rows = []
    parameters = dict(layer.named_parameters())
    for i in range(x.shape[0]):
        found = torch.autograd.grad((layer(x[i : i + 1]) * d[i : i + 1]).sum(), list(parameters.values()))
        rows.append(torch.cat([(g * (beta if n == "bias" else 1.0)).flatten() for n, g in
                               zip(parameters, found, strict=True)]))  # fmt: skip
    return torch.stack(rows).detach()


def private(layer: nn.Module, **limits) -> nn.Module:
    """A private copy."""
    layer = copy.deepcopy(layer)
    make_layer_private(layer, **limits)
    return layer


@pytest.fixture(params=CASES)
def case(request) -> Case:
    """One layer after the other."""
    return CASES[request.param]


@pytest.fixture
def cases() -> dict[str, Case]:
    """All layers by name."""
    return CASES


@pytest.fixture
def exact() -> Callable[..., Tensor]:
    """Per-record gradients."""
    return record_gradients


@pytest.fixture
def made_private() -> Callable[..., nn.Module]:
    """Private copies."""
    return private


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*gain 1/sqrt")
        yield
