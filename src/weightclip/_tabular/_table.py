"""Tables as numbers: every column becomes float64, categories by their place in a public list or a public hash."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weightclip.errors import WeightclipError

from ._columns import BUCKETS, Column, canonical

_WORDS = {"true": 1.0, "false": 0.0}
BLOCK = 1 << 16  # rows handled at a time


@dataclass(frozen=True, eq=False)
class Table:
    """Raw values of a table: numbers as they are, categories as codes, NaN where a value is missing or unknown.

    Attributes:
        columns: What is publicly known of each column.
        values: In memory, or mapped from a file.  # records x columns, float64
        extra: One more column, the last, kept apart so that a mapped array need not be copied.
    """

    columns: tuple[Column, ...]
    values: np.ndarray
    extra: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.values)

    def blocks(self) -> Iterator[np.ndarray]:
        """The values, some rows at a time."""
        for start in range(0, len(self.values), BLOCK):
            block = np.asarray(self.values[start : start + BLOCK])
            yield block if self.extra is None else np.column_stack([block, self.extra[start : start + BLOCK]])


def bucket(value: str) -> int:
    """The public hash of a category."""
    return int.from_bytes(hashlib.blake2b(value.encode(), digest_size=8, person=b"wclip-bucket").digest(), "little") % (
        BUCKETS
    )


class Coder:
    """Codes of one categorical column: place in the declared list, or bucket of the hash; remembers what it saw."""

    def __init__(self, column: Column) -> None:
        self.declared = column.categories is not None
        self.known: dict[Any, float] = {}
        if column.categories is not None:
            self.places = {category: float(i) for i, category in enumerate(column.categories)}

    def __call__(self, values: Sequence[Any]) -> np.ndarray:
        known = self.known
        if len(known) > 1_000_000:  # a column of identifiers: forget, do not exhaust memory
            known.clear()
        return np.fromiter((known[v] if v in known else self._add(v) for v in values), np.float64, len(values))

    def _add(self, value: Any) -> float:
        text = canonical(value)
        if text is None:
            return math.nan  # NaN equals no key: it is looked at anew each time
        code = self.places.get(text, math.nan) if self.declared else float(bucket(text))
        self.known[value] = code
        return code


def is_frame(X: object) -> bool:
    """Whether X has named columns (pandas, polars, Arrow)."""
    return hasattr(X, "columns") or hasattr(X, "column_names")


def frame_columns(X: Any) -> dict[str, np.ndarray]:
    """Columns of a data frame or Arrow table as arrays: numbers as float64 (NaN: missing), anything else as objects."""
    if hasattr(X, "get_columns"):  # polars
        return {str(s.name): _from_polars(s) for s in X.get_columns()}
    if hasattr(X, "column_names") and hasattr(X, "column"):  # Arrow
        return {str(name): _from_arrow(X.column(name)) for name in X.column_names}
    names = [str(name) for name in X.columns]
    return {name: _from_pandas(X.iloc[:, i]) for i, name in enumerate(names)}


def _from_polars(series: Any) -> np.ndarray:
    if series.dtype.is_numeric():
        return np.asarray(series.to_numpy(), dtype=np.float64)  # nulls become NaN
    return _boxed(series.to_list())


def _from_arrow(column: Any) -> np.ndarray:
    kind = str(column.type)
    if kind.startswith(("int", "uint", "float", "double", "halffloat", "decimal")):
        return np.asarray(column.cast("double", safe=False).to_numpy(zero_copy_only=False), dtype=np.float64)
    return _boxed(column.to_pylist())


def _boxed(values: list[Any]) -> np.ndarray:
    out = np.empty(len(values), dtype=object)
    out[:] = values
    return out


def _from_pandas(series: Any) -> np.ndarray:
    kind = getattr(series.dtype, "kind", "O")
    if kind in "iuf":
        return series.to_numpy(dtype=np.float64, na_value=math.nan)
    values = np.array(series.astype(object), dtype=object)
    values[series.isna().to_numpy(dtype=bool)] = None
    return values


def array_columns(X: np.ndarray) -> dict[str, np.ndarray]:
    """Columns of a two-dimensional array, named by their number; objects that all are numbers become numbers."""
    if X.dtype.kind in "iufb":
        X = X.astype(np.float64)
        return {str(j): X[:, j] for j in range(X.shape[1])}
    return {str(j): _objects(X[:, j]) for j in range(X.shape[1])}


def _objects(values: np.ndarray) -> np.ndarray:
    for v in values:
        if not (v is None or np.isscalar(v)):
            raise TypeError(f"argument must be a string or a number, not {type(v).__name__!r}")
    if any(isinstance(v, (str, bytes)) for v in values):
        return values.astype(object)
    return np.array([math.nan if v is None else float(v) for v in values], dtype=np.float64)


def describe(name: str, values: np.ndarray) -> Column:
    """What a column's type alone says of it."""
    if values.dtype.kind == "f":
        return Column(name, "numeric")
    present = [v for v in values[:1000] if canonical(v) is not None]
    if present and all(type(v).__name__ in ("bool", "bool_") for v in present):
        return Column(name, "flag")
    return Column(name, "categorical")


def to_values(columns: Sequence[Column], arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Raw values of named columns.  # records x columns

    Raises:
        WeightclipError: A column is missing, or one declared numeric holds text.
    """
    missing = [c.name for c in columns if c.name not in arrays]
    if missing:
        raise WeightclipError(f"column {missing[0]!r} is missing from the table.")
    n = len(next(iter(arrays.values()))) if arrays else 0
    values = np.empty((n, len(columns)))
    for j, column in enumerate(columns):
        raw = arrays[column.name]
        if column.kind == "categorical":
            values[:, j] = Coder(column)(raw.tolist())
        else:
            values[:, j] = raw if raw.dtype.kind == "f" else to_numbers(column.name, raw.tolist())
    return values


def to_numbers(name: str, values: Sequence[Any], first_row: int | None = None) -> np.ndarray:
    """Numbers from text or objects; empty text and None are missing, true and false are 1 and 0.

    Raises:
        WeightclipError: A value is no number. Its text is not repeated: the message may travel further than the data.
    """
    try:
        return np.array([math.nan if v is None or v == "" else float(v) for v in values], dtype=np.float64)
    except (TypeError, ValueError):
        words = [_WORDS.get(v.lower(), v) if isinstance(v, str) else v for v in values]
        if words != list(values):
            return to_numbers(name, words, first_row)
        where = ""
        if first_row is not None:
            where = f" (row {first_row + next(i for i, v in enumerate(values) if not _is_number(v))})"
        raise WeightclipError(
            f"column {name!r} is numeric but holds a value that is no number{where}: "
            "declare it categorical in the schema, or clean it."
        ) from None


def _is_number(value: Any) -> bool:
    try:
        float(value or 0)
    except (TypeError, ValueError):
        return False
    return True
