"""Codes of feature maps on disk: encoding that takes long goes on where it ended, in several processes if wanted.

A folder's name tells the settings of a map and not its code: whoever changes how features are computed deletes it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from weightclip_studies.images._features import FeatureMap
from weightclip_studies.images._product import Features, collect

_SHARD = 500


@dataclass(frozen=True)
class StoredCodes:
    """A feature map whose codes are kept in shards of a folder; the folder's name tells the map and its passes.

    Attributes:
        feature_map: The map.
        folder: Where shards lie; processes that share it share the work.
    """

    feature_map: FeatureMap
    folder: Path

    def features(
        self, part: str, images: Tensor, labels: Tensor, chunk: int, check: Callable[[], None] = lambda: None
    ) -> Features:
        """Features of all images, as `FeatureMap.encode` gives them; ``check`` is called before each new shard."""
        if images.is_cuda:
            return self.feature_map.encode(images, labels, chunk)
        parts = [(start, min(start + _SHARD, len(images))) for start in range(0, len(images), _SHARD)]
        for start, stop in random.sample(parts, len(parts)):  # in any order: two processes rarely make the same shard
            if not self._path(part, start, stop).exists():
                check()
                self._write(self._path(part, start, stop), self.feature_map.codes(images[start:stop], chunk))
        codes = np.concatenate([np.load(self._path(part, *place)) for place in parts])
        return collect(torch.from_numpy(codes), labels)

    def _path(self, part: str, start: int, stop: int) -> Path:
        return self.folder / f"{part}-{start:06d}-{stop:06d}.npy"

    def _write(self, path: Path, codes: Tensor) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}")
        with scratch.open("wb") as file:
            np.save(file, codes.numpy())
        scratch.replace(path)
