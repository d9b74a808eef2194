"""The networks whose steps are timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightclip.models import MLP, ConvNet, WideResNet


@dataclass(frozen=True)
class Timed:
    """One network of the benchmark.

    Attributes:
        factory: Makes it.
        shape: Of one record.
        classes: Number of logits.
        tokens: Size of the vocabulary where records are tokens; None: real numbers.
    """

    factory: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    tokens: int | None = None

    def batch(self, records: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Random records and labels."""
        if self.tokens is None:
            x = torch.randn(records, *self.shape, device=device)
        else:
            x = torch.randint(0, self.tokens, (records, *self.shape), device=device)
        return x, torch.randint(0, self.classes, (records,), device=device)


class _Attention(nn.Module):
    """Pre-norm self-attention and a feed-forward layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(2, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Encoder(nn.Module):
    """A transformer encoder of the size of BERT-base by default, without positions; mean over tokens, a dense head."""

    def __init__(self, vocabulary: int = 30_522, width: int = 768, heads: int = 12, depth: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(_Attention(width, heads) for _ in range(depth)))
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens)).mean(1))


class _Residual(nn.Module):
    """A block of a ResNet (He et al. 2016) with group normalisation in place of batch normalisation."""

    def __init__(self, c_in: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        c_out = 4 * width if bottleneck else width
        sizes = [(c_in, width, 1, 1), (width, width, 3, stride), (width, c_out, 1, 1)] if bottleneck else [
            (c_in, width, 3, stride), (width, c_out, 3, 1)]  # fmt: skip
        layers: list[nn.Module] = []
        for a, b, kernel, step in sizes:
            layers += [nn.Conv2d(a, b, kernel, step, kernel // 2, bias=False), nn.GroupNorm(32, b), nn.ReLU()]
        self.body = nn.Sequential(*layers[:-1])
        same = stride == 1 and c_in == c_out
        project = nn.Sequential(nn.Conv2d(c_in, c_out, 1, stride, bias=False), nn.GroupNorm(32, c_out))
        self.shortcut = nn.Identity() if same else project

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet(blocks: tuple[int, ...], bottleneck: bool, classes: int = 1000) -> nn.Module:
    """ResNet-18 is ``(2, 2, 2, 2), False``, ResNet-50 ``(3, 4, 6, 3), True``; with group normalisation."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.GroupNorm(32, 64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    c_in = 64
    for stage, count in enumerate(blocks):
        for block in range(count):
            width = 64 * 2**stage
            layers.append(_Residual(c_in, width, 2 if stage > 0 and block == 0 else 1, bottleneck))
            c_in = 4 * width if bottleneck else width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c_in, classes))


def models() -> dict[str, Timed]:
    """All of them by name."""
    return {
        "mlp": Timed(lambda: MLP(105, hidden=(16,), out_features=2), (105,), 2),
        "convnet": Timed(ConvNet, (1, 28, 28), 10),
        "wrn-16-4": Timed(lambda: WideResNet(16, 4), (3, 32, 32), 10),
        "mlp-deep": Timed(lambda: MLP(105, hidden=(64,) * 32, out_features=2), (105,), 2),
        "mlp-4096": Timed(lambda: MLP(1024, hidden=(4096, 4096), out_features=10), (1024,), 10),
        "encoder-base": Timed(Encoder, (128,), 2, tokens=30_522),
        "encoder-thin": Timed(lambda: Encoder(100, 32, 4), (8,), 2, tokens=100),  # as many products, hardly arithmetic
        "encoder-tiny": Timed(lambda: Encoder(50, 16, 2, 1), (20,), 2, tokens=50),
        "resnet18": Timed(lambda: resnet((2, 2, 2, 2), bottleneck=False), (3, 224, 224), 1000),
        "resnet50": Timed(lambda: resnet((3, 4, 6, 3), bottleneck=True), (3, 224, 224), 1000),
    }
