"""What is publicly known of each tabular set before any record is read: columns, categories, ranges, task, licence.

The values live in `schema.json`. Categories and ranges come from the data dictionaries of the UCI repository and from
what the columns mean (a grade runs to 20, a credit line to a million); they are public inputs of every guarantee.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

from weightclip.errors import WeightclipError


@dataclass(frozen=True)
class Feature:
    """One attribute of a table, as the public documentation describes it.

    Attributes:
        name: Its name in the header row.
        kind: `"numeric"` or `"categorical"`.
        low: Smallest value of the public range (numeric columns).
        high: Largest value of the public range (numeric columns).
        log: Whether the column spans orders of magnitude and is used as sign(x)·log(1 + |x|).
        flag: Whether the column only says yes (1) or no (0), so that its range needs no estimate.
        categories: The public list of values (categorical columns).
        ordered: Whether `categories` stands in a meaningful order.
        missing: The mark of a missing value, if the column has one.
    """

    name: str
    kind: Literal["numeric", "categorical"]
    low: float = 0.0
    high: float = 1.0
    log: bool = False
    flag: bool = False
    categories: tuple[str, ...] = ()
    ordered: bool = False
    missing: str | None = None


@dataclass(frozen=True)
class Description:
    """The public description of one tabular set.

    Attributes:
        name: Short name, as `load` takes it.
        title: Full name.
        task: What is predicted, in words.
        rows: Number of records.
        target: Column that holds the label.
        classes: Class names; a label's code is its place in this tuple.
        labels: Raw value of the target column to class code.
        dropped: Columns that are left out (record identifiers).
        columns: The attributes, in file order.
        licence: Licence of the data.
        attribution: Authors, year, repository and DOI.
        ranges: Where the public ranges come from.
        sha256: SHA-256 of the compressed file.
    """

    name: str
    title: str
    task: str
    rows: int
    target: str
    classes: tuple[str, ...]
    labels: Mapping[str, int]
    dropped: tuple[str, ...]
    columns: tuple[Feature, ...]
    licence: str
    attribution: str
    ranges: str
    sha256: str

    def __str__(self) -> str:
        numeric = sum(column.kind == "numeric" for column in self.columns)
        return "\n".join(
            (
                f"{self.name}: {self.title}",
                f"  task     {self.task} ({', '.join(self.classes)})",
                f"  records  {self.rows}, {numeric} numeric and {len(self.columns) - numeric} categorical columns",
                f"  ranges   {self.ranges}",
                f"  source   {self.attribution}; {self.licence}",
                f"  sha256   {self.sha256}",
            )
        )


def names() -> tuple[str, ...]:
    """Names of the bundled tabular sets, in alphabetical order."""
    return tuple(sorted(_raw()))


@functools.cache
def describe(name: str) -> Description:
    """The public description of a tabular set; reads no record.

    Args:
        name: One of `names()`.

    Raises:
        WeightclipError: If there is no such set.
    """
    if name not in _raw():
        raise WeightclipError(f"unknown data set {name!r}: choose one of {', '.join(names())}")
    raw = dict(_raw()[name])
    columns = tuple(_column(entry) for entry in raw.pop("columns"))
    return Description(
        name=name, columns=columns, classes=tuple(raw.pop("classes")), dropped=tuple(raw.pop("dropped")), **raw
    )


def _column(entry: Mapping[str, Any]) -> Feature:
    if "categories" in entry:
        return Feature(**{**entry, "kind": "categorical", "categories": tuple(entry["categories"])})
    return Feature(**{**entry, "kind": "numeric"})


@functools.cache
def _raw() -> dict[str, dict[str, Any]]:
    return json.loads(resources.files("weightclip_studies.data").joinpath("schema.json").read_text(encoding="utf-8"))
