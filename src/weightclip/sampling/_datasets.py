"""Records on dimension 0: memory-mapped arrays and Arrow files, batched look-up, zero rows in nested batches."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from weightclip.errors import WeightclipError

_ROWS = 1 << 16  # of a batch of a file that is written here


class ArrayDataset(Dataset):
    """Rows of arrays in memory or of memory-mapped ``.npy`` files, as tuples of tensors.

    Nothing is read before a row is asked for, and only that row is copied. A file given by its path is opened again
    in each worker; an array is pickled whole where workers are spawned, so large data should come as paths.

    Args:
        *arrays_or_paths: arrays, or paths of ``.npy`` files, all with the same number of rows.
    """

    def __init__(self, *arrays_or_paths: np.ndarray | str | os.PathLike[str]) -> None:
        self.sources = arrays_or_paths
        self._open()
        if not self.arrays:
            raise WeightclipError("ArrayDataset: no arrays; pass at least one array or path of a .npy file")
        lengths = [a.shape[0] if a.ndim else None for a in self.arrays]
        if None in lengths or len(set(lengths)) > 1:
            raise WeightclipError(f"ArrayDataset: arrays need one common number of rows, found {lengths}")

    def _open(self) -> None:
        self.arrays = tuple(_load(s) for s in self.sources)

    def __len__(self) -> int:
        return self.arrays[0].shape[0]

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        # np.array copies: a view of a read-only map would hand out tensors that must not be written to.
        return tuple(torch.from_numpy(_native(np.array(a[index]))) for a in self.arrays)

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, ...]]:
        return list(zip(*(column.unbind(0) for column in self.rows(np.asarray(indices, dtype=np.int64))), strict=True))

    def rows(self, indices: np.ndarray) -> list[Tensor]:
        """The rows at `indices`, one stacked tensor per array."""
        return [torch.from_numpy(_native(a[indices])) for a in self.arrays]

    def __getstate__(self) -> dict[str, Any]:
        # A memory map would be pickled as a full copy of the file; the path is enough.
        return {k: v for k, v in self.__dict__.items() if k != "arrays"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()


def _load(source: np.ndarray | str | os.PathLike[str]) -> np.ndarray:
    if isinstance(source, np.ndarray):
        return source.view(np.ndarray)
    try:
        array = np.load(source, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise WeightclipError(f"ArrayDataset: cannot map {os.fspath(source)!r} as a .npy file ({error})") from error
    if not isinstance(array, np.ndarray):
        raise WeightclipError(f"ArrayDataset: {os.fspath(source)!r} is not one .npy array; save each array on its own")
    return array.view(np.ndarray)


def _native(array: np.ndarray) -> np.ndarray:
    """`array` in the machine's byte order, the only one torch knows."""
    return array.astype(array.dtype.newbyteorder("="), copy=False)


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


Gather = Callable[[np.ndarray], list[Tensor]]


def gatherer(dataset: object) -> Gather | None:
    """Batched look-up that equals default collation of single records; None where there is no such short cut.

    Exact types only: a subclass may override ``__getitem__`` (augmentation, say), which the short cut would skip.
    """
    if type(dataset) is TensorDataset:
        tensors = dataset.tensors

        def look_up(indices: np.ndarray) -> list[Tensor]:
            index = torch.from_numpy(indices)
            on = {t.device: index.to(t.device) for t in tensors}  # one transfer per device, not per tensor
            return [t.index_select(0, on[t.device]) for t in tensors]

        return look_up
    if type(dataset) is ArrayDataset or type(dataset) is ArrowDataset:
        return dataset.rows
    if type(dataset) is Subset and (inner := gatherer(dataset.dataset)) is not None:
        chosen = np.asarray(dataset.indices, dtype=np.int64)
        # A subset may count from the end, as Python indexing does; index_select does not.
        chosen = np.where(chosen < 0, chosen + len(dataset.dataset), chosen) if (chosen < 0).any() else chosen  # type: ignore[arg-type]
        return lambda indices: inner(chosen[indices])
    return None


def first_tensor(batch: Any) -> Tensor | None:
    """The first tensor leaf of a nested batch, None without one."""
    if isinstance(batch, Tensor):
        return batch
    children = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return next((leaf for child in children if (leaf := first_tensor(child)) is not None), None)


def pad_records(batch: Any, real: int, rows: int, slots: np.ndarray | None = None) -> Any:
    """`batch` with zero records added: from `real` to `rows` records in every leaf.

    `batch`: nested tuples, lists and mappings of tensors with records on dimension 0, and of lists of strings; returned
    itself where nothing is added. `slots`: the row of each record; None: the first ones.
    """

    def tensor(t: Tensor, where: str) -> Tensor:
        if t.ndim == 0 or t.shape[0] != real:
            raise WeightclipError(
                f"batch{where} has shape {tuple(t.shape)} for {real} records: collate_fn must stack records on dim 0"
            )
        if slots is not None:
            return t.new_zeros((rows, *t.shape[1:])).index_copy_(0, torch.from_numpy(slots).to(t.device), t)
        return t if rows == real else torch.cat([t, t.new_zeros((rows - real, *t.shape[1:]))])

    def strings(s: Any, where: str) -> list[Any]:
        if rows == real and slots is None:
            return s
        if len(s) != real:
            raise WeightclipError(
                f"batch{where} has {len(s)} strings for {real} records: collate_fn must give one each"
            )
        padded = [type(s[0])() for _ in range(rows)]
        for place, text in zip(range(real) if slots is None else slots.tolist(), s, strict=True):
            padded[place] = text
        return padded

    return _map(batch, tensor, strings, same=rows == real and slots is None)


def zero_records(batch: Any) -> Any:
    """`batch` with every record replaced by zeros (strings: by empty ones); shapes and types stay."""
    return _map(batch, lambda t, _: torch.zeros_like(t), lambda s, _: [type(x)() for x in s], same=False)


def _map(batch: Any, tensor: Callable, strings: Callable, *, same: bool, where: str = "") -> Any:
    """Rebuild a nested batch leaf by leaf; with `same` the leaves are only checked, and `batch` is returned."""
    if isinstance(batch, Tensor):
        return tensor(batch, where)
    if isinstance(batch, Mapping):
        new = {k: _map(v, tensor, strings, same=same, where=f"{where}[{k!r}]") for k, v in batch.items()}
        if same or type(batch) is dict:
            return batch if same else new
        # A mapping of the user's own keeps its class and its other attributes.
        clone: Any = copy.copy(batch)
        for key, value in new.items():
            clone[key] = value
        return clone
    if isinstance(batch, (list, tuple)):
        if batch and all(isinstance(x, (str, bytes)) for x in batch):
            padded = strings(batch, where)
            return batch if same else tuple(padded) if isinstance(batch, tuple) else padded
        children = [_map(v, tensor, strings, same=same, where=f"{where}[{i}]") for i, v in enumerate(batch)]
        if same:
            return batch
        return type(batch)(*children) if hasattr(batch, "_fields") else type(batch)(children)
    if same or batch is None:
        return batch
    raise WeightclipError(
        f"batch{where} is a {type(batch).__name__}, which cannot hold padding: collate_fn must give tensors or strings"
    )
