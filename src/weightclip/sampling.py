"""Poisson sampling: each record enters each draw independently with a public probability q."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data import default_collate as _default_collate

from weightclip._records import ArrayDataset as ArrayDataset
from weightclip._records import first_tensor, gatherer, pad_records, zero_records
from weightclip._streams import SAMPLING, Streams
from weightclip.errors import ContractError, WeightclipError

_TWO_PASSES = "the loader was at draw {}, its counter is at {}: leave one pass over the loader before the next begins"


@dataclass(frozen=True, eq=False)
class BatchInfo:
    """What the engine has to know about the physical batch that is handed out next.

    Attributes:
        draw: number of the sampled draw, counted over the life of the loader.
        piece: number of this physical batch within the draw.
        last: whether the draw ends with this piece; only then may a step be released.
        mask: (rows,) bool tensor, True where a row is a real record; None when all rows are.
        rows: number of rows of the tensors.
    """

    draw: int
    piece: int
    last: bool
    mask: Tensor | None
    rows: int


def poisson_indices(rng: np.random.Generator, q: float, n: int) -> np.ndarray:
    """Indices below `n`, each included independently with probability `q`, in increasing order.

    The gap between neighbours has P(gap > k) = (1 − q)^k. It is built as 1 + j + B·m with B a power of two near 1/q:
    the law factorises over j < B and m, so m is read off an exponential at resolution B·λ ≈ 1 and j is a uniform
    *integer*, accepted with probability (1 − q)^j ≥ 1/e. Reading a gap off one double instead would resolve a gap of
    10⁹ to seven digits only. Time and memory are O(q·n); the stream is consumed in a way that depends on `q` alone, so
    the indices below m are the same for every n ≥ m.

    Formal guarantees: for an ideal `rng` the inclusion indicators are i.i.d. Bernoulli(q), up to about 10⁻¹⁵ in total
    variation per gap; removing the last record changes no other indicator. `q` is public; `n` only cuts the sequence.

    Args:
        rng: source of randomness, used for this draw only.
        q: inclusion probability in (0, 1).
        n: number of records, below 2⁴⁶.
    """
    lam = -math.log1p(-q)  # P(gap > k) = exp(-lam * k), without cancellation for small q
    block = 1 << min(max(math.floor(-math.log2(lam)), 0), 52)
    found: list[np.ndarray] = []
    position, size = -1, 512
    while position < n:
        if block > 1:
            j = rng.integers(block, size=size)
            j = j[rng.random(size) < np.exp(-lam * j)]
        else:
            j = np.zeros(size, dtype=np.int64)
        with np.errstate(over="ignore"):  # a subnormal q may send m to infinity, which the next line cuts
            m = np.floor(rng.standard_exponential(j.size) / (lam * block))
        # Gaps beyond n all mean "past the end": cutting them there keeps the sums inside 64 bits.
        gap = np.minimum(1 + j + block * np.minimum(m, n // block + 1).astype(np.int64), n + 1)
        positions = position + np.cumsum(gap)
        found.append(positions)
        position = int(positions[-1]) if positions.size else position
        size = min(2 * size, 1 << 16)
    found[-1] = found[-1][: np.searchsorted(found[-1], n)]
    return np.concatenate(found)


class _Piece(NamedTuple):
    draw: int
    number: int
    last: bool
    indices: np.ndarray  # empty for an empty draw


class _Feed:
    """The batch sampler of the inner DataLoader: gives the pieces of the pass that is about to start."""

    def __init__(self) -> None:
        self.pieces: Iterator[_Piece] = iter(())

    def __iter__(self) -> Iterator[list[int]]:
        # An empty draw loads record 0 for its shapes and types; the loader blanks it.
        return (piece.indices.tolist() or [0] for piece in self.pieces)


@dataclass(frozen=True)
class _Collate:
    """The user's collate_fn, then padding: both run in the workers, before memory is pinned."""

    collate: Callable[[Any], Any]
    pad_to: int | None

    def __call__(self, records: Any) -> tuple[int, Any]:
        batch = self.collate(records)
        leaf = first_tensor(batch)  # `records` is no list where the data set's __getitems__ stacks by itself
        real = len(records) if leaf is None else leaf.shape[0] if leaf.ndim else 0
        return real, pad_records(batch, real, max(self.pad_to or 0, real))


class PoissonLoader:
    """Iterates over Poisson draws of a DataLoader's data set, in physical batches of bounded size.

    One pass is round(1/q) draws. Draw t is a function of (streams, t) alone: neither the number of records (beyond
    cutting the sequence off) nor the workers enter. The data set, collate_fn and worker settings of `data_loader` are
    taken over, and `data_loader` itself is left alone; its shuffling and drop_last have no meaning here.

    Formal guarantees: every record is in draw t with probability q, independently of all other records and draws
    (SOUNDNESS section 1, adding or removing one record). No draw is truncated, repeated or drawn again, and an empty
    one is handed out. q is a public constant; its default batch_size/len(dataset) declares the ratio public.

    Args:
        data_loader: the user's loader over a map-style data set, with the default samplers.
        sample_rate: q in (0, 1]; None: batch_size/len(dataset), at most 1.
        streams: `streams.numpy("sampling", t)` gives the generator of draw t.
        max_physical_batch_size: a larger draw is handed out in pieces of at most this many records.
        pad_to: every piece is padded with zero rows to exactly this size; implies max_physical_batch_size.
        steps_left: asked before each draw; 0 ends the pass (with a warning, once), None means no limit.
        on_batch: called with the :class:`BatchInfo` of each piece right before it is handed out.

    Attributes:
        dataset: the user's data set.
        sample_rate: q.
        expected_batch: q·len(dataset).
        draws: number of draws begun, which is the number of the next one. Set it only between passes.
        streams: source of the draws. Set it only between passes.
    """

    def __init__(
        self,
        data_loader: DataLoader,
        *,
        sample_rate: float | None,
        streams: Streams,
        max_physical_batch_size: int | None = None,
        pad_to: int | None = None,
        steps_left: Callable[[], int | None] = lambda: None,
        on_batch: Callable[[BatchInfo], None],
    ) -> None:
        n, batch_size = _check_loader(data_loader)
        q = min(1.0, batch_size / n) if sample_rate is None else float(sample_rate)
        if not 0.0 < q <= 1.0:
            raise WeightclipError(f"sample_rate must lie in (0, 1], got {sample_rate}")
        for name, value in (("max_physical_batch_size", max_physical_batch_size), ("pad_to", pad_to)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise WeightclipError(f"{name} must be a positive integer or None, got {value!r}")
        if None not in (pad_to, max_physical_batch_size) and pad_to != max_physical_batch_size:
            raise WeightclipError(
                f"pad_to={pad_to} sets the physical batch size: drop max_physical_batch_size={max_physical_batch_size}"
            )
        self.dataset = data_loader.dataset
        self.sample_rate = q
        self.expected_batch = q * n
        self.draws = 0
        self._unfinished: int | None = None  # the draw of which some pieces are still to come
        self._n = n
        self._draws_per_pass = max(1, round(min(1.0 / q, 2.0**62)))
        self._piece_size = pad_to or max_physical_batch_size
        self._pad_to = pad_to
        self.streams = streams
        self._steps_left = steps_left
        self._on_batch = on_batch
        self._warned = False
        fast = data_loader.num_workers == 0 and data_loader.collate_fn is _default_collate
        self._gather = gatherer(data_loader.dataset) if fast else None
        self._pin = bool(data_loader.pin_memory)
        self._feed = _Feed()
        self._inner = None if self._gather else _inner_loader(data_loader, self._feed, pad_to)

    def __len__(self) -> int:
        return self._draws_per_pass

    def __iter__(self) -> Iterator[Any]:
        start = self.draws
        batches: Iterator[tuple[int, Any]] | None = None
        pieces: Iterator[_Piece] = iter(())
        for t in range(start, start + self._draws_per_pass):
            if self._spent():
                return
            if self.draws != t:  # two passes at once would hand out the same draw twice
                raise ContractError(_TWO_PASSES.format(t, self.draws))
            if batches is None:
                # Workers run ahead of what is handed out; each piece waits here for its batch.
                pieces, ahead = itertools.tee(self._plan(start))
                batches = self._batches(ahead)
            self.draws, self._unfinished = t + 1, t
            last = False
            while not last:
                if self._unfinished != t:
                    raise ContractError(_TWO_PASSES.format(t, self.draws))
                real, batch = next(batches)
                piece = next(pieces)
                last = piece.last
                info, batch = self._describe(piece, real, batch)
                if last:
                    self._unfinished = None
                self._on_batch(info)
                yield batch

    def state_dict(self) -> dict[str, int]:
        """The number of draws handed out completely: a draw that was cut short is handed out again on resume."""
        return {"draws": self.draws - (self._unfinished == self.draws - 1)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue with the draw after those counted in `state`, or after those this loader has handed out completely.

        A draw may have been released: going back to it would release it once more, with fresh noise and no fresh
        sample.
        """
        draws = state.get("draws")
        if not isinstance(draws, int) or draws < 0:
            raise WeightclipError(f"loader state needs a count 'draws' >= 0, got {draws!r}")
        self.draws, self._unfinished = max(draws, self.state_dict()["draws"]), None

    def indices(self, draw: int) -> np.ndarray:
        """The record numbers of a draw; they are as private as the records themselves."""
        if self.sample_rate == 1.0:
            return np.arange(self._n)
        return poisson_indices(self.streams.numpy(SAMPLING, draw), self.sample_rate, self._n)

    def _plan(self, start: int) -> Iterator[_Piece]:
        for t in range(start, start + self._draws_per_pass):
            # With q = 1 a draw is 0, ..., n - 1, which is counted off piece by piece and never held as a whole.
            drawn = None if self.sample_rate == 1.0 else self.indices(t)
            total = self._n if drawn is None else drawn.size
            size = self._piece_size or max(1, total)
            count = max(1, -(-total // size))
            for number in range(count):
                low, high = number * size, min((number + 1) * size, total)
                part = np.arange(low, high) if drawn is None else drawn[low:high]
                yield _Piece(t, number, number == count - 1, part)

    def _batches(self, pieces: Iterator[_Piece]) -> Iterator[tuple[int, Any]]:
        """Batches in the order of `pieces`, padded, each with the number of records found in it."""
        if self._gather is None:
            assert self._inner is not None
            self._feed.pieces = pieces
            return iter(self._inner)
        return map(self._look_up, pieces)

    def _look_up(self, piece: _Piece) -> tuple[int, Any]:
        assert self._gather is not None
        batch = self._gather(piece.indices if piece.indices.size else np.zeros(1, dtype=np.int64))
        real = max(1, piece.indices.size)
        batch = pad_records(batch, real, self._pad_to or real)
        if self._pin and torch.cuda.is_available():
            batch = [t.pin_memory() if t.device.type == "cpu" else t for t in batch]
        return real, batch

    def _describe(self, piece: _Piece, loaded: int, batch: Any) -> tuple[BatchInfo, Any]:
        real = piece.indices.size
        if loaded != max(1, real):
            raise WeightclipError(
                f"collate_fn made {loaded} rows of {max(1, real)} records: it must keep every record, on dim 0"
            )
        if real == 0:
            batch = zero_records(batch)
        rows = self._pad_to or max(1, real)
        mask = None
        if real < rows:
            leaf = first_tensor(batch)
            mask = torch.arange(rows, device=None if leaf is None else leaf.device) < real
        return BatchInfo(piece.draw, piece.number, piece.last, mask, rows), batch

    def _spent(self) -> bool:
        if self._steps_left() != 0:
            return False
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"privacy budget spent after {self.draws} draws: the loader ends here; no further step may be released",
                stacklevel=3,
            )
        return True


def _check_loader(loader: DataLoader) -> tuple[int, int]:
    """Number of records and batch size of a loader that can be sampled; one-line errors for the others."""
    if not isinstance(loader, DataLoader):
        raise WeightclipError(f"data_loader must be a torch.utils.data.DataLoader, got {type(loader).__name__}")
    if isinstance(loader.dataset, IterableDataset):
        raise WeightclipError(
            "data_loader has an IterableDataset: Poisson sampling needs records by index; use a Dataset"
        )
    if loader.batch_sampler is None:
        raise WeightclipError("data_loader has batch_size=None: give batch_size (the expected size of a draw)")
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise WeightclipError("data_loader has a custom batch_sampler: draws must be Poisson; give batch_size instead")
    try:
        n = len(loader.dataset)  # type: ignore[arg-type]
    except TypeError as error:
        raise WeightclipError("data_loader's data set has no length: define __len__") from error
    if n == 0:
        raise WeightclipError("data_loader's data set is empty: there is nothing to sample from")
    sampler: Any = loader.sampler
    shuffled = type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == n
    if not (shuffled or type(sampler) is SequentialSampler) or sampler.data_source is not loader.dataset:
        raise WeightclipError("data_loader has a custom sampler: draws must be Poisson; use shuffle=True instead")
    return n, loader.batch_size


def _inner_loader(user: DataLoader, feed: _Feed, pad_to: int | None) -> DataLoader:
    """A DataLoader with the user's data set and workers, fed by our pieces."""
    # in_order is left at its default whatever the user set: each batch must meet the piece it was loaded for.
    return DataLoader(
        user.dataset,
        batch_sampler=feed,  # type: ignore[arg-type]
        collate_fn=_Collate(user.collate_fn, pad_to),
        num_workers=user.num_workers,
        pin_memory=user.pin_memory,
        timeout=user.timeout,
        worker_init_fn=user.worker_init_fn,
        multiprocessing_context=user.multiprocessing_context,
        generator=user.generator,
        prefetch_factor=user.prefetch_factor,
        persistent_workers=user.persistent_workers,
    )
