"""Tables in files: CSV, Parquet and Arrow, read in blocks into a mapped array: memory does not grow with them."""

from __future__ import annotations

import contextlib
import csv
import difflib
import gzip
import itertools
import math
import stat
import tempfile
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from weightclip.errors import WeightclipError
from weightclip.tabular._columns import Column, Schema, canonical
from weightclip.tabular._table import (
    Coder,
    Table,
    arrow_kind,
    first_text,
    frame_columns,
    ipc_reader,
    pyarrow_for,
    to_numbers,
)

_ROWS = 20_000
_FIELD = (1 << 31) - 1  # characters of a field: csv itself stops at 2^17, and one long text would end a training
_ARROW = (".parquet", ".pq", ".arrow", ".feather", ".ipc")
_NESTED = ("list", "large_list", "fixed_size_list", "struct", "map", "union", "dense_union", "sparse_union")
MISSING = frozenset({"", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "?"})

Block = dict[str, Any]  # column name -> values of some rows


class Source(Protocol):
    """A table that is read in blocks: a file, or one whose columns were made into others on the way."""

    @property
    def path(self) -> Path: ...  # where it is, for people
    @property
    def is_text(self) -> bool: ...  # whether its values are text, whose types have to be inferred
    def blocks(self, columns: Sequence[str] | None = None) -> Iterator[Block]: ...  # rows, some at a time
    def header(self) -> list[str]: ...  # column names
    def kinds(self) -> dict[str, Column]: ...  # what is declared of its columns
    def nested(self) -> set[str]: ...  # names of columns whose values are lists or records


@dataclass(frozen=True)
class File:
    """A table in a file; the ending of its name says which kind: .csv, .tsv (also .gz), .parquet, .arrow, .feather."""

    path: Path
    delimiter: str | None = None

    def __post_init__(self) -> None:
        if self.delimiter is not None and (len(self.delimiter) != 1 or self.delimiter in '"\r\n\0'):
            raise WeightclipError(
                f"--delimiter must be one character (not a quote or an end of line), got {self.delimiter!r}."
            )

    @property
    def is_text(self) -> bool:
        """Whether its values are text, whose types have to be inferred."""
        return self._ending in (".csv", ".tsv", ".txt")

    @property
    def _ending(self) -> str:
        suffixes = [s.lower() for s in self.path.suffixes]
        return suffixes[-2] if len(suffixes) > 1 and suffixes[-1] == ".gz" else (suffixes[-1:] or [""])[0]

    def blocks(self, columns: Sequence[str] | None = None) -> Iterator[Block]:
        """Rows, some at a time, by column name; text as strings with None for missing.

        With `columns` others are not converted: what is left out cannot fail.
        """
        with self._one_line():
            yield from self._text(columns) if self.is_text else self._arrow(columns)

    def header(self) -> list[str]:
        """Column names."""
        if self.is_text:
            return list(next(iter(self.blocks())))
        return list(self.kinds())

    def kinds(self) -> dict[str, Column]:
        """What the types that a Parquet or Arrow file declares say of its columns; empty for text.

        Formal guarantees:
            Reads the file's own list of types and no value: no record can change a kind.
        """
        fields = self._fields()
        kinds = {field.name: Column(field.name, arrow_kind(field.type)) for field in fields}
        if len(kinds) != len(fields):
            raise WeightclipError(f"{self.path}: two columns have the same name.")
        return kinds

    def types(self) -> dict[str, str]:
        """The types that a Parquet or Arrow file declares, in Arrow's words; empty for text."""
        return {field.name: str(field.type) for field in self._fields()}

    def nested(self) -> set[str]:
        """Names of columns whose values are lists or records."""
        return {name for name, type_ in self.types().items() if type_.startswith(_NESTED)}

    @contextlib.contextmanager
    def _one_line(self) -> Iterator[None]:
        """Whatever can go wrong while reading, as one line that repeats no value of the file."""
        try:
            if not self.is_text and self._ending not in _ARROW:
                raise WeightclipError(
                    f"{self.path}: unknown kind of table; use .csv, .tsv, .parquet, .arrow or .feather."
                )
            if not stat.S_ISREG(self.path.stat().st_mode):
                raise WeightclipError(f"{self.path}: cannot read it (it is no regular file, and is read twice).")
            yield
        except UnicodeDecodeError as error:
            raise WeightclipError(
                f"{self.path} is not UTF-8 (at byte {error.start} of a block): convert it, e.g. with iconv."
            ) from error
        except zlib.error as error:
            raise WeightclipError(f"{self.path}: cannot read it (its compression is damaged).") from error
        except (OSError, EOFError) as error:
            reason = getattr(error, "strerror", None) or ("it is cut short or damaged")
            raise WeightclipError(f"{self.path}: cannot read it ({reason}).") from error
        except ValueError as error:
            if isinstance(error, WeightclipError) or not type(error).__module__.startswith("pyarrow"):
                raise
            # Arrow's own text is left out: it may quote a value
            raise WeightclipError(
                f"{self.path}: not a whole Parquet or Arrow file ({type(error).__name__})."
            ) from error

    def _text(self, columns: Sequence[str] | None) -> Iterator[Block]:
        opener = gzip.open if self.path.suffix.lower() == ".gz" else open
        delimiter = self.delimiter or ("\t" if self._ending == ".tsv" else ",")
        with opener(self.path, "rt", encoding="utf-8-sig", newline="") as file:  # type: ignore[operator]
            reader = csv.reader(file, delimiter=delimiter)
            try:
                names = next(reader, [])
                if not names:
                    raise WeightclipError(f"{self.path} is empty: it needs a header row.")
                if len(set(names)) != len(names):  # where the header is missing, its names are values: not repeated
                    twice = [i + 1 for i, name in enumerate(names) if names.count(name) > 1][:2]
                    raise WeightclipError(
                        f"{self.path}: a column name appears twice (fields {twice[0]} and {twice[1]} of the header)."
                    )
                wanted = [i for i, name in enumerate(names) if columns is None or name in columns]
                first, empty = 2, True
                while rows := _some(reader):
                    rows = [row for row in rows if row]  # blank lines
                    for i, row in enumerate(rows):
                        if len(row) != len(names):
                            held = f"row {first + i} has {len(row)} fields, the header has {len(names)}"
                            hint = ": put values that hold the delimiter in quotes" if len(row) > len(names) else ""
                            raise WeightclipError(f"{self.path}: {held}{hint}.")
                    if rows:
                        yield {names[i]: [None if row[i] in MISSING else row[i] for row in rows] for i in wanted}
                        empty = False
                    first += len(rows)
                if empty:
                    yield {names[i]: [] for i in wanted}
            except csv.Error as error:
                raise WeightclipError(f"{self.path}: not a table of delimited text ({error}).") from error

    def _fields(self) -> list[Any]:
        """Names and types of a Parquet or Arrow file's columns; none of text."""
        if self.is_text:
            return []
        with self._one_line():
            pa, pq = pyarrow_for(self.path)
            if self._ending in (".parquet", ".pq"):
                return list(pq.read_schema(self.path))
            with pa.memory_map(str(self.path)) as source:
                return list(ipc_reader(pa, source).schema)

    def _arrow(self, columns: Sequence[str] | None) -> Iterator[Block]:
        pa, pq = pyarrow_for(self.path)
        empty = True
        if self._ending in (".parquet", ".pq"):
            with pq.ParquetFile(self.path) as source:
                for batch in source.iter_batches(batch_size=_ROWS, columns=None if columns is None else list(columns)):
                    empty = False
                    yield frame_columns(pa.Table.from_batches([batch]))
        else:
            with pa.memory_map(str(self.path)) as source:
                reader = ipc_reader(pa, source)
                streamed = not hasattr(reader, "num_record_batches")
                for batch in reader if streamed else map(reader.get_batch, range(reader.num_record_batches)):
                    empty = False
                    table = pa.Table.from_batches([batch])
                    yield frame_columns(
                        table if columns is None else table.select([c for c in table.column_names if c in columns])
                    )
        if empty:
            raise WeightclipError(f"{self.path} holds no rows.")


def _some(reader: Iterator[list[str]]) -> list[list[str]]:
    """The next rows; a field may be of any length: no single record may stop a reading."""
    before = csv.field_size_limit(_FIELD)
    try:
        return list(itertools.islice(reader, _ROWS))
    finally:
        csv.field_size_limit(before)


def refuse_one_class(path: Path, target: str, classes: Collection[str]) -> None:
    """Refuse labels that leave nothing to learn."""
    if len(classes) < 2:
        found = f"{len(classes)} class" if classes else "no class"
        raise WeightclipError(f"{path}: column {target!r} holds {found}: at least two are needed, or another --target.")


@dataclass(frozen=True, eq=False)
class Loaded:
    """A file read for training."""

    table: Table  # features, mapped from a scratch file that has no name (nobody else can open it, no kill leaves it)
    target: np.ndarray  # class codes or numbers, NaN where missing
    classes: tuple[str, ...]  # class labels found or declared
    inferred: tuple[str, ...]  # names of columns whose type was inferred from the values
    path: Path  # of the file
    name: str  # of the target column

    def codes(self) -> np.ndarray:
        """Codes of the classes; a missing label gets one that contributes nothing. One class is refused."""
        refuse_one_class(self.path, self.name, self.classes)
        missing = 2 if len(self.classes) == 2 else -1
        return np.where(np.isnan(self.target), missing, self.target).astype(np.int64)

    def notes(self, delta: float | None, n_records: int | None) -> list[str]:
        """What a report has to say of inferred types, and of a delta that nobody gave."""
        names = ", ".join(self.inferred)
        found = [f"the types of columns {names} were inferred from their values"] if names else []
        public = delta is None and n_records is None
        return found + ["delta was set from the number of records, which counts as public"] * public


def load(file: Source, target: str, schema: Schema, regression: bool = False) -> Loaded:
    """Read a file for training, in blocks; types that neither the schema nor the file declares are inferred.

    A text column is numeric if every value in it is a number or missing; a first guess is revised by reading again.
    Raw values are kept in a scratch file that has no name and that only its owner may read: however the process dies,
    the operating system frees it and nothing of the table stays behind.

    With `regression` the target is a number, else a class.
    """
    names = file.header()
    for name in [target, *schema.ignore, *(c.name for c in schema.columns)]:
        if name not in names:
            # a header may be missing, and the first record in its place: only what resembles the question is repeated
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"its header names {len(names)} others."
            raise WeightclipError(f"{file.path} has no column {name!r}: {hint}")
    used = [name for name in names if name != target and name not in schema.ignore]
    if not used:
        raise WeightclipError(f"{file.path}: no columns are left besides the target.")
    if nested := [name for name in [*used, target] if name in file.nested()]:
        raise WeightclipError(
            f"{file.path}: column {nested[0]!r} holds lists or records, not single values: leave it out (--ignore)."
        )
    guesses = file.kinds()
    while True:
        try:
            return _read(file, target, used, schema, guesses, regression)
        except _WrongGuess as wrong:
            guesses |= {name: Column(name, "categorical") for name in wrong.names}
        except OSError as error:
            raise WeightclipError(f"cannot set up a scratch file ({error.strerror or error}).") from error


class _WrongGuess(Exception):
    def __init__(self, names: list[str]) -> None:
        self.names = names


def _read(
    file: Source, target: str, used: list[str], schema: Schema, guesses: dict[str, Column], regression: bool
) -> Loaded:
    columns = [schema.column(c) or guesses.get(c) or Column(c, "numeric") for c in used]
    coders = {c.name: Coder(c) for c in columns if c.kind == "categorical"}
    places: dict[str, int] = {c: i for i, c in enumerate(schema.classes or ())}
    n = 0
    with tempfile.TemporaryFile(prefix="weightclip-") as out:
        for block in file.blocks([*used, target]):
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
            out.write(values.tobytes())
            n += rows
        if n == 0:
            raise WeightclipError(f"{file.path} holds a header and no rows.")
        out.flush()  # the mapping outlives the file's handle
        mapped = np.memmap(out, dtype=np.float64, mode="r", shape=(n, len(columns) + 1))  # type: ignore[arg-type]
    codes = np.array(mapped[:, -1])
    classes = tuple(places)
    if not regression and schema.classes is None:
        order = {label: i for i, label in enumerate(sorted(classes, key=_sort_key))}
        rank = np.array([*(order[c] for c in classes), math.nan])
        codes = rank[np.where(np.isnan(codes), len(classes), codes).astype(int)]
        classes = tuple(order)
    inferred = tuple(c.name for c in columns if file.is_text and schema.column(c.name) is None)
    return Loaded(Table(tuple(columns), mapped[:, :-1]), codes, classes, inferred, file.path, target)


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
    with contextlib.suppress(ValueError):
        if math.isfinite(number := float(label)):
            return (0, number, label)
    return (1, 0.0, label)


def features(columns: Sequence[Column], block: Block, path: Path, row: int) -> np.ndarray:
    """Raw values of the columns a fitted model needs, from one block of a new file."""
    missing = [c.name for c in columns if c.name not in block]
    if missing:
        raise WeightclipError(f"{path} has no column {missing[0]!r}, which the model needs.")
    coders = {c.name: Coder(c) for c in columns if c.kind == "categorical"}
    arrays = [_values(c, block[c.name], coders, row, strict=True) for c in columns]
    return np.stack(arrays, axis=1)
