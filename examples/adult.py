"""The Adult census table that lies beside the examples, and what is publicly known of its columns."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import numpy as np

FILE = Path(__file__).with_name("adult.csv.gz")
"""B. Becker and R. Kohavi (1996), UCI Machine Learning Repository, doi:10.24432/C5XW20, CC BY 4.0."""

_COLUMNS = json.loads(FILE.with_name("adult.json").read_text(encoding="utf-8"))
RANGES = {c["name"]: (float(c["low"]), float(c["high"])) for c in _COLUMNS if "low" in c}
"""Public ranges of the numbers, as the census extract states them."""
CATEGORIES = {c["name"]: tuple(c["categories"]) for c in _COLUMNS if "categories" in c}
"""Public lists of the categories."""
_LOGARITHMIC = {c["name"] for c in _COLUMNS if c.get("log")}  # numbers that span orders of magnitude


def load(rows: int | None = None) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Columns by name (numbers or texts) and the target, "<=50K" or ">50K", of the first ``rows`` records."""
    with gzip.open(FILE, "rt", encoding="utf-8", newline="") as file:
        header, *records = csv.reader(file)
    table = dict(zip(header, map(np.array, zip(*records[:rows], strict=True)), strict=True))
    income = table.pop("income")
    return {name: v.astype(np.float64) if name in RANGES else v for name, v in table.items()}, income


def encode(table: dict[str, np.ndarray]) -> np.ndarray:
    """Numbers scaled from their public range to [-1, 1], categories one-hot: nothing is read from the records.

    A category that is not on the list, and a missing value, become zeros.  # records x features, float32
    """
    blocks = []
    for name, values in table.items():
        if name in RANGES:
            low, high = RANGES[name]
            if name in _LOGARITHMIC:
                values, low, high = np.log1p(values), np.log1p(low), np.log1p(high)
            blocks.append((2 * np.clip((values - low) / (high - low), 0, 1) - 1)[:, None])
        else:
            blocks.append(values[:, None] == np.array(CATEGORIES[name])[None, :])
    return np.concatenate([block.astype(np.float32) for block in blocks], axis=1)


def parts(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Places of the training records (four fifths) and of the test records."""
    order = np.random.default_rng(seed).permutation(n)
    return order[n // 5 :], order[: n // 5]
