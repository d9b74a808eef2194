"""Small models with parameters in all the places people put them, and a batch for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

RECORDS = 8


class Scale(nn.Module):
    """Layer scale, with a reshape on the way."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.gamma.reshape(1, -1) * x


class RMS(nn.Module):
    """Somebody's own norm."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))

    def forward(self, x: Tensor) -> Tensor:
        return (1 + self.weight) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Doubled(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias) * 2


class Padded(nn.Conv2d):
    """A convolution that pads by itself, as timm's."""

    def forward(self, input: Tensor) -> Tensor:
        return F.conv2d(F.pad(input, (1, 1, 1, 1)), self.weight, self.bias, self.stride)


class Turned(nn.Module):
    """GPT-2's Conv1D: rows are positions folded into the batch."""

    def __init__(self, out: int, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(size, out)), nn.Parameter(torch.randn(out))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


class Tokens(nn.Module):
    """A vision transformer's tokens: class token, positions, in-place addition."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(2, 4, 2, 2)
        self.token, self.places = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(1, 5, 4))
        self.norm, self.head = RMS(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        x += self.places
        x = torch.tanh(self.norm(x))
        return self.head(x[:, 0] * x.mean(1))


class Relative(nn.Module):
    """Learned positions without a record dimension, a table of relative ones, and folded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.near = nn.Embedding(11, 4), nn.Embedding(6, 4), nn.Embedding(5, 2)
        self.table = nn.Parameter(torch.randn(5, 2))
        self.norm, self.out = nn.LayerNorm(4), nn.Linear(4, 4)
        self.register_buffer("index", torch.arange(36).view(6, 6) % 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.words(ids) + self.places(torch.arange(ids.shape[1])))
        q = x.unflatten(-1, (2, 2)).transpose(1, 2)
        index: Any = self.index
        bias = (self.near(index) + self.table[index.view(-1)].view(6, 6, 2)).permute(2, 0, 1)
        y = F.scaled_dot_product_attention(q, q, q, bias.unsqueeze(0)).transpose(1, 2).flatten(2)
        return self.out(y.reshape(-1, 4)).view(ids.shape[0], -1, 4)


class Tied(nn.Module):
    """Embedding and head share a table; the head has a bias of its own; one layer is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.twice, self.head = nn.Embedding(11, 4, padding_idx=0), nn.Linear(4, 4), nn.Linear(4, 11)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.twice(self.twice(self.words(ids)))))


class Borrowed(nn.Module):
    """The head is the embedding's table, multiplied by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.middle = nn.Embedding(7, 4), nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.middle(self.words(ids))), self.words.weight)


class SeqFirst(nn.Module):
    """Records on dimension 1."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.start = nn.Linear(3, 4), nn.LayerNorm(4), nn.Parameter(torch.randn(5, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.first(x.transpose(0, 1)) + self.start)).mean(0)


class Windows(nn.Module):
    """Image windows folded into the batch of a convolution and a group norm, used on whole images as well."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.up = nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ConvTranspose2d(4, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        parts = x.unfold(2, 4, 4).unfold(3, 4, 4).reshape(-1, 1, 4, 4)
        whole = self.conv(x).mean((1, 2, 3))
        return torch.cat([self.up(self.norm(self.conv(parts))).reshape(len(x), -1), whole[:, None]], 1)


class Queries(nn.Module):
    """Learned queries that pass through layers before they meet any record."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(3, 4))
        self.make, self.norm, self.key = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(self.make(self.queries)) @ self.key(x).mT).softmax(-1) @ x


class Loop(nn.Module):
    """A cell in a loop, whose state starts from a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.start = nn.Linear(5, 3), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.start.repeat(len(x), 1)
        for t in range(x.shape[1]):
            h = torch.tanh(self.cell(torch.cat([x[:, t], h], 1)))
        return h


class Products(nn.Module):
    """nn.Bilinear over positions, used twice, and a weighted bag."""

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.bag = nn.Bilinear(4, 3, 2), nn.EmbeddingBag(7, 3, mode="sum")

    def forward(self, x: Tensor) -> Tensor:
        bag = self.bag((x[..., 0].nan_to_num().abs() * 3).long().clamp(max=6), per_sample_weights=x[..., 1])
        return torch.cat([self.pair(x, x[..., :3]).flatten(1), self.pair(x[:, 0], bag)], 1)


def floats(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(RECORDS, *shape, generator=torch.Generator().manual_seed(1))


def tokens(high: int, *shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, high, (RECORDS, *shape), generator=torch.Generator().manual_seed(1))


ZOO: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "own layers": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), Scale(4), Doubled(4, 4), nn.Tanh(), Turned(3, 4)), floats(3)),
    "folded positions": (
        lambda: nn.Sequential(Turned(4, 3), nn.Tanh(), nn.RMSNorm(4), nn.PReLU(), nn.Linear(4, 2)), floats(5, 3)),
    "images": (lambda: nn.Sequential(
        Padded(2, 3, 3), nn.PReLU(3), nn.InstanceNorm2d(3, affine=True),
        nn.ConvTranspose2d(3, 2, 3, 2, output_padding=1), nn.Flatten(), nn.Linear(288, 2)), floats(2, 5, 5)),
    "tokens": (Tokens, floats(2, 4, 4)),
    "relative positions": (Relative, tokens(11, 6)),
    "tied": (Tied, tokens(11, 6)),
    "records on dimension 1": (SeqFirst, floats(5, 3)),
    "windows": (Windows, floats(1, 8, 8)),
    "queries": (Queries, floats(5, 4)),
    "loop": (Loop, floats(4, 2)),
    "products": (Products, floats(5, 4)),
}  # fmt: skip


def made(name: str) -> tuple[nn.Module, Tensor]:
    """The model of that name with fresh weights, and its batch."""
    torch.manual_seed(0)
    model, batch = ZOO[name]
    return model(), batch()
