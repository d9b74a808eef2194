"""The processes of one run, behind one interface: :class:`Ranks` is a single one, :class:`ManyRanks` several.

With several, rank 0 holds the ledger's file, and the others know what it has told them (:class:`SharedLedger`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from weightclip.accounting import Ledger, Mechanism
from weightclip.errors import ContractError

T = TypeVar("T")
Facts = Mapping[str, bytes]
_FACTS = 8  # at most, in one message of a fixed size
# names of torch 2.13 and, before it, of older ones
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
_LATE = "call torch.distributed.init_process_group() before PrivacyEngine(), and keep the group until training ends."


class Ranks:
    """One process: nobody to agree with, nothing to exchange.

    Attributes:
        rank: Number of this process; 0 holds the ledger, makes the noise and writes checkpoints.
        count: Number of processes.
        first: Whether this process charges and makes the noise.
        alone: Whether there is no other process: nothing below does anything then, but for the ledger and the check.
    """

    rank, count, first, alone = 0, 1, True, True

    def check(self) -> None:
        """Raise if the group of processes is not the one that the engine was made in."""
        if _world() != self.count:
            raise ContractError(f"processes came or went after the engine was made: {_LATE}")

    def ledger(self, path: Any, block: int) -> Ledger | SharedLedger:
        """The ledger of the run."""
        return Ledger(path, block)

    def agree(self, facts: Callable[[], Facts]) -> None:
        """Stop every process unless all have the same facts."""

    def tell(self, make: Callable[[], T]) -> T:
        """What rank 0 makes, on every rank; where it fails, it fails everywhere."""
        return make()

    def sum_to_first(self, tensor: Tensor) -> None:
        """On rank 0, in place: the sum over all ranks. What the others hold afterwards means nothing."""

    def sum_to_owners(self, parts: Tensor) -> Tensor:
        """The sum over all ranks of tensors with one part for each rank on dimension 0: this rank's part of it."""
        return parts

    def gather(self, part: Tensor) -> Tensor:
        """The parts of all ranks, one behind the other on dimension 0."""
        return part

    def spread(self, tensors: Iterable[Tensor]) -> None:
        """In place: what rank 0 holds."""

    def largest(self, values: Tensor) -> Tensor:
        """Entry by entry the largest of all ranks."""
        return values

    @contextlib.contextmanager
    def together(self, call: str = "") -> Iterator[None]:
        """Work that all ranks finish, or none of them goes on; ``call``: what the user has called, for errors."""
        yield


class ManyRanks(Ranks):
    """The processes of torch.distributed's default group.

    Formal guarantees:
        Nothing is drawn at random here. A message that did not arrive, or work that one rank left half-way, leaves the
        rank unable to exchange anything more: no later message can be taken for an earlier one. What :meth:`tell` sends
        exists when rank 0 has made it: a charge is durable before any other rank hears of it.
    """

    def __init__(self) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.first, self.alone = self.rank == 0, False
        self._kinds = dist.get_backend_config()  # such as "cpu:gloo,cuda:nccl"
        self._lost, self._inside = False, False
        on_cpu = "cpu:" in self._kinds
        self._device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())

    def ledger(self, path: Any, block: int) -> SharedLedger:
        return SharedLedger(self, path, block)

    def agree(self, facts: Callable[[], Facts]) -> None:
        mine = facts()
        assert len(mine) < _FACTS
        values = [",".join(mine).encode(), *mine.values()]
        digests = [hashlib.blake2b(value, digest_size=8).digest() for value in values]
        packet = np.frombuffer(b"".join(digests).ljust(8 * _FACTS, b"\0"), dtype="<i8").astype(np.int64)
        sent = torch.from_numpy(packet).to(self._device)
        found = [torch.empty_like(sent) for _ in range(self.count)]
        with self.together(", ".join(mine)):
            dist.all_gather(found, sent)
        table = torch.stack(found).cpu()
        for column, name in enumerate([f"what comes next (here: {', '.join(mine)})", *mine]):
            other = [rank for rank in range(self.count) if table[rank, column] != table[0, column]]
            if other:
                self._lost = True
                raise ContractError(
                    f"rank {self.rank} stops: ranks disagree on {name} (rank {', '.join(map(str, other))} and rank 0): "
                    "run the same script with the same arguments on all of them; nothing was released."
                )

    def tell(self, make: Callable[[], T]) -> T:
        failure: BaseException | None = None
        word: list[Any] = [None, None]
        if self.first:
            try:
                word = [make(), None]
            except BaseException as error:  # the others must hear of it before it goes on its way
                failure, word = error, [None, f"{type(error).__name__}: {error}"]
        with self.together():
            dist.broadcast_object_list(word, src=0, device=self._device)
        if failure is not None:
            raise failure
        if word[1] is not None:
            raise ContractError(f"rank {self.rank} stops with rank 0 ({word[1]}).")
        return word[0]

    def sum_to_first(self, tensor: Tensor) -> None:
        with self.together():
            self._on_a_device(tensor, lambda t: dist.reduce(t, dst=0, op=dist.ReduceOp.SUM))

    def sum_to_owners(self, parts: Tensor) -> Tensor:
        mine = parts.new_empty(parts.shape[0] // self.count, *parts.shape[1:])
        with self.together():
            _reduce_scatter(mine, parts.contiguous(), op=dist.ReduceOp.SUM)
        return mine

    def gather(self, part: Tensor) -> Tensor:
        whole = part.new_empty(part.shape[0] * self.count, *part.shape[1:])
        with self.together():
            _all_gather(whole, part.contiguous())
        return whole

    def spread(self, tensors: Iterable[Tensor]) -> None:
        with self.together():
            for tensor in tensors:
                self._on_a_device(tensor, lambda t: dist.broadcast(t, src=0))

    def largest(self, values: Tensor) -> Tensor:
        found = values.detach().clone()
        with self.together():
            self._on_a_device(found, lambda t: dist.all_reduce(t, op=dist.ReduceOp.MAX))
        return found

    @contextlib.contextmanager
    def together(self, call: str = "") -> Iterator[None]:
        """Inside, everything must go well: whatever interrupts it ends the exchange between ranks for good."""
        if self._inside:
            yield
            return
        if self._lost:
            raise ContractError(
                f"rank {self.rank} has lost the other ranks, or left them waiting: start all of them again and resume."
            )
        self._lost = self._inside = True
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, ContractError):
                raise
            text = " ".join(str(error).split())[:200]
            where = f" in {call}" if call else ""
            raise ContractError(
                f"rank {self.rank} has lost the other ranks{where} ({text}): all must make the same calls; start all "
                "of them again and resume."
            ) from error
        finally:
            self._inside = False
        self._lost = False

    def _on_a_device(self, tensor: Tensor, exchange: Callable[[Tensor], Any]) -> None:
        """Exchange a tensor where a backend takes it: in place, contiguous."""
        here = f"{tensor.device.type}:" in self._kinds and tensor.is_contiguous()
        sent = tensor if here else tensor.to(self._device).contiguous()
        exchange(sent)
        if sent is not tensor:
            tensor.copy_(sent)


class SharedLedger:
    """A :class:`weightclip.accounting.Ledger` for all ranks. Charging is common work; reading waits for nobody.

    Formal guarantees:
        :meth:`charge` returns on any rank after the charge is on rank 0's disk, and the same number on every rank: a
        rank that dies before or after it costs at most one charge whose release nobody has seen. The count that a rank
        reads is the one rank 0's file held when all ranks last charged.
    """

    def __init__(self, ranks: ManyRanks, path: Any, block: int) -> None:
        self.path, self._ranks = Path(os.path.abspath(path)), ranks
        self._book: Ledger | None = None
        self._charges, self._state, self._mechanisms = 0, dict[str, Any](), list[Mechanism]()

        def opened() -> None:
            self._book = Ledger(path, block)

        ranks.agree(lambda: {"PrivacyEngine(ledger=...)": str(block).encode()})
        self._on_first(opened)

    def _on_first(self, act: Callable[[], Any]) -> Any:
        """Rank 0 acts on the file; all ranks get the outcome, and what the file says then."""

        def told() -> tuple[Any, int, dict[str, Any], list[Mechanism]]:
            outcome, book = act(), self._book
            assert book is not None
            return outcome, book.charges, book.state(), book.mechanisms()

        outcome, self._charges, self._state, self._mechanisms = self._ranks.tell(told)
        return outcome

    @property
    def charges(self) -> int:
        """Numbers given out so far."""
        return self._charges

    def mechanisms(self) -> list[Mechanism]:
        """Everything charged so far, by all runs."""
        return list(self._mechanisms)

    def state(self) -> dict[str, Any]:
        """Which ledger this is and how far it has come: JSON-ready."""
        return dict(self._state)

    def knows(self, head: str) -> bool:
        """Whether some line had this checksum; asked on rank 0, which has the file."""
        return self._file.knows(head)

    def begin(self, *run: Any) -> None:
        """Enter a run, as :meth:`weightclip.accounting.Ledger.begin`."""
        self._on_first(lambda: self._file.begin(*run))

    def charge(self, left: int | None = None) -> int:
        """The number of the next release, which is on rank 0's disk when this returns on any rank."""
        return self._on_first(lambda: self._file.charge(left))

    def sigma_within(self, *settings: Any) -> float:
        """As :meth:`weightclip.accounting.Ledger.sigma_within`, the same number on all ranks."""
        return self._on_first(lambda: self._file.sigma_within(*settings))

    def close(self) -> None:
        """Let another engine have the file."""
        if self._book is not None:
            self._book.close()

    @property
    def _file(self) -> Ledger:
        if self._book is None:
            raise ContractError(f"the ledger {self.path} is held by rank 0: ask there.")
        return self._book

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedLedger:
        return self  # copies of an engine charge the same ledger


def _world() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def find_ranks() -> Ranks:
    """The processes of this run: those of torch.distributed's default group, or this one alone."""
    if _world() > 1:
        return ManyRanks()
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started > 1 and dist.is_available() and dist.is_torchelastic_launched():
        raise ContractError(f"torchrun started {started} processes that do not know each other: {_LATE}")
    return Ranks()
