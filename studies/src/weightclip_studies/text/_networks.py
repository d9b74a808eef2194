"""Which part of a pretrained encoder is trained: a head on frozen features, low-rank updates, some layers, or all."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from weightclip.text import pooled
from weightclip_studies.text._bert import Bert
from weightclip_studies.text._prepared import Prepared

SCALE = 10.0
"""Length of the vector a head reads behind a tuned encoder: head and encoder then learn at one rate of Adam's."""


PLACES = ("value", "mix", "widen", "narrow")
"""Dense layers of each layer that are trained. Queries and keys stay as they are: on the random records by which the
engine tests that records do not touch each other, rounding of their tiny gradients looks like a touch."""


class Part(Protocol):
    """What is trained."""

    @property
    def name(self) -> str:
        """As the table has it."""
        ...

    def inputs(self, data: Prepared, split: str) -> Tensor:
        """Records as the model takes them."""
        ...

    def model(self, data: Prepared, seed: int) -> nn.Module:
        """A model from records to two scores, with its trainable parameters marked."""
        ...


@dataclass(frozen=True)
class Head:
    """A linear model on the encoder's frozen features."""

    name = "head"

    def inputs(self, data: Prepared, split: str) -> Tensor:
        """Vectors of length one."""
        return data.features(split)

    def model(self, data: Prepared, seed: int) -> nn.Module:
        """Two scores from a vector."""
        return _head(data.features("dev").shape[1], seed)


class _Tuned:
    """Parts that need the tokens: the whole encoder runs in every step."""

    name: str

    def inputs(self, data: Prepared, split: str) -> Tensor:
        """Token numbers, zeros behind a sentence's end."""
        return data.tokens(split)

    def model(self, data: Prepared, seed: int) -> nn.Module:
        """Encoder, mean over tokens, head; frozen but for the head and what `unfreeze` marks."""
        network = data.encoder().requires_grad_(False)
        self.unfreeze(network, torch.Generator().manual_seed(seed))
        return Classifier(network, _head(network.width, seed))

    def unfreeze(self, network: Bert, generator: torch.Generator) -> None:
        """Mark what is trained."""
        raise NotImplementedError


@dataclass(frozen=True)
class Lora(_Tuned):
    """Low-rank updates beside dense layers.

    Attributes:
        rank: Of each update.
        places: Names of the dense layers, in every layer of the encoder.
    """

    rank: int = 16
    places: tuple[str, ...] = PLACES
    name = "lora"

    def unfreeze(self, network: Bert, generator: torch.Generator) -> None:
        """Put an update beside each of them."""
        for layer in network.layers:
            for place in self.places:
                setattr(layer, place, LowRank(getattr(layer, place), self.rank, generator))


@dataclass(frozen=True)
class PlainLora(Lora):
    """Low-rank updates both of whose factors are trained, as they usually are."""

    def unfreeze(self, network: Bert, generator: torch.Generator) -> None:
        """Put an update beside each layer, and mark its first factor too."""
        super().unfreeze(network, generator)
        for layer in network.modules():
            if isinstance(layer, LowRank):
                layer.down.requires_grad_(True)


@dataclass(frozen=True)
class Last(_Tuned):
    """The last layers as they are.

    Attributes:
        layers: How many.
    """

    layers: int = 1
    name = "last"

    def unfreeze(self, network: Bert, generator: torch.Generator) -> None:
        """Mark their weights; queries, keys and normalisations stay frozen."""
        _mark(list(network.layers)[-self.layers :])


@dataclass(frozen=True)
class Full(_Tuned):
    """The dense layers of all layers; queries, keys, embeddings and normalisations stay frozen, which saves noise."""

    name = "full"

    def unfreeze(self, network: Bert, generator: torch.Generator) -> None:
        """Mark them."""
        _mark(network.layers)


@dataclass(frozen=True)
class Thawed(_Tuned):
    """Another part, with what it leaves frozen.

    Attributes:
        part: The other part.
        norms: Whether normalisations are trained too.
        embeddings: Whether the tables of words and places are.
    """

    part: _Tuned
    norms: bool = False
    embeddings: bool = False

    @property
    def name(self) -> str:  # type: ignore[override]
        """That of the other part."""
        return self.part.name

    def unfreeze(self, network: Bert, generator: torch.Generator) -> None:
        """Mark both."""
        self.part.unfreeze(network, generator)
        kinds = (nn.LayerNorm,) * self.norms + (nn.Embedding,) * self.embeddings
        for module in network.modules():
            if isinstance(module, kinds):
                module.requires_grad_(True)


class Classifier(nn.Module):
    """Token numbers to two scores."""

    def __init__(self, encoder: Bert, head: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head

    def forward(self, ids: Tensor) -> Tensor:  # sentences x tokens -> sentences x 2
        return self.head(SCALE * self.vectors(ids))

    def vectors(self, ids: Tensor) -> Tensor:
        """Vectors of length one.  # sentences x tokens -> sentences x width"""
        return pooled(self.encoder(ids).float(), ids != 0)


class LowRank(nn.Module):
    """A frozen dense layer plus a product of two thin ones: one random, orthonormal and fixed, one trained from zero.

    Because the first is orthonormal and fixed, the input factor of the trained layer is never longer than the input.
    """

    def __init__(self, base: nn.Linear, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        with torch.no_grad():
            self.down.weight.copy_(torch.linalg.qr(torch.randn(base.in_features, rank, generator=generator))[0].T)
            self.up.weight.zero_()
        self.down.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))

    def merged(self) -> nn.Linear:
        """One dense layer that computes the same."""
        layer = copy.deepcopy(self.base)
        with torch.no_grad():
            layer.weight += self.up.weight @ self.down.weight
        return layer


def _head(width: int, seed: int) -> nn.Linear:
    with torch.random.fork_rng():  # generators of GPUs too, which manual_seed reaches
        torch.manual_seed(seed)
        head = nn.Linear(width, 2)
        nn.init.normal_(head.weight, std=0.01)
    nn.init.zeros_(head.bias)
    return head


def _mark(layers: Iterable[nn.Module]) -> None:
    for layer in layers:
        for place in PLACES:
            getattr(layer, place).requires_grad_(True)
