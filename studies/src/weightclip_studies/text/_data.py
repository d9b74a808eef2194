"""SST-2: sentences of film reviews with their sentiment, found on disk and checked by SHA-256."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weightclip.errors import WeightclipError

_CHECKSUMS = {
    "train": "6ca4e5263d501878f4d62f077157b7bb7d9963542c55bc6800442efc42ffa92e",
    "dev": "154c711e8e71f1bb16d35f7cf2d0fe802da59a499d45cb421626abbc621e394c",
    "test": "19553efc6f7bac0b7fdd37d4e29dc37c15e9e779767249a16f857fbfcedb23fa",
}


@dataclass(frozen=True, eq=False)
class Sentences:
    """Texts and their labels, 0 for negative and 1 for positive."""

    texts: tuple[str, ...]
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.texts)


def load_sst2(split: str) -> Sentences:
    """One part of SST-2: "train" (60,614 sentences), "dev" (6,735, kept from training to choose by) or "test" (872).

    Looks in ``$WEIGHTCLIP_DATA/text/sst2``, ``$WEIGHTCLIP_DATA/sst2``, then in ``../shared/data`` beside a checkout.

    Raises:
        WeightclipError: The part is unknown, or its file is missing or changed.
    """
    if split not in _CHECKSUMS:
        raise WeightclipError(f"SST-2 has the parts {', '.join(_CHECKSUMS)}, not {split!r}.")
    for folder in _places():
        path = folder / f"{split}.tsv.gz"
        if path.is_file():
            content = path.read_bytes()
            if hashlib.sha256(content).hexdigest() != _CHECKSUMS[split]:
                raise WeightclipError(f"SST-2: {path} is not the file this study was made with (SHA-256 differs).")
            return _parse(content)
    raise WeightclipError("SST-2 is not here: set WEIGHTCLIP_DATA to a folder that holds sst2/train.tsv.gz and others.")


def _places() -> Iterator[Path]:
    if chosen := os.environ.get("WEIGHTCLIP_DATA"):
        yield Path(chosen) / "text" / "sst2"
        yield Path(chosen) / "sst2"
    yield Path(__file__).resolve().parents[5] / "shared" / "data" / "text" / "sst2"


def _parse(content: bytes) -> Sentences:
    with io.TextIOWrapper(gzip.GzipFile(fileobj=io.BytesIO(content)), encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return Sentences(tuple(r["sentence"] for r in rows), np.array([int(r["label"]) for r in rows]))
