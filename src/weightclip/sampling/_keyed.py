"""Records with randomness of their own: what ``__getitem__`` draws belongs to (secret root, draw, record)."""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Dataset

from weightclip.sampling._datasets import first_tensor, pad_records
from weightclip.sampling._draws import Piece
from weightclip.sampling._randomness import Generators, given_back


@functools.cache
def _generators() -> Generators:
    """Those of this process: the main one, or a worker."""
    return Generators()


class Wanted(NamedTuple):
    """One physical batch, as the inner DataLoader passes it to a worker."""

    indices: list[int]
    slots: np.ndarray | None
    rows: int | None  # of the padded batch; None: as many as there are records
    key: bytes  # of the draw, secret
    piece: int

    @classmethod
    def of(cls, piece: Piece, key: bytes, rows: int | None) -> Wanted:
        """What is to be loaded for a piece; one without records loads record 0 for its shapes, and is blanked."""
        some = piece.indices.size > 0
        return cls(piece.indices.tolist() or [0], piece.slots if some else None, rows, key, piece.place)

    def stream(self, label: bytes, number: int) -> bytes:
        """The key of one record, or of one piece."""
        return hashlib.blake2b(label + struct.pack("<q", number), key=self.key, digest_size=32).digest()


class Feed:
    """The batch sampler of the inner DataLoader: gives the pieces of the pass that is about to start."""

    def __init__(self) -> None:
        self.wanted: Iterator[Wanted] = iter(())

    def __iter__(self) -> Iterator[Wanted]:
        return self.wanted


class Fetched(NamedTuple):
    """Records on their way from the data set to collate_fn."""

    records: Any
    wanted: Wanted


class KeyedRecords(Dataset):
    """The user's data set, in the worker or here: each record is read with generators set from its own key.

    Formal guarantees:
        What ``dataset[i]`` draws from torch's, NumPy's and Python's global generators in draw t is a function of
        (secret root, t, i): the same for every order, number of workers and company of other records. A data set that
        loads a batch at once (``__getitems__``) draws from one secret stream for each piece. The user's states are the
        same before and after. Generators the data set makes for itself are its own affair.
    """

    def __init__(self, dataset: Any) -> None:
        object.__setattr__(self, "_dataset", dataset)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, wanted: Wanted) -> Fetched:
        generators, dataset = _generators(), self._dataset
        with given_back(generators):
            if getattr(dataset, "__getitems__", None):
                generators.seed(wanted.stream(b"records", wanted.piece))
                return Fetched(dataset.__getitems__(wanted.indices), wanted)
            records = []
            for index in wanted.indices:
                generators.seed(wanted.stream(b"record", index))
                records.append(dataset[index])
            return Fetched(records, wanted)

    def __getattr__(self, name: str) -> Any:  # get_worker_info().dataset is this object: users find their own in it
        if name == "_dataset" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return KeyedRecords, (self._dataset,)


class KeyedCollate:
    """The user's collate_fn with a key of its own, then padding: both run in the workers, before memory is pinned."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, loaded: Fetched) -> tuple[int, Any]:
        records, wanted = loaded
        generators = _generators()
        with given_back(generators):
            generators.seed(wanted.stream(b"collate", wanted.piece))
            batch = self.collate(records)
        leaf = first_tensor(batch)  # `records` is no list where the data set's __getitems__ stacks by itself
        real = len(records) if leaf is None else leaf.shape[0] if leaf.ndim else 0
        # a number of rows that is not that of the records is refused by the loader
        slots = wanted.slots if wanted.slots is not None and len(wanted.slots) == real else None
        return real, pad_records(batch, real, max(wanted.rows or 0, real), slots)
