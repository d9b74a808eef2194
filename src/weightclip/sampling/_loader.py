"""Poisson sampling: each record enters each draw independently with a public probability q."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data import default_collate as _default_collate

from weightclip.errors import ContractError, WeightclipError
from weightclip.noise import SAMPLING, Streams
from weightclip.sampling._datasets import first_tensor, gatherer, pad_records, zero_records
from weightclip.sampling._draws import Cutter, Piece, Share, largest_batch, poisson_indices
from weightclip.sampling._keyed import Feed, KeyedCollate, KeyedRecords, Wanted

SLOTS = "weightclip/slots"
RECORDS = "weightclip/records"
_ALL = Share()
# Not in_order, whatever the user set: each batch must meet the piece it was loaded for.
_TAKEN_OVER = ("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
               "prefetch_factor", "persistent_workers")  # fmt: skip
_TWO_PASSES = "another pass over the loader has begun: leave one pass before the next begins"


@dataclass(frozen=True, eq=False)
class BatchInfo:
    """What the engine has to know about the physical batch that is handed out next."""

    draw: int  #: a number of its own for each draw that is handed out; one that is handed out again gets a new one
    piece: int  #: number of this physical batch within the draw
    last: bool  #: whether the draw ends with this piece; only then may a step be released
    mask: Tensor | None  #: (rows,) bool tensor, True where a row is a real record; None when all rows are
    rows: int  #: number of rows of the tensors
    #: number of this physical batch within the whole draw, of which other processes may run other pieces
    place: int = 0
    first: bool = False  #: whether a pass over the data begins with it


class PoissonLoader:
    """Iterates over Poisson draws of a DataLoader's data set, in physical batches of bounded size.

    One pass is round(1/q) draws. Draw t is a function of (streams, t) alone: neither the number of records (beyond
    cutting the sequence off) nor the workers enter. The data set, collate_fn and worker settings of `data_loader` are
    taken over, and `data_loader` itself is left alone; its shuffling and drop_last have no meaning here.

    In an engine t is the number under which the draw will be charged: a draw that was left without a release is handed
    out again, so that nobody chooses among draws, and one that was charged never is, whatever is loaded or iterated.

    Formal guarantees: every record is in draw t with probability q, independently of all other records and draws
    (SOUNDNESS section 1, adding or removing one record). No draw is truncated, and an empty one is handed out. q is a
    public constant; its default batch_size/len(dataset) declares the ratio public. Every draw has the same number of
    pieces, ceil(b_max/max_physical_batch_size), but for a chance of 1e-25 (:func:`largest_batch`);
    with q = 1 it is ceil(n/max_physical_batch_size), and n is thereby declared public. Processes that share the draws
    run equally many pieces each. Random numbers that
    ``__getitem__`` and collate_fn draw come from secret streams, one for each (draw, record).

    Args:
        data_loader: the user's loader over a map-style data set, with the default samplers.
        sample_rate: q in (0, 1]; None: batch_size/len(dataset), at most 1.
        streams: `streams.numpy("sampling", t)` gives the generator of draw t.
        expected_batch_size: b, from which b_max follows; None: the loader's batch_size.
        max_physical_batch_size: a draw is handed out in pieces of at most this many records.
        strict: every piece has exactly max_physical_batch_size rows (without it: b_max), and records take secret random
            rows of them; the others are zeros.
        steps_left: asked before each draw; 0 ends the pass (with a warning, once), None means no limit.
        number: asked before each draw for its number; None: draws are counted.
        on_batch: called with the :class:`BatchInfo` of each piece right before it is handed out.
        share: which pieces of every draw this process runs, if several share the draws; all of them have the same data
            set and the same streams.

    Attributes:
        dataset: the user's data set.
        expected_batch: q·len(dataset).
        b_max: the largest draw that is allowed for.
        piece_size: max_physical_batch_size.
        stacks: whether records are stacked as they are; a collate_fn of the user's own sees those of a batch together.
        draws: number of the next draw, where draws are counted. Set it only between passes.
        streams: source of the draws. Set it only between passes.
    """

    def __init__(
        self,
        data_loader: DataLoader,
        *,
        sample_rate: float | None,
        streams: Streams,
        expected_batch_size: float | None = None,
        max_physical_batch_size: int | None = None,
        strict: bool = False,
        steps_left: Callable[[], int | None] = lambda: None,
        number: Callable[[], int] | None = None,
        on_batch: Callable[[BatchInfo], None],
        share: Share = _ALL,
    ) -> None:
        n, batch_size = _check_loader(data_loader)
        q = min(1.0, batch_size / n) if sample_rate is None else float(sample_rate)
        if not 0.0 < q <= 1.0:
            raise WeightclipError(f"sample_rate must lie in (0, 1], got {sample_rate}")
        size = max_physical_batch_size
        if size is not None and (not isinstance(size, int) or size < 1):
            raise WeightclipError(f"max_physical_batch_size must be a positive integer or None, got {size!r}")
        self.dataset = data_loader.dataset
        self._rate = q
        self.expected_batch = q * n
        self.b_max = largest_batch(expected_batch_size or batch_size, q, n)
        self.draws = 0
        self._unfinished: int | None = None  # the draw of which some pieces are still to come
        self._begun = -1  # a number no two draws that are handed out share, also where one is handed out again
        self._pass: object = None  # the pass that is under way
        self._n = n
        self._draws_per_pass = max(1, round(min(1.0 / q, 2.0**62)))
        most = n if q == 1.0 else self.b_max
        rows = share.rounds(most) if strict and size is None else size
        self.piece_size = size
        self.cutter = Cutter(rows, 1 if rows is None else -(-most // rows), strict, share.ranks)
        self._share = share
        self.streams = streams
        self._steps_left = steps_left
        self._number = number
        self._on_batch = on_batch
        self._warned = False
        self.stacks = data_loader.collate_fn is _default_collate
        fast = data_loader.num_workers == 0 and self.stacks
        self._gather = gatherer(data_loader.dataset) if fast else None
        self._pin = bool(data_loader.pin_memory)
        self._feed = Feed()
        self._inner = None
        if self._gather is None:  # a DataLoader with the user's data set and workers, fed by our pieces
            settings: dict[str, Any] = {name: getattr(data_loader, name) for name in _TAKEN_OVER}
            settings |= {"batch_sampler": self._feed, "collate_fn": KeyedCollate(data_loader.collate_fn)}
            self._inner = DataLoader(KeyedRecords(data_loader.dataset), **settings)

    def __len__(self) -> int:
        return self._draws_per_pass

    @property
    def sample_rate(self) -> float:
        """q, of every draw."""
        return self._rate

    @sample_rate.setter
    def sample_rate(self, value: float) -> None:
        raise ContractError("sample_rate is fixed: draws that were made would get another price. Use a new loader.")

    @property
    def strict(self) -> bool:
        """Whether all pieces have one public shape and records take secret places in them."""
        return self.cutter.shuffled

    @property
    def pieces(self) -> int:
        """Physical batches of every draw in this process, a public constant."""
        return self._share.rounds(self.pieces_of_all)

    @property
    def pieces_of_all(self) -> int:
        """Physical batches of every draw in all processes together."""
        return self.cutter.pieces_of(0)

    def __iter__(self) -> Iterator[Any]:
        mine, self._pass, first = object(), None, True
        ahead: _Ahead | None = None
        for done in range(self._draws_per_pass):
            if done and self._pass is not mine:
                raise ContractError(_TWO_PASSES)
            if self._spent():
                return
            t = self.draws if self._number is None else self._number()
            if ahead is None or ahead.streams is not self.streams or ahead.draw != t:
                # Workers run ahead of what is handed out; each piece waits here for its batch.
                ahead = _Ahead(self, t, self._draws_per_pass - done)
            self._pass, self.draws, self._unfinished = mine, t + 1, t
            self._begun = max(self._begun + 1, t)
            last = False
            while not last:
                if self._pass is not mine:  # two passes at once would hand out the same draw twice
                    raise ContractError(_TWO_PASSES)
                piece, real, batch = ahead.next()
                last = piece.last
                info, batch = self._describe(piece, real, batch, first)
                first = False
                if last:
                    self._unfinished = None
                self._on_batch(info)
                yield batch

    def state_dict(self) -> dict[str, int]:
        """The number of the next draw: one that was cut short is handed out again on resume."""
        if self._number is not None:
            return {"draws": self._number()}
        return {"draws": self.draws - (self._unfinished == self.draws - 1)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue with the draw after those counted in `state`; in an engine its charges alone decide which is next.

        Formal guarantees: a draw that an engine has charged is never handed out again, whatever `state` says.
        """
        draws = state.get("draws")
        if not isinstance(draws, int) or draws < 0:
            raise WeightclipError(f"loader state needs a count 'draws' >= 0, got {draws!r}")
        self.draws, self._unfinished = max(draws, self.state_dict()["draws"]), None

    def rewind(self, draws: int) -> None:
        """Continue with this draw, of which nothing was released, or the same will be: for exact resumption.

        Formal guarantees: in an engine this repeats no draw: its charges alone decide which is next.
        """
        self.draws, self._unfinished = draws, None

    def indices(self, draw: int) -> np.ndarray:
        """The record numbers of a draw; they are as private as the records themselves."""
        if self.sample_rate == 1.0:
            return np.arange(self._n)
        return poisson_indices(self.streams.numpy(SAMPLING, draw), self.sample_rate, self._n)

    def _plan(self, start: int, draws: int) -> Iterator[Piece]:
        for t in range(start, start + draws):
            # With q = 1 a draw is 0, ..., n - 1, which is counted off piece by piece and never held as a whole.
            drawn = None if self.sample_rate == 1.0 else self.indices(t)
            total = self._n if drawn is None else drawn.size
            rng = self.streams.numpy(SLOTS, t) if self.cutter.shuffled else None
            yield from self._share.of(self.cutter.cut(t, drawn, total, rng))

    def _batches(self, pieces: Iterator[Piece]) -> Iterator[tuple[int, Any]]:
        """Batches in the order of `pieces`, padded, each with the number of records found in it."""
        if self._gather is None:
            assert self._inner is not None
            streams, rows = self.streams, self._rows
            self._feed.wanted = (Wanted.of(p, streams.key(RECORDS, p.draw), rows) for p in pieces)
            return iter(self._inner)
        return map(self._look_up, pieces)

    @property
    def _rows(self) -> int | None:
        """Rows of every piece; None where a piece has as many as it has records."""
        return self.cutter.size if self.cutter.shuffled else None

    def _look_up(self, piece: Piece) -> tuple[int, Any]:
        assert self._gather is not None
        batch = self._gather(piece.indices if piece.indices.size else np.zeros(1, dtype=np.int64))
        real = max(1, piece.indices.size)
        batch = pad_records(batch, real, self._rows or real, piece.slots if piece.indices.size else None)
        if self._pin and torch.cuda.is_available():
            batch = [t.pin_memory() if t.device.type == "cpu" else t for t in batch]
        return real, batch

    def _describe(self, piece: Piece, loaded: int, batch: Any, first: bool) -> tuple[BatchInfo, Any]:
        real = piece.indices.size
        if loaded != max(1, real):
            raise WeightclipError(
                "collate_fn made more rows than records, or fewer: it must keep every record, on dim 0"
            )
        if real == 0:
            batch = zero_records(batch)
        rows = self._rows or max(1, real)
        mask = None
        if piece.slots is not None or real < rows:
            leaf = first_tensor(batch)
            mask = torch.zeros(rows, dtype=torch.bool)
            mask[slice(real) if piece.slots is None else torch.from_numpy(piece.slots)] = True
            mask = mask if leaf is None else mask.to(leaf.device)
        return BatchInfo(self._begun, piece.number, piece.last, mask, rows, piece.place, first), batch

    def _spent(self) -> bool:
        if self._steps_left() != 0:
            return False
        if not self._warned:
            self._warned = True
            draws = self.draws if self._number is None else self._number()
            warnings.warn(
                f"privacy budget spent after {draws} draws: the loader ends here; no further step may be released",
                stacklevel=3,
            )
        return True


class _Ahead:
    """Draws that are planned, and perhaps loaded, before they are handed out."""

    def __init__(self, loader: PoissonLoader, start: int, draws: int) -> None:
        self.draw, self.streams = start, loader.streams
        self._pieces, ahead = itertools.tee(loader._plan(start, draws))
        self._batches = loader._batches(ahead)

    def next(self) -> tuple[Piece, int, Any]:
        """The next piece, the number of records that were loaded for it, and its batch."""
        real, batch = next(self._batches)
        piece = next(self._pieces)
        self.draw = piece.draw + piece.last
        return piece, real, batch


def _check_loader(loader: DataLoader) -> tuple[int, int]:
    """Number of records and batch size of a loader that can be sampled; one-line errors for the others."""
    if not isinstance(loader, DataLoader):
        raise WeightclipError(f"data_loader must be a torch.utils.data.DataLoader, got {type(loader).__name__}")
    if isinstance(loader.dataset, IterableDataset):
        raise WeightclipError("data_loader has an IterableDataset: sampling needs records by index; use a Dataset")
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
        raise WeightclipError(
            "data_loader has a custom sampler (a DistributedSampler, say): draws must be Poisson, and all processes "
            "share them; use shuffle=True instead"
        )
    return n, loader.batch_size
