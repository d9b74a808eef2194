"""Tables as numbers: every column becomes float64, categories by their place in a public list or a public hash."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weightclip.errors import WeightclipError
from weightclip.tabular._columns import BUCKETS, Column, canonical

_WORDS = {"true": 1.0, "false": 0.0}
_ARROW_NUMBERS = ("int", "uint", "float", "double", "halffloat", "decimal")
BLOCK = 1 << 16  # rows handled at a time
_KNOWN = 1_000_000  # buckets remembered of a column: one of identifiers must not exhaust memory


@dataclass(frozen=True, eq=False)
class Table:
    """Raw values of a table: numbers as they are, categories as codes, NaN where a value is missing or unknown."""

    columns: tuple[Column, ...]  # what is publicly known of each column
    values: np.ndarray  # in memory, or mapped from a file; records x columns, float64

    def __len__(self) -> int:
        return len(self.values)

    def blocks(self) -> Iterator[np.ndarray]:
        """The values, some rows at a time."""
        for start in range(0, len(self.values), BLOCK):
            yield np.asarray(self.values[start : start + BLOCK])


def bucket(value: str) -> int:
    """The public hash of a category."""
    data = value.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, person=b"wclip-bucket").digest(), "little") % BUCKETS


class Coder:
    """Codes of one categorical column: place in the declared list, or bucket of the hash.

    Formal guarantees:
        A value's code is a function of its own spelling (`canonical`) and of the public list. What is remembered for
        speed is remembered by that spelling, so earlier records cannot change the code of later ones.
    """

    def __init__(self, column: Column) -> None:
        if column.categories is None:
            self._code = functools.lru_cache(_KNOWN)(bucket)
        else:
            places = {category: float(i) for i, category in enumerate(column.categories)}
            self._code = lambda text: places.get(text, math.nan)

    def __call__(self, values: Sequence[Any]) -> np.ndarray:
        texts = (v if type(v) is str else canonical(v) for v in values)
        return np.fromiter((math.nan if t is None else self._code(t) for t in texts), np.float64, len(values))


def is_frame(X: object) -> bool:
    """Whether X has named columns (pandas, polars, Arrow)."""
    return hasattr(X, "columns") or hasattr(X, "column_names")


def frame_columns(X: Any) -> dict[str, np.ndarray]:
    """Columns of a data frame or Arrow table as arrays: numbers as float64 (NaN: missing), anything else as objects."""
    columns, to_array, _ = _opened(X)
    return {name: to_array(column) for name, column in columns}


def _opened(X: Any) -> tuple[list[tuple[str, Any]], Callable[[Any], np.ndarray], Callable[[Any], str | None]]:
    """Named columns of a table, and how its library's columns become arrays, and its types kinds."""
    if hasattr(X, "get_columns"):  # polars
        return [(str(s.name), s) for s in X.get_columns()], _from_polars, lambda s: _polars_kind(s.dtype)
    if hasattr(X, "column_names") and hasattr(X, "column"):  # Arrow
        return [(str(c), X.column(c)) for c in X.column_names], _from_arrow, lambda column: arrow_kind(column.type)
    columns = [(str(name), X.iloc[:, i]) for i, name in enumerate(X.columns)]
    return columns, _from_pandas, lambda series: _numpy_kind(series.dtype)


def _from_polars(series: Any) -> np.ndarray:
    if series.dtype.is_numeric():
        return np.asarray(series.to_numpy(), dtype=np.float64)  # nulls become NaN
    return _each(series.to_list, lambda i: series[i], len(series))


def _from_arrow(column: Any) -> np.ndarray:
    kind = str(column.type)
    if kind.startswith(_ARROW_NUMBERS):
        return np.asarray(column.cast("double", safe=False).to_numpy(zero_copy_only=False), dtype=np.float64)
    return _each(column.to_pylist, lambda i: column[i].as_py(), len(column))


def _each(whole: Callable[[], list[Any]], single: Callable[[int], Any], count: int) -> np.ndarray:
    """The values of a column as Python's; one that Python has none for (a date beyond its calendar) is missing."""
    values = _or_none(whole)
    if values is None:
        values = [_or_none(lambda i=i: single(i)) for i in range(count)]
    return np.fromiter(values, dtype=object, count=count)


def _or_none(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException:  # a panic of polars is no Exception; one odd value must not stop a fit
        return None


def _from_pandas(series: Any) -> np.ndarray:
    kind = getattr(series.dtype, "kind", "O")
    if kind in "iuf":
        return series.to_numpy(dtype=np.float64, na_value=math.nan)
    values = np.array(series.astype(object), dtype=object)
    values[series.isna().to_numpy(dtype=bool)] = None
    return values


def frame_kinds(X: Any) -> dict[str, str | None]:
    """Kind of each column of a data frame or Arrow table by its declared type; no value is looked at.

    None where a type says nothing: columns of Python objects.
    """
    columns, _, to_kind = _opened(X)
    return {name: to_kind(column) for name, column in columns}


def _polars_kind(dtype: Any) -> str | None:
    if dtype.is_numeric():
        return "numeric"
    name = str(dtype)
    return "flag" if name == "Boolean" else None if name.startswith("Object") else "categorical"


def pyarrow_for(path: Any) -> tuple[Any, Any]:
    """pyarrow and its Parquet part, which reading this file takes."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise WeightclipError(f"{path}: reading it needs pyarrow: pip install 'weightclip[table]'.") from error
    return pa, pq


def ipc_reader(pa: Any, source: Any) -> Any:
    """A reader of an Arrow file, or of an Arrow stream."""
    try:
        return pa.ipc.open_file(source)
    except pa.ArrowInvalid:
        source.seek(0)
        return pa.ipc.open_stream(source)


def arrow_kind(type_: Any) -> str:
    """Kind of a column of an Arrow table, by its type."""
    name = str(type_)
    return "numeric" if name.startswith(_ARROW_NUMBERS) else "flag" if name == "bool" else "categorical"


def _numpy_kind(dtype: Any) -> str | None:
    """Kind by a type of NumPy or pandas; None for Python objects."""
    if isinstance(dtype, np.dtype) and dtype.kind == "O":
        return None
    return {"i": "numeric", "u": "numeric", "f": "numeric", "b": "flag"}.get(getattr(dtype, "kind", "O"), "categorical")


def array_columns(X: np.ndarray) -> dict[str, np.ndarray]:
    """Columns of a two-dimensional array, named by their number."""
    if X.dtype.kind in "iuf":
        X = np.asarray(X, dtype=np.float64)
    elif X.dtype.kind == "O":
        for v in X.ravel():
            if not (v is None or np.isscalar(v) or hasattr(v, "__float__")):
                raise TypeError(f"argument must be a string or a number, not {type(v).__name__!r}")
    else:
        X = X.astype(object)
    return {str(j): X[:, j] for j in range(X.shape[1])}


def array_kinds(dtype: np.dtype, columns: int) -> dict[str, str | None]:
    """Kinds of the columns of an array by its type; None for Python objects (and lists, which have no type)."""
    return {str(j): _numpy_kind(dtype) for j in range(columns)}


def to_values(columns: Sequence[Column], arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Raw values of named columns, each converted on its own; all must be there.  # records x columns"""
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
            values[:, j] = raw if raw.dtype.kind == "f" else to_numbers(raw.tolist())
    return values


def to_numbers(values: Sequence[Any]) -> np.ndarray:
    """Numbers from text or objects, one by one: true and false are 1 and 0, whatever is no number is missing.

    Formal guarantees:
        Entry i is a function of value i alone, and no value raises: one odd record becomes one missing value.
    """
    try:
        return np.array([math.nan if v is None or v == "" else float(v) for v in values], dtype=np.float64)
    except Exception:  # one of them is no number: look at each
        return np.array([_number(v) for v in values], dtype=np.float64)


def _number(value: Any) -> float:
    if isinstance(value, str) and value.lower() in _WORDS:
        return _WORDS[value.lower()]
    try:
        return float(value)
    except Exception:  # text, a missing value of pandas, a number too large, somebody's own class
        return math.nan


def first_text(values: Sequence[Any], numbers: np.ndarray) -> int | None:
    """Place of the first value that is neither missing nor a number, if there is one; `numbers` are `to_numbers`."""
    for i in np.flatnonzero(np.isnan(numbers)).tolist():
        text = canonical(values[i])
        if text is not None and text.strip().lower() not in ("", "nan", "+nan", "-nan"):
            return i
    return None
