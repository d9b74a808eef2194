"""Tables in files: CSV, Parquet and Arrow, read in blocks into a mapped array: memory does not grow with them."""

from __future__ import annotations

import csv
import gzip
import itertools
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from weightclip.errors import WeightclipError

from ._columns import Column, Schema, canonical
from ._table import Coder, Table, arrow_kind, first_text, frame_columns, to_numbers

_ROWS = 20_000
MISSING = frozenset({"", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "?"})

Block = dict[str, Any]  # column name -> values of some rows


@dataclass(frozen=True)
class File:
    """A table in a file; the ending of its name says which kind: .csv, .tsv (also .gz), .parquet, .arrow, .feather."""

    path: Path
    delimiter: str | None = None

    @property
    def is_text(self) -> bool:
        """Whether its values are text, whose types have to be inferred."""
        return self._ending in (".csv", ".tsv", ".txt")

    @property
    def _ending(self) -> str:
        suffixes = [s.lower() for s in self.path.suffixes]
        return suffixes[-2] if len(suffixes) > 1 and suffixes[-1] == ".gz" else (suffixes[-1:] or [""])[0]

    def blocks(self) -> Iterator[Block]:
        """Rows, some at a time, by column name; text as strings with None for missing.

        Raises:
            WeightclipError: The file cannot be read, is not UTF-8, is cut short, or rows differ in length.
        """
        try:
            if self.is_text:
                yield from self._text()
            elif self._ending in (".parquet", ".pq", ".arrow", ".feather", ".ipc"):
                yield from self._arrow()
            else:
                raise WeightclipError(
                    f"{self.path}: unknown kind of table; use .csv, .tsv, .parquet, .arrow or .feather."
                )
        except UnicodeDecodeError as error:
            raise WeightclipError(
                f"{self.path} is not UTF-8 (at byte {error.start} of a block): convert it, e.g. with iconv."
            ) from error
        except (OSError, EOFError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise WeightclipError(f"{self.path}: cannot read it ({reason}).") from error

    def header(self) -> list[str]:
        """Column names."""
        return list(next(iter(self.blocks())))

    def kinds(self) -> dict[str, str]:
        """Kinds of the columns by the file's own schema; text has none, and counts as numbers until shown otherwise."""
        if self.is_text:
            return {name: "numeric" for name in self.header()}
        import pyarrow as pa
        import pyarrow.parquet as pq

        schema = pq.read_schema(self.path) if self._ending in (".parquet", ".pq") else next(_ipc(pa, self.path)).schema
        return {field.name: arrow_kind(field.type) for field in schema}

    def _text(self) -> Iterator[Block]:
        opener = gzip.open if self.path.suffix.lower() == ".gz" else open
        delimiter = self.delimiter or ("\t" if self._ending == ".tsv" else ",")
        with opener(self.path, "rt", encoding="utf-8-sig", newline="") as file:  # type: ignore[operator]
            reader = csv.reader(file, delimiter=delimiter)
            try:
                names = next(reader, [])
                if not names:
                    raise WeightclipError(f"{self.path} is empty: it needs a header row.")
                if len(set(names)) != len(names):
                    raise WeightclipError(f"{self.path}: column {max(names, key=names.count)!r} appears twice.")
                first, empty = 2, True
                while rows := list(itertools.islice(reader, _ROWS)):
                    rows = [row for row in rows if row]  # blank lines
                    for i, row in enumerate(rows):
                        if len(row) != len(names):
                            raise WeightclipError(
                                f"{self.path}: row {first + i} has {len(row)} fields, the header has {len(names)}."
                            )
                    if rows:
                        cells = [[None if v in MISSING else v for v in column] for column in zip(*rows, strict=True)]
                        yield dict(zip(names, cells, strict=True))
                        empty = False
                    first += len(rows)
                if empty:
                    yield {name: [] for name in names}
            except csv.Error as error:
                raise WeightclipError(f"{self.path}: not a table of delimited text ({error}).") from error

    def _arrow(self) -> Iterator[Block]:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError as error:
            raise WeightclipError(f"{self.path}: reading it needs pyarrow: pip install 'weightclip[table]'.") from error
        try:
            if self._ending in (".parquet", ".pq"):
                batches = pq.ParquetFile(self.path).iter_batches(batch_size=_ROWS)
            else:
                batches = _ipc(pa, self.path)
            empty = True
            for batch in batches:
                empty = False
                yield frame_columns(pa.Table.from_batches([batch]))
            if empty:
                raise WeightclipError(f"{self.path} holds no rows.")
        except pa.ArrowException as error:
            first = str(error).splitlines()[0]
            raise WeightclipError(f"{self.path}: not a whole Parquet or Arrow file ({first}).") from error


def _ipc(pa: Any, path: Path) -> Iterator[Any]:
    with pa.memory_map(str(path)) as source:
        try:
            reader = pa.ipc.open_file(source)
            yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
        except pa.ArrowInvalid:
            source.seek(0)
            yield from pa.ipc.open_stream(source)


@dataclass(frozen=True, eq=False)
class Loaded:
    """A file read for training.

    Attributes:
        table: Features, mapped from a scratch file that has no name (nobody else can open it, no kill leaves it).
        target: Class codes or numbers, NaN where missing.
        classes: Class labels found or declared.
        inferred: Names of columns whose type was inferred from the values.
    """

    table: Table
    target: np.ndarray
    classes: tuple[str, ...]
    inferred: tuple[str, ...]


def load(file: File, target: str, schema: Schema, regression: bool = False) -> Loaded:
    """Read a file for training, in blocks; types that the schema does not say are inferred.

    A text column is numeric if every value in it is a number or missing; a first guess is revised by reading again.

    Args:
        file: The file.
        target: Name of the target column.
        schema: What is publicly known.
        regression: Whether the target is a number.
    """
    names = file.header()
    for name in [target, *schema.ignore, *(c.name for c in schema.columns)]:
        if name not in names:
            raise WeightclipError(f"{file.path} has no column {name!r}; it has {', '.join(names[:20])}.")
    used = [name for name in names if name != target and name not in schema.ignore]
    if not used:
        raise WeightclipError(f"{file.path}: no columns are left besides the target.")
    guesses: dict[str, Column] = {}
    while True:
        try:
            return _read(file, target, used, schema, guesses, regression)
        except _WrongGuess as wrong:
            guesses |= {name: Column(name, "categorical") for name in wrong.names}


class _WrongGuess(Exception):
    def __init__(self, names: list[str]) -> None:
        self.names = names


def _read(
    file: File, target: str, used: list[str], schema: Schema, guesses: dict[str, Column], regression: bool
) -> Loaded:
    kinds = file.kinds()
    columns: list[Column] = []
    coders: dict[str, Coder] = {}
    places: dict[str, int] = {c: i for i, c in enumerate(schema.classes or ())}
    n = 0
    with tempfile.TemporaryFile(prefix="weightclip-") as out:
        for block in file.blocks():
            if not columns:
                columns = [schema.column(c) or guesses.get(c) or Column(c, kinds[c]) for c in used]
                coders = {c.name: Coder(c) for c in columns if c.kind == "categorical"}
            rows = len(block[target])
            values = np.empty((rows, len(columns) + 1))
            wrong = []
            for j, column in enumerate(columns):
                try:
                    guessed = file.is_text and schema.column(column.name) is None
                    values[:, j] = _values(column, block[column.name], coders, n, strict=guessed)
                except WeightclipError:
                    wrong.append(column.name)
            if wrong:
                raise _WrongGuess(wrong)
            values[:, -1] = _target(target, block[target], places, schema.classes is None, regression, n)
            values.tofile(out)
            n += rows
        if n == 0:
            raise WeightclipError(f"{file.path} holds a header and no rows.")
        out.flush()
        mapped = np.memmap(out, dtype=np.float64, mode="r", shape=(n, len(columns) + 1))
    codes = np.array(mapped[:, -1])
    classes = tuple(places)
    if not regression and schema.classes is None:
        order = {label: i for i, label in enumerate(sorted(classes, key=_sort_key))}
        rank = np.array([*(order[c] for c in classes), math.nan])
        codes = rank[np.where(np.isnan(codes), len(classes), codes).astype(int)]
        classes = tuple(order)
    inferred = tuple(c.name for c in columns if file.is_text and schema.column(c.name) is None)
    return Loaded(Table(tuple(columns), mapped[:, :-1]), codes, classes, inferred)


def _values(column: Column, raw: Any, coders: dict[str, Coder], row: int, strict: bool) -> np.ndarray:
    if column.kind == "categorical":
        return coders[column.name](raw if isinstance(raw, list) else raw.tolist())
    if isinstance(raw, np.ndarray) and raw.dtype.kind == "f":
        return raw
    values = raw if isinstance(raw, list) else raw.tolist()
    numbers = to_numbers(values)
    if strict and (odd := first_text(values, numbers)) is not None:
        raise WeightclipError(
            f"column {column.name!r} is numeric but holds a value that is no number (row {row + 2 + odd}): "
            "declare it categorical in the schema, or clean it."
        )
    return numbers


def _target(name: str, raw: Any, places: dict[str, int], open_ended: bool, regression: bool, row: int) -> np.ndarray:
    if regression:
        return _values(Column(name, "numeric"), raw, {}, row, strict=False)
    labels = [canonical(v) for v in (raw if isinstance(raw, list) else raw.tolist())]
    if open_ended:
        for label in labels:
            if label is not None:
                places.setdefault(label, len(places))
    return np.array([math.nan if v is None else places.get(v, math.nan) for v in labels], dtype=np.float64)


def _sort_key(label: str) -> tuple[int, float, str]:
    try:
        return (0, float(label), label)
    except ValueError:
        return (1, 0.0, label)


def features(columns: Sequence[Column], block: Block, path: Path, row: int) -> np.ndarray:
    """Raw values of the columns a fitted model needs, from one block of a new file."""
    missing = [c.name for c in columns if c.name not in block]
    if missing:
        raise WeightclipError(f"{path} has no column {missing[0]!r}, which the model needs.")
    coders = {c.name: Coder(replace(c)) for c in columns if c.kind == "categorical"}
    arrays = [_values(c, block[c.name], coders, row, strict=True) for c in columns]
    return np.stack(arrays, axis=1)
