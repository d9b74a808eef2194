"""A small transformer encoder on tokens, trained privately: attention has no gain, and bounded factors need none.

Each record of Adult becomes a sequence of 14 tokens (one per column, numbers cut into public bins). Every layer with
parameters has an enforced input radius and cotangent radius inside its weight-gradient product, so nothing has to be
known about what lies between the layers: attention stays as it is, and weights are never clipped.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import adult
import weightclip as wc


class Block(nn.Module):
    """Pre-norm self-attention and a feed-forward layer, built from layers weightclip knows."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = wc.nn.SafeLayerNorm(width, alpha=0.1), wc.nn.SafeLayerNorm(width, alpha=0.1)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """records x tokens x width."""
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(2, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Encoder(nn.Module):
    """Token embeddings, blocks, mean over tokens, a linear head."""

    def __init__(self, vocabulary: int, width: int = 16, heads: int = 2, depth: int = 1, classes: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """records x tokens -> records x classes."""
        return self.head(self.blocks(self.embed(tokens)).mean(1))


def tokens_of(table: dict[str, np.ndarray], bins: int = 8) -> tuple[Tensor, int]:
    """One token per column: the category (0 for missing), or the bin of a number in its public range."""
    columns, offset = [], 0
    for name, values in table.items():
        if name in adult.CATEGORIES:
            same = values[:, None] == np.array(adult.CATEGORIES[name])[None, :]
            token, size = np.where(same.any(1), same.argmax(1) + 1, 0), same.shape[1] + 1
        else:
            low, high = adult.RANGES[name]
            token, size = np.clip(((values - low) / (high - low) * bins).astype(np.int64), 0, bins - 1), bins
        columns.append(token + offset)
        offset += size
    return torch.tensor(np.stack(columns, 1)), offset


def main() -> None:
    """Train and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epsilon", type=float, default=2.0)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--records", type=int, default=None, help="use only so many training records")
    options = parser.parse_args()
    table, income = adult.load()
    x, vocabulary = tokens_of(table)
    y = torch.tensor(income == ">50K").long()
    train, test = map(torch.as_tensor, adult.parts(len(y)))
    train = train[: options.records]

    torch.manual_seed(0)
    model = Encoder(vocabulary)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(x[train], y[train]), batch_size=1024)
    engine = wc.PrivacyEngine()
    model, optimizer, loader, loss = engine.make_private_with_epsilon(
        module=model, optimizer=optimizer, data_loader=loader, criterion=wc.losses.CrossEntropy(cap=0.3),
        target_epsilon=options.epsilon, target_delta=1e-6, epochs=options.epochs,
        bounds=wc.Bounds(layer_radius=4.0, cotangent_radius=0.1, bias_scale=0.5), allocation=wc.AdamAware(),
    )  # fmt: skip
    began = time.time()
    for _ in range(options.epochs):
        for tokens, target in track(loader, description="private training", total=len(loader)):
            optimizer.zero_grad()
            loss(model(tokens), target).backward()
            optimizer.step()
    with torch.no_grad():
        accuracy = (model(x[test]).argmax(1) == y[test]).double().mean().item()
    print(engine.certificate())
    print(f"accuracy {accuracy:.4f}  epsilon {engine.get_epsilon(1e-6):.3f}  {time.time() - began:.1f} s")


if __name__ == "__main__":
    main()
