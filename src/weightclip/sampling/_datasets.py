"""Records on dimension 0: memory-mapped arrays, batched look-up, zero rows in nested batches."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from weightclip.errors import WeightclipError
from weightclip.sampling._arrow import ArrowDataset


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

    Args:
        batch: nested tuples, lists and mappings of tensors with records on dimension 0, and of lists of strings.
        real: number of records in `batch`.
        rows: number of records wanted; `batch` itself is returned when it equals `real`.
        slots: the row of each record; None: the first ones.

    Raises:
        WeightclipError: a tensor without records on dimension 0, or a leaf that cannot be padded.
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
