"""BERT in plain torch, without dropout, from one small file: for machines that hold torch alone."""

from __future__ import annotations

import math
import re
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

_NAMES = {
    "attention.self.query": "query", "attention.self.key": "key", "attention.self.value": "value",
    "attention.output.dense": "mix", "attention.output.LayerNorm": "mixed", "intermediate.dense": "widen",
    "output.dense": "narrow", "output.LayerNorm": "narrowed",
}  # fmt: skip


class Layer(nn.Module):
    """One layer: attention and a wide dense part, each added to its input and normalised."""

    def __init__(self, width: int, wide: int, heads: int, eps: float) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.mix = (nn.Linear(width, width) for _ in range(4))
        self.widen, self.narrow = nn.Linear(width, wide), nn.Linear(wide, width)
        self.mixed, self.narrowed = nn.LayerNorm(width, eps), nn.LayerNorm(width, eps)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:  # texts x tokens x width
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        found = _attend(q, k, v, seen)
        x = _normalised(self.mixed, x + self.mix(found.transpose(1, 2).flatten(2)))
        return _normalised(self.narrowed, x + self.narrow(functional.gelu(self.widen(x))))


class Bert(nn.Module):
    """Token numbers to a vector for each token; number 0 is padding, which nothing attends to."""

    def __init__(self, words: int, places: int, width: int, wide: int, layers: int, heads: int, eps: float) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(places, width)
        self.start = nn.LayerNorm(width, eps)
        self.layers = nn.ModuleList(Layer(width, wide, heads, eps) for _ in range(layers))

    @property
    def width(self) -> int:
        """Numbers for each token."""
        return self.words.embedding_dim

    def forward(self, ids: Tensor) -> Tensor:  # texts x tokens -> texts x tokens x width
        place = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        x = self.words(ids) + self.places(place)
        if torch.is_autocast_enabled(x.device.type):  # what layers hand on stays as short as what they multiply
            x = x.to(torch.get_autocast_dtype(x.device.type))
        x = _normalised(self.start, x)
        seen = (ids != 0) | (place == 0)  # every text begins with a mark; an empty row must not divide by nothing
        for layer in self.layers:
            x = layer(x, seen[:, None, None, :])
        return x


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Attention as two products: for the few tokens of a sentence faster than one kernel made for long texts.

    Every text begins with a mark, so that a row of scores always has one that is seen.
    """
    with torch.autocast(q.device.type, enabled=False):  # which would keep the shares in single precision
        scores = ((q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)).masked_fill(~seen, -math.inf)
        return torch.softmax(scores, -1) @ v


def _normalised(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    """The layer's result in the precision of ``x``: autocast would hand on, and keep, twice as many bytes."""
    if norm.weight.requires_grad:
        return norm(x).to(x.dtype)
    with torch.autocast(x.device.type, enabled=False):
        return functional.layer_norm(x, norm.normalized_shape, norm.weight.to(x.dtype), norm.bias.to(x.dtype), norm.eps)


def save_encoder(path: Path, network: nn.Module, words: Tensor, places: int) -> None:
    """A network of the transformers library as a small file: half precision, the words and places that are used.

    Args:
        path: The file.
        network: A ``BertModel``.
        words: Numbers of the tokens that are kept, in their new order.
        places: How long a text may be.
    """
    found = {k: v.detach() for k, v in network.state_dict().items()}
    table = found["embeddings.position_embeddings.weight"] + found["embeddings.token_type_embeddings.weight"][0]
    kept = {"words.weight": found["embeddings.word_embeddings.weight"][words], "places.weight": table[:places]}
    for name, value in found.items():
        if name.startswith("embeddings.LayerNorm."):
            kept[name.replace("embeddings.LayerNorm", "start")] = value
        elif match := re.fullmatch(r"encoder\.layer\.(\d+)\.(.+)\.(weight|bias)", name):
            kept[f"layers.{match[1]}.{_NAMES[match[2]]}.{match[3]}"] = value
    config = network.config
    shape = {"heads": config.num_attention_heads, "eps": config.layer_norm_eps}  # type: ignore[union-attr]
    save_file({k: v.half().contiguous() for k, v in kept.items()}, path, {k: str(v) for k, v in shape.items()})


def load_bert(path: Path) -> Bert:
    """The network of a file that `save_encoder` wrote, in single precision."""
    with safe_open(path, "pt") as file:
        told, state = file.metadata(), {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
    layers = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("layers."))
    (words, width), places = state["words.weight"].shape, len(state["places.weight"])
    wide = len(state["layers.0.widen.weight"])
    network = Bert(words, places, width, wide, layers, int(told["heads"]), float(told["eps"]))
    network.load_state_dict(state)
    return network
