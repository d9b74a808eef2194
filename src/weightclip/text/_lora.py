"""Low-rank updates of an encoder: thin layers that are trained beside frozen ones, and kept apart from them."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from weightclip.errors import WeightclipError
from weightclip.noise import Streams
from weightclip.text._encoder import TextEncoder, pooled

PREFIX = "text."
"""Of an update's arrays among those of a model folder."""
SCALE = 10.0
"""Length of the vector that the head reads: head and updates then learn at one rate of Adam's."""
_INIT = "text/init"
_HIDDEN = -1e4  # added to the score of what is no part of a text


@dataclass(frozen=True)
class Lora:
    """What is trained of an encoder, all of it public."""

    rank: int = 8  #: of each update
    tokens: int = 64  #: how many of a text are read, in training and in prediction; all texts are padded to so many
    #: names of the dense layers that have an update, in every layer of the encoder
    places: tuple[str, ...] = ("query", "value")

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= 256:
            raise WeightclipError(f"--rank must be a whole number from 1 to 256, got {self.rank}.")
        if not 3 <= self.tokens <= 256:
            raise WeightclipError(f"--tokens must be a whole number from 3 to 256, got {self.tokens}.")

    def described(self) -> dict[str, int]:
        """What a model folder keeps of it."""
        return {"rank": self.rank, "tokens": self.tokens}


class LowRank(nn.Module):
    """A frozen dense layer plus a product of two thin ones: one random, orthonormal and fixed, one trained from zero.

    Half as many numbers are trained as where both are, and each of them brings noise.
    """

    def __init__(self, base: nn.Linear, down: np.ndarray) -> None:
        super().__init__()
        rank, width = down.shape
        self.base = base
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)
        with torch.no_grad():
            self.down.weight.copy_(torch.from_numpy(down))
            self.up.weight.zero_()
        self.down.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def words_and_ends(rows: np.ndarray) -> Tensor:
    """Rows of `TextEncoder.padded` as the network reads them: numbers of tokens, and which of them are the text's.

    Apart from each other, so that the engine's test of independence, whose integers are 0 and 1, tries other words and
    other lengths of texts.  # texts x tokens -> texts x 2 x tokens, int32
    """
    rows = np.asarray(rows, dtype=np.int32)
    return torch.from_numpy(np.stack([np.maximum(rows - 1, 0), (rows > 0).astype(np.int32)], axis=1))


class Classifier(nn.Module):
    """Token numbers to outputs: a copy of the encoder with its updates, the mean over a text's tokens, one layer.

    ``streams`` give the initial weights.
    """

    def __init__(self, encoder: TextEncoder, lora: Lora, outputs: int, streams: Streams) -> None:
        super().__init__()
        rng = streams.numpy(_INIT)
        self.network = copy.deepcopy(encoder.network).requires_grad_(False)
        for path, layer in list(self.network.named_modules()):
            if path.rpartition(".")[2] not in lora.places or not isinstance(layer, nn.Linear):
                continue
            down = np.linalg.qr(rng.standard_normal((layer.in_features, min(lora.rank, layer.in_features))))[0].T
            parent, _, name = path.rpartition(".")
            setattr(self.network.get_submodule(parent), name, LowRank(layer, down))
        self.head = nn.Linear(encoder.width, outputs)
        with torch.no_grad():
            self.head.weight.copy_(torch.from_numpy(rng.standard_normal(tuple(self.head.weight.shape)) * 0.01))
            self.head.bias.zero_()

    def forward(self, rows: Tensor) -> Tensor:
        """Outputs of `words_and_ends` of texts.  # texts x 2 x tokens -> texts x outputs"""
        ids, kept = rows[:, 0], rows[:, 1] > 0
        seen = kept.clone()
        seen[:, 0] = True  # of a blank text too: nothing may be divided by nothing
        # A mask of four axes is taken as it is: one of two would be left out where no text of a batch is padded.
        # Whatever is hidden gets a weight of exactly nothing, in half precision too.
        hidden = torch.zeros(seen.shape, device=rows.device).masked_fill(~seen, _HIDDEN)
        states = self.network(input_ids=ids, attention_mask=hidden[:, None, None, :]).last_hidden_state
        return self.head(SCALE * pooled(states, kept))

    @property
    def trained(self) -> nn.ModuleList:
        """The layers that are trained: the head, and the second factor of every update."""
        return nn.ModuleList([self.head, *(m.up for m in self.network.modules() if isinstance(m, LowRank))])

    def update(self) -> Update:
        """The updates as they are now."""
        found = {
            path: (layer.down.weight.detach().cpu().numpy().copy(), layer.up.weight.detach().cpu().numpy().copy())
            for path, layer in self.network.named_modules() if isinstance(layer, LowRank)
        }  # fmt: skip
        return Update(found)


@dataclass(frozen=True, eq=False)
class Update:
    """Trained updates of an encoder.

    Attributes:
        layers: (first factor, second factor) by the name of their layer in the encoder's network.
    """

    layers: Mapping[str, tuple[np.ndarray, np.ndarray]]

    def tensors(self) -> dict[str, np.ndarray]:
        """Arrays by name, for a model folder."""
        return {f"{PREFIX}{path}.{name}": value for path, pair in self.layers.items()
                for name, value in zip(("down", "up"), pair, strict=True)}  # fmt: skip

    @classmethod
    def read(cls, tensors: Mapping[str, np.ndarray], rank: int) -> Update:
        """The inverse of `tensors`, whatever else is among the arrays.

        Raises:
            WeightclipError: One of a pair is missing, or has another rank.
        """
        names = {name.removeprefix(PREFIX) for name in tensors if name.startswith(PREFIX)}
        paths = sorted({name.rpartition(".")[0] for name in names})
        if not paths or names != {f"{path}.{which}" for path in paths for which in ("down", "up")}:
            raise WeightclipError("model: the updates of its encoder are not complete.")
        pairs = {path: (tensors[f"{PREFIX}{path}.down"], tensors[f"{PREFIX}{path}.up"]) for path in paths}
        for path, (down, up) in pairs.items():
            if down.ndim != 2 or up.ndim != 2 or not len(down) == up.shape[1] <= rank:
                raise WeightclipError(f"model: the update of {path!r} is none of rank {rank}.")
        return cls(pairs)

    def applied(self, encoder: TextEncoder) -> TextEncoder:
        """The encoder with the updates added to its weights: an ordinary network again.

        Raises:
            WeightclipError: The encoder has no such layers.
        """
        network = copy.deepcopy(encoder.network)
        dense = {name: layer for name, layer in network.named_modules() if isinstance(layer, nn.Linear)}
        with torch.no_grad():
            for path, (down, up) in self.layers.items():
                layer = dense.get(path)
                if layer is None or tuple(layer.weight.shape) != (len(up), down.shape[1]):
                    raise WeightclipError(
                        f"model: encoder {encoder.name!r} has no layer {path!r} of its update's size."
                    )
                layer.weight += torch.from_numpy(np.array(up)) @ torch.from_numpy(np.array(down))
        return replace(encoder, network=network)


def head_weights(head: nn.Linear) -> tuple[np.ndarray, np.ndarray]:
    """Weight and bias of a head as a model takes them that reads numbers in [−1, 1], divided by √width."""
    with torch.no_grad():
        weight = head.weight.double() * (SCALE * math.sqrt(head.in_features))
        return weight.float().cpu().numpy(), head.bias.detach().float().cpu().numpy().copy()
