"""Digests of what a seeded run's noise is keyed by: all settings, the weights and the sum itself."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from weightclip.distributed import Rows, Shards

if TYPE_CHECKING:
    from weightclip.engine._engine import PrivacyEngine

_CHUNK = 1 << 24  # words mixed at a time on a device
_GOLDEN = -0x61C8864680B583EB  # 2^64/golden ratio, as a signed number
_MIX = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # of splitmix64


def tensors_digest(tensors: Iterable[Tensor | None], key: bytes) -> bytes:
    """32 bytes that tell apart tensors (types, shapes, bits, order) under a secret key.

    Formal guarantees:
        On the CPU the bits go through SHA-256, which is collision-resistant. On a device they are mixed there into two
        sums of 64 bits under secret seeds (splitmix64 of each word and its place) and only these are transferred, once:
        two different sums meet with a probability of about 2^-128 for anyone who does not know the seed.
    """
    digest = hashlib.sha256(key)
    there: list[Tensor] = []
    for tensor in tensors:
        if tensor is None:
            digest.update(b"none")
            continue
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}{tensor.device.type}".encode())
        flat = tensor.detach().contiguous().reshape(-1)
        if tensor.is_cpu:
            digest.update(flat.view(torch.uint8).numpy().data)
        else:
            there.append(flat)
    if there:
        digest.update(_mixed(there, key).cpu().numpy().tobytes())
    return digest.digest()


def _mixed(flats: Sequence[Tensor], key: bytes) -> Tensor:
    """Two sums of 64 bits over all words of the tensors, on their device."""
    seeds = np.frombuffer(hashlib.blake2b(key, digest_size=16).digest(), "<i8").tolist()
    words = torch.cat([_words(flat) for flat in flats])
    sums = [torch.zeros((), dtype=torch.int64, device=words.device) for _ in seeds]
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK].long() & 0xFFFFFFFF
        place = torch.arange(start + 1, start + 1 + part.numel(), device=words.device) * _GOLDEN
        for j, seed in enumerate(seeds):  # a word in its place, twice through the mill: not linear in the word
            sums[j] += _mill(part ^ _mill(place + seed)).sum()
    return torch.stack(sums)


def _words(flat: Tensor) -> Tensor:
    if flat.element_size() % 4 == 0:
        return flat.view(torch.int32)
    return flat.view(torch.int16 if flat.element_size() == 2 else torch.uint8).to(torch.int32)


def _mill(z: Tensor) -> Tensor:
    """splitmix64's finaliser; shifts of signed numbers are masked to be logical."""
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _MIX[0]
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _MIX[1]
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def settings_digest(engine: PrivacyEngine) -> bytes:
    """All the engine knows of a run before its first draw, initial weights and frozen parts included; no data.

    Formal guarantees:
        Runs of one seed that differ in sigma, q, b, bounds, loss, allocation, mechanism, pieces, accounting or model
        have independent draws, masks and noise.
    """
    release, model = engine.training.release, engine.training.model
    texts = [
        engine.noise_multiplier, engine.loader.sample_rate, engine.expected_batch_size, engine.loader.cutter,
        engine.views, release.grid, engine.bounds, engine.criterion.loss, release.allocation, release.knorm,
        engine.adjacency, engine.accountant, engine.budget, *([] if release.exact is None else ["exact sums"]),
    ]  # fmt: skip
    words = [*map(repr, texts), _unsharded_text(model)]
    plain = json.dumps([re.sub(r" at 0x[0-9a-f]+", "", text) for text in words])
    state = (t for _, t in _whole_state(engine.shards, model))
    return hashlib.sha256(plain.encode() + tensors_digest(state, b"settings")).digest()


def _whole_state(shards: Shards | None, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name, in their order, each as a whole; all ranks ask together."""
    for name, t in sorted({**dict(model.named_parameters()), **dict(model.named_buffers())}.items()):
        if shards is not None and id(t) in shards.twins:
            rows = Rows(shards.ranks, t)
            yield name, rows.whole(rows.mine())
        else:
            yield name, t


def _unsharded_text(model: nn.Module) -> str:
    """The model in words, the same whether it is sharded or not."""
    return re.sub(r"\bFSDP(?=\w+\()", "", repr(model))
