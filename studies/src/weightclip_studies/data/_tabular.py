"""Reading the bundled tables: gzip, CSV and NumPy, checked by SHA-256, no data-frame library needed."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from weightclip.errors import WeightclipError

from ._schema import Description, Feature, describe


@dataclass(frozen=True, eq=False)
class TabularData:
    """A table with its raw values.

    Attributes:
        schema: The public description (title, task, licence, attribution, checksum ...).
        values: Column name to its raw values: float64 for numeric columns, strings for categorical ones. Read-only.
        target: Class code of each record, int64. Read-only.
    """

    schema: Description
    values: Mapping[str, np.ndarray]
    target: np.ndarray

    def __len__(self) -> int:
        return len(self.target)

    @property
    def name(self) -> str:
        """Short name of the set."""
        return self.schema.name

    @property
    def columns(self) -> tuple[Feature, ...]:
        """The attributes, in file order."""
        return self.schema.columns

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names; `target` holds places in this tuple."""
        return self.schema.classes

    def to_pandas(self):
        """The attributes as a pandas DataFrame, categorical columns with their public categories (extra `table`)."""
        import pandas as pd

        frame = {}
        for column in self.columns:
            values = self.values[column.name]
            if column.kind == "categorical":
                place = {category: code for code, category in enumerate(column.categories)}
                codes = [place.get(value, -1) for value in values.tolist()]  # -1: missing, as pandas writes it
                values = pd.Categorical.from_codes(codes, categories=list(column.categories), ordered=column.ordered)
            frame[column.name] = values
        return pd.DataFrame(frame)


class Split(NamedTuple):
    """Record numbers of the three disjoint parts of a table."""

    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray


def load(name: str, folder: Path | None = None) -> TabularData:
    """Read a tabular set after checking its SHA-256.

    Args:
        name: One of `names()`.
        folder: Where `<name>.csv.gz` lies; the copy bundled with the package if not given.

    Raises:
        WeightclipError: If the name is unknown, or the file is missing or not the published one.
    """
    schema = describe(name)
    source = (
        resources.files("weightclip_studies.data") / "files" if folder is None else Path(folder)
    ) / f"{name}.csv.gz"
    try:
        packed = source.read_bytes()
    except OSError as error:
        raise WeightclipError(
            f"data set {name!r}: cannot read {source}: reinstall the studies or fix folder="
        ) from error
    found = hashlib.sha256(packed).hexdigest()
    if found != schema.sha256:
        raise WeightclipError(
            f"data set {name!r}: {source} has SHA-256 {found}, expected {schema.sha256}: the file was changed, "
            "reinstall the studies"
        )
    header, *rows = csv.reader(io.StringIO(gzip.decompress(packed).decode("utf-8")))
    raw = dict(zip(header, zip(*rows, strict=True), strict=True))
    values = {column.name: _array(column, raw[column.name]) for column in schema.columns}
    target = np.array([schema.labels[label] for label in raw[schema.target]], dtype=np.int64)
    target.setflags(write=False)
    return TabularData(schema=schema, values=MappingProxyType(values), target=target)


def split(data: TabularData, seed: int = 0) -> Split:
    """Shuffle the records and cut them 64 / 16 / 20 into training, validation and test part.

    The same seed gives the same parts on every machine: NumPy promises never to change the legacy generator's stream.

    Args:
        data: The table.
        seed: Seed of the shuffle.
    """
    n = len(data)
    order = np.random.RandomState(seed).permutation(n)
    n_test, n_valid = round(0.20 * n), round(0.16 * n)
    return Split(train=order[n_test + n_valid :], valid=order[n_test : n_test + n_valid], test=order[:n_test])


def _array(column: Feature, raw: tuple[str, ...]) -> np.ndarray:
    array = np.array(raw) if column.kind == "categorical" else np.array(raw, dtype=np.float64)
    array.setflags(write=False)
    return array
