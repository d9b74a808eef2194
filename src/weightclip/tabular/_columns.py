"""What is publicly known of a table's columns: kinds, ranges and categories, declared and never read from records."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weightclip.errors import WeightclipError
from weightclip.tabular._checks import check_schema, strict_json

KINDS = ("numeric", "flag", "categorical")
BUCKETS = 1 << 13  # of the public hash that stands for the values of a column whose categories are not declared


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        name: Its name, or its number for arrays without names.
        kind: "numeric", "flag" (0 or 1, true or false) or "categorical".
        low: Smallest value of its public range, None if unknown.
        high: Largest value of its public range, None if unknown.
        categories: Its public list of values (categorical columns), None if unknown.
    """

    name: str
    kind: str
    low: float | None = None
    high: float | None = None
    categories: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise WeightclipError(f"column {self.name!r}: type must be one of {', '.join(KINDS)}, got {self.kind!r}.")
        if (self.low is None) != (self.high is None):
            raise WeightclipError(f"column {self.name!r}: a public range needs both low and high.")
        if self.low is not None and self.high is not None:
            if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low <= self.high):
                raise WeightclipError(
                    f"column {self.name!r}: range [{self.low}, {self.high}] must be finite, low <= high."
                )
            if self.kind != "numeric":
                raise WeightclipError(f"column {self.name!r} is {self.kind}: it takes no range.")
        if self.categories is not None:
            if self.kind != "categorical":
                raise WeightclipError(f"column {self.name!r} is {self.kind}: it takes no categories.")
            if len(set(self.categories)) != len(self.categories):
                raise WeightclipError(f"column {self.name!r}: a category is listed twice.")

    @property
    def bounded(self) -> bool:
        """Whether its range is public."""
        return self.low is not None

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary; None fields are left out."""
        raw = {"name": self.name, "type": self.kind, **asdict(self)}
        return {k: v for k, v in raw.items() if v is not None and k != "kind"}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Column:
        """The inverse of `to_json`."""
        unknown = set(entry) - {"name", "type", "low", "high", "categories"}
        if unknown or "name" not in entry or "type" not in entry:
            raise WeightclipError(
                f"schema: a column needs 'name' and 'type' and may have 'low', 'high', 'categories'; got {dict(entry)}."
            )
        categories = entry.get("categories")
        return cls(
            str(entry["name"]), entry["type"], entry.get("low"), entry.get("high"),
            None if categories is None else tuple(canonical(c) or "" for c in categories),
        )  # fmt: skip


@dataclass(frozen=True)
class Schema:
    """Public description of a table: what its owner knows without looking at the records.

    Attributes:
        columns: The columns it describes; the others keep what their type says.
        ignore: Columns that are left out (identifiers).
        classes: Class labels of the target, in order, or None.
        target_range: Range of a numeric target, or None.

    Example:
        >>> schema = Schema.from_json({"columns": [{"name": "age", "type": "numeric", "low": 17, "high": 90}]})
        >>> schema.column("age").high
        90
    """

    columns: tuple[Column, ...] = ()
    ignore: tuple[str, ...] = ()
    classes: tuple[str, ...] | None = None
    target_range: tuple[float, float] | None = None

    def column(self, name: str) -> Column | None:
        """The description of a column, if there is one."""
        return next((c for c in self.columns if c.name == name), None)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        result: dict[str, Any] = {"columns": [c.to_json() for c in self.columns], "ignore": list(self.ignore)}
        if self.classes is not None:
            result["classes"] = list(self.classes)
        if self.target_range is not None:
            result["target_range"] = list(self.target_range)
        return result

    @classmethod
    def from_json(cls, data: Any) -> Schema:
        """Parse a schema, with one-line errors."""
        check_schema(data)
        columns = tuple(Column.from_json(entry) for entry in data.get("columns", []))
        names = [c.name for c in columns]
        if len(set(names)) != len(names):
            raise WeightclipError(f"schema: column {max(names, key=names.count)!r} is described twice.")
        classes, span = data.get("classes"), data.get("target_range")
        return cls(
            columns, tuple(map(str, data.get("ignore", ()))),
            None if classes is None else tuple(canonical(c) or "" for c in classes),
            None if span is None else (float(span[0]), float(span[1])),
        )  # fmt: skip

    @classmethod
    def read(cls, path: str | Path) -> Schema:
        """Read a schema file (JSON)."""
        try:
            return cls.from_json(strict_json(Path(path).read_bytes()))
        except OSError as error:
            raise WeightclipError(f"schema {path}: cannot read it ({error.strerror}).") from error
        except ValueError as error:
            if isinstance(error, WeightclipError):
                raise
            raise WeightclipError(f"schema {path}: not valid JSON ({error}).") from error


def canonical(value: object) -> str | None:
    """One spelling for a category, whether it comes from a file or a data frame; None for a missing value.

    Formal guarantees:
        A function of this one value: never of what was seen before, and never of Python's equality (True == 1,
        Decimal("1.0") == Decimal("1.00")). A value that cannot be spelled is missing; it never stops a fit.
    """
    if type(value) is str:
        return value
    try:
        return _spell(value)
    except Exception:  # objects of somebody's own class: whatever they do, they do to their own record alone
        return None


def _spell(value: Any) -> str | None:
    if isinstance(value, str):
        return str.__str__(value)
    kind = type(value).__name__
    if value is None or kind in ("NAType", "NaTType") or bool(value != value):
        return None
    if isinstance(value, bytes):
        return bytes.decode(value, "utf-8", "replace")
    if kind in ("bool", "bool_"):
        return "true" if value else "false"
    if isinstance(value, float) or kind.startswith("float"):
        number = float(value)
        return str(int(number)) if number.is_integer() else repr(number)
    return str.__str__(str(value))  # of a class of its own it would be compared and hashed by that
