"""Rows of memory-mapped Arrow files, by their number."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from weightclip.errors import WeightclipError

_ROWS = 1 << 16  # of a batch of a file that is written here


class ArrowDataset(Dataset):
    """Rows of a memory-mapped Arrow file (``.arrow``, ``.feather`` without compression), as tuples of tensors.

    Nothing is read before a row is asked for, and only that row is copied. The file is opened again in each worker.
    Columns hold numbers, booleans or lists of numbers of one fixed length; what is missing is 0, so that no record is
    refused for it.

    Args:
        path: The file. Parquet is compressed and has no rows to map: write it once with :meth:`from_parquet`.
        *columns: One entry of the tuple each: a column, or a list of columns that become one float32 vector.

    Example::

        data = ArrowDataset.from_parquet("table.parquet", "table.arrow", ["age", "hours"], "income")
        x, y = data[0]  # two float32 numbers, and the income
    """

    def __init__(self, path: str | os.PathLike[str], *columns: str | Sequence[str]) -> None:
        self.path, self.columns = os.fspath(path), columns
        if not columns or any(not c for c in columns):
            raise WeightclipError("ArrowDataset: name at least one column after the path.")
        self._open()

    @classmethod
    def from_parquet(
        cls, parquet: str | os.PathLike[str], path: str | os.PathLike[str], *columns: str | Sequence[str]
    ) -> ArrowDataset:
        """Write the columns of a Parquet file to an Arrow file at `path`, in blocks, and open it.

        The new file takes its place when it is whole; only its owner may read it. A call that is killed leaves a file
        that ends in .part, which only its owner may read either.
        """
        pa = _pyarrow()
        import pyarrow.parquet as pq

        names = [name for group in columns for name in ([group] if isinstance(group, str) else group)]
        folder, name = os.path.split(os.path.abspath(path))
        temporary = ""
        try:
            with pq.ParquetFile(parquet, memory_map=True) as source:
                _check_names(os.fspath(parquet), source.schema_arrow.names, names)
                wanted = list(dict.fromkeys(names))
                schema = pa.schema([source.schema_arrow.field(name) for name in wanted])
                handle, temporary = tempfile.mkstemp(prefix=f"{name}.", suffix=".part", dir=folder)  # this call's own
                with os.fdopen(handle, "wb") as file:
                    with pa.ipc.new_file(file, schema) as sink:
                        for batch in source.iter_batches(batch_size=_ROWS, columns=wanted):
                            sink.write_batch(batch.select(wanted))
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(temporary, path)
        except (OSError, pa.ArrowException) as error:
            raise WeightclipError(
                f"ArrowDataset: cannot write {os.fspath(parquet)!r} as an Arrow file ({type(error).__name__})."
            ) from error
        finally:
            if os.path.exists(temporary):  # not where it has taken its place
                os.unlink(temporary)
        return cls(path, *columns)

    def _open(self) -> None:
        pa = _pyarrow()
        try:
            reader = pa.ipc.open_file(pa.memory_map(self.path))
            before = pa.total_allocated_bytes()
            first = reader.get_batch(0) if reader.num_record_batches else None
        except (OSError, pa.ArrowException) as error:
            hint = "from_parquet writes it as one" if self.path.endswith((".parquet", ".pq")) else "is it one?"
            raise WeightclipError(f"ArrowDataset: cannot map {self.path!r} as an Arrow file: {hint}") from error
        if first is not None and pa.total_allocated_bytes() - before > first.nbytes // 2:
            raise WeightclipError(
                f"ArrowDataset: {self.path!r} is compressed and cannot be mapped: write it with compression=None."
            )
        groups = [[c] if isinstance(c, str) else list(c) for c in self.columns]
        _check_names(self.path, reader.schema.names, [name for group in groups for name in group])
        for group in groups:
            for name in group:
                _check_type(pa, reader.schema.field(name), alone=len(group) == 1)
        batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        self._ends = np.cumsum([0, *(batch.num_rows for batch in batches)])
        self._parts = {name: [b.column(name) for b in batches] for name in {n for group in groups for n in group}}
        self._types = {name: reader.schema.field(name).type for name in self._parts}

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        n = len(self)
        if not -n <= index < n:
            raise IndexError(index)
        return tuple(column[0] for column in self.rows(np.array([index % n], dtype=np.int64)))

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, ...]]:
        return list(zip(*(column.unbind(0) for column in self.rows(np.asarray(indices, dtype=np.int64))), strict=True))

    def rows(self, indices: np.ndarray) -> list[Tensor]:
        """The rows at `indices`, one stacked tensor for each entry of the tuple."""
        order = np.argsort(indices, kind="stable")
        back, ascending = np.argsort(order, kind="stable"), indices[order]
        cuts = np.searchsorted(ascending, self._ends)
        used = [i for i in range(len(cuts) - 1) if cuts[i] < cuts[i + 1]]
        local = [(i, ascending[cuts[i] : cuts[i + 1]] - self._ends[i]) for i in used]

        def column(name: str) -> np.ndarray:
            return np.concatenate([_taken(self._parts[name][i], rows, self._types[name]) for i, rows in local])[back]

        def entry(group: str | Sequence[str]) -> np.ndarray:
            if isinstance(group, str):
                return column(group)
            return np.stack([column(name).astype(np.float32) for name in group], axis=1)

        return [torch.from_numpy(np.ascontiguousarray(entry(group))) for group in self.columns]

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "columns": self.columns}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()


def _taken(part: Any, rows: np.ndarray, kind: Any) -> np.ndarray:
    """Some rows of one batch's column; only they are copied. Missing values become 0."""
    import pyarrow as pa

    taken = part.take(pa.array(rows))
    if not pa.types.is_fixed_size_list(kind):
        return (taken.fill_null(False if pa.types.is_boolean(kind) else 0) if taken.null_count else taken).to_numpy(
            zero_copy_only=False
        )
    values = taken.values.slice(taken.offset * kind.list_size, len(taken) * kind.list_size)
    found = (values.fill_null(0) if values.null_count else values).to_numpy(zero_copy_only=False)
    found = found.reshape(len(rows), kind.list_size)
    return np.where(taken.is_null().to_numpy(zero_copy_only=False)[:, None], 0, found) if taken.null_count else found


def _check_names(path: str, there: Sequence[str], names: Sequence[str]) -> None:
    for name in names:
        if list(there).count(name) != 1:
            raise WeightclipError(f"ArrowDataset: {path!r} has no column {name!r} (or several of that name).")


def _check_type(pa: Any, field: Any, alone: bool) -> None:
    kind, types = field.type, pa.types
    if types.is_fixed_size_list(kind) and alone:
        kind = kind.value_type
    if not (types.is_integer(kind) or types.is_floating(kind) or (types.is_boolean(kind) and kind == field.type)):
        raise WeightclipError(
            f"ArrowDataset: column {field.name!r} holds {field.type}: only numbers, booleans and, each on its own, "
            "lists of numbers of one fixed length become tensors."
        )


def _pyarrow() -> Any:
    try:
        import pyarrow as pa
        import pyarrow.ipc
    except ImportError as error:
        raise WeightclipError("ArrowDataset needs pyarrow: pip install 'weightclip[table]'.") from error
    return pa
