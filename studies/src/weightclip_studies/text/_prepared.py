"""What training needs of texts and encoder, in three small files: a machine that trains holds torch alone."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from weightclip.errors import WeightclipError
from weightclip.text import TextEncoder
from weightclip_studies.text._bert import Bert, load_bert, save_encoder
from weightclip_studies.text._data import Sentences

LONGEST = 64
"""Tokens that are read of a sentence: a public shape."""
SPLITS = ("train", "dev", "test")
_ENCODER, _TOKENS, _FEATURES = "encoder.safetensors", "tokens.npz", "features.npz"


@dataclass(frozen=True, eq=False)
class Prepared:
    """A folder that `prepare` wrote.

    Attributes:
        folder: Holds the encoder's weights, token numbers with labels, and frozen features; the last are only needed
            to train a head on them.
    """

    folder: Path

    @cached_property
    def digest(self) -> str:
        """Beginning of the SHA-256 of weights, tokens and labels."""
        found = hashlib.sha256()
        for name in (_ENCODER, _TOKENS):
            found.update(self._path(name).read_bytes())
        return found.hexdigest()[:12]

    def encoder(self) -> Bert:
        """The pretrained network, a new one at every call."""
        return load_bert(self._path(_ENCODER))

    def tokens(self, split: str) -> Tensor:
        """Token numbers, zeros behind a sentence's end.  # sentences x LONGEST"""
        return torch.from_numpy(self._arrays(_TOKENS)[split].astype(np.int64))

    def labels(self, split: str) -> Tensor:
        """0 for negative, 1 for positive."""
        return torch.from_numpy(self._arrays(_TOKENS)[f"{split}-labels"].astype(np.int64))

    def features(self, split: str) -> Tensor:
        """Vectors of length one."""
        return torch.from_numpy(self._arrays(_FEATURES)[split])

    def _arrays(self, name: str) -> Mapping[str, np.ndarray]:
        return np.load(self._path(name))

    def _path(self, name: str) -> Path:
        path = self.folder / name
        if not path.is_file():
            raise WeightclipError(f"{path} is missing: weightclip-study text --prepare writes it.")
        return path


def prepare(folder: Path, encoder: TextEncoder, data: Mapping[str, Sentences], features: bool = True) -> Prepared:
    """Write the files; those that are there already stay as they are.

    Args:
        folder: Where.
        encoder: The pretrained encoder.
        data: Sentences by the name of their part.
        features: Whether frozen features are wanted: minutes of one core for SST-2.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / _ENCODER).exists() or not (folder / _TOKENS).exists():
        ids = {name: _tokens(encoder, part) for name, part in data.items()}
        used = np.unique(np.concatenate([np.zeros(1, dtype=np.int64), *(rows.ravel() for rows in ids.values())]))
        save_encoder(folder / _ENCODER, encoder.network, torch.from_numpy(used), LONGEST)
        rows = {name: np.searchsorted(used, found).astype(np.uint16) for name, found in ids.items()}
        labels = {f"{name}-labels": part.labels.astype(np.uint8) for name, part in data.items()}
        np.savez_compressed(folder / _TOKENS, **rows, **labels)  # type: ignore[arg-type]
    if features and not (folder / _FEATURES).exists():
        found = {name: encoder.features(part.texts) for name, part in data.items()}
        np.savez(folder / _FEATURES, **found)  # type: ignore[arg-type]
    return Prepared(folder)


def _tokens(encoder: TextEncoder, data: Sentences) -> np.ndarray:
    rows = np.zeros((len(data), LONGEST), dtype=np.int64)
    for i, text in enumerate(data.texts):
        ids = encoder.tokens(text)[:LONGEST]
        rows[i, : len(ids)] = ids
    return rows
