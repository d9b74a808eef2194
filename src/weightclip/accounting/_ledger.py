"""The ledger of an engine: every release is counted in a file, durably, before it happens (SOUNDNESS Theorem 31)."""

from __future__ import annotations

import os
import secrets
import weakref
from pathlib import Path
from typing import Any

from weightclip.accounting._accounting import Adjacency, Mechanism, calibrate_sigma, epsilon
from weightclip.accounting._ledger_format import FORMAT, KEY, Book, chained, encode, parse, to_event
from weightclip.errors import ContractError, WeightclipError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


class Ledger:
    """A ledger held by one engine: locked, read, and written before every release.

    Args:
        path: The file; made if there is none.
        block: Charges reserved by one durable write. A run that is killed over-counts by less than one block.

    Formal guarantees:
        A number that :meth:`charge` returns is counted in the file, on the disk, and was never returned before, by this
        or any earlier engine: noise keyed by it never repeats. Not covered: someone who deletes the file, restores an
        older copy of it or writes a new one (a checkpoint that knows more than its ledger refuses to load), and disks
        that acknowledge what they have not written.
    """

    def __init__(self, path: str | os.PathLike[str], block: int = 1) -> None:
        self._fd, self._begun = -1, False
        self.fit: str | None = None  # a name that several runs have in common: those of one fit
        if isinstance(block, bool) or not isinstance(block, int) or block < 1:
            raise WeightclipError(f"ledger_block must be a whole number, at least 1, got {block!r}.")
        self.path, self.block = Path(os.path.abspath(path)), block
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
            self._lock()
            self._reload()
        except OSError as error:
            self.close()
            raise WeightclipError(f"cannot use the ledger {self.path} ({error.strerror or error}).") from error
        except BaseException:
            self.close()
            raise
        _OPEN.add(self)

    @property
    def charges(self) -> int:
        """Numbers given out so far, by all runs: the next one, while no one else writes."""
        return self.book.charges - self._unused

    def mechanisms(self) -> list[Mechanism]:
        """Everything charged so far, by all runs."""
        return self.book.mechanisms(self._unused)

    def state(self) -> dict[str, Any]:
        """Which ledger this is and how far it has come: JSON-ready."""
        return {"id": self.book.id or None, "charges": self.charges, "head": self.book.head or None}

    def mark(self) -> dict[str, Any]:
        """How far the ledger has come, for :meth:`counts_only`: JSON-ready."""
        return {**self.state(), "runs": len(self.book.runs)}

    def counts_only(self, fit: str, since: dict[str, Any]) -> bool:
        """Whether this is the ledger of :meth:`mark`, gone on, and every run since then is of this ``fit``."""
        if since["id"] is not None and (self.book.id != since["id"] or not self.knows(since["head"])):
            return False
        return all(run["public"].get("fit") == fit for run in self.book.runs[since["runs"] :])

    def knows(self, head: str) -> bool:
        """Whether some line, now or earlier, had this checksum."""
        return KEY + head.encode() + b'"}' in self.path.read_bytes()

    def begin(self, mechanism: Mechanism, adjacency: Adjacency, tail: float, public: dict[str, Any]) -> None:
        """Enter a run; its charges are applications of ``mechanism``, each giving away ``tail`` of delta."""
        if not self.book.head:
            fields = {"weightclip_ledger": FORMAT, "id": secrets.token_hex(16), "adjacency": adjacency.value}
            line, check = chained(fields, "")
            os.ftruncate(self._fd, 0)
            self._put(line, 0)
            _sync_folder(self.path.parent)
            self.book = Book(fields["id"], adjacency, check, end=len(line))
        if self.book.adjacency is not adjacency:
            raise ContractError(
                f"ledger {self.path} counts {self.book.adjacency.name}, this engine {adjacency.name}: use another one."
            )
        public = public if self.fit is None else {**public, "fit": self.fit}
        self._append({"run": secrets.token_hex(8), "block": self.block, "event": encode(to_event(mechanism)),
                      "label": mechanism.label, "tail": tail, "public": public})  # fmt: skip
        self._begun = True

    def charge(self, left: int | None = None) -> int:
        """The number of the next release, on the disk when this returns; ``left`` steps end the budget, and blocks."""
        self._refuse()
        if self._unsure:  # a write was interrupted: what the file says, counts
            self._reload()
        book = self.book
        if not book.head or not self._begun:
            raise ContractError(f"ledger {self.path} has no run of this engine: call make_private first.")
        if self._unused == 0:
            count = self.block if left is None else max(1, min(self.block, left))
            self._append({"charge": book.charges, "count": count, "event": book.runs[-1]["event"]}, count)
        number = book.charges - self._unused
        self._unused -= 1
        return number

    def sigma_within(self, sigma: float, knorm: bool, target: float, delta: float, q: float, steps: int,
                     accountant: str, adjacency: Adjacency) -> float:  # fmt: skip
        """The noise with which the ledger's charges and ``steps`` - charges more stay within the target.

        That is ``sigma``, found for all steps alike, if it does (the same run, continued); otherwise the smallest that
        does.
        """
        past, left = self.mechanisms(), steps - self.charges
        if not past or left <= 0:
            return sigma
        more = Mechanism("pure", None, q, left, 1 / sigma) if knorm else Mechanism("gaussian", sigma, q, left)
        if epsilon([*past, more], delta, accountant, adjacency) <= target:
            return sigma
        if knorm:
            raise WeightclipError(f"the charges in {self.path} leave too little of epsilon {target:g}: raise it.")
        return calibrate_sigma(target, delta, q, left, accountant, adjacency, past)

    def close(self) -> None:
        """Let another engine have the file; this one charges nothing any more."""
        if self._fd >= 0 and fcntl is not None:
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # also for a fork that has not yet closed its copy
        self._let_go()

    def _let_go(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _lock(self) -> None:
        if fcntl is None:
            raise WeightclipError("ledger= needs a system with file locks (Linux, macOS).")
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            here = any(o._fd >= 0 and os.path.sameopenfile(o._fd, self._fd) for o in _OPEN)
            who = "another engine of this process: call its detach() first" if here else "another process"
            raise ContractError(f"ledger {self.path} is in use by {who}.") from None

    def _reload(self) -> None:
        """Read the file; a torn last line gives way to a whole one that counts a block."""
        data = _read(self._fd)
        # one without a head stands for a file to which nothing was ever charged
        book = self.book = parse(data, self.path) or Book("", Adjacency.ADD_OR_REMOVE_ONE, "")
        self._unused, self._unsure, self._broken = 0, False, False
        if not book.head or book.end == len(data):
            return
        line = b""
        if book.torn:
            torn = {"charge": book.charges - book.torn, "count": book.torn, "event": book.runs[-1]["event"],
                    "recovered": True}  # fmt: skip
            line, book.head = chained(torn, book.head)
            _write(self._fd, line, book.end)  # over the torn bytes, so that at no moment they are not counted
        book.end, book.torn = book.end + len(line), 0
        os.ftruncate(self._fd, book.end)
        _sync(self._fd)

    def _append(self, fields: dict[str, Any], count: int = 0) -> None:
        self._refuse()
        line, check = chained(fields, self.book.head)
        self._unsure = True
        self._put(line, self.book.end)
        self.book.take(fields, check)
        self.book.end += len(line)
        self._unused, self._unsure = count, False

    def _put(self, line: bytes, at: int) -> None:
        """Write, and wait for the disk."""
        try:
            _write(self._fd, line, at)
            _sync(self._fd)
        except OSError as error:
            self._broken = True  # after a failed fsync nobody knows what is on the disk
            raise WeightclipError(
                f"ledger {self.path}: cannot write ({error.strerror or error}): nothing was released; start again."
            ) from error

    def _refuse(self) -> None:
        """Raise where a charge could not be trusted."""
        if self._fd < 0:
            raise ContractError(f"ledger {self.path} is closed, or was opened before this process was forked.")
        if self._broken:
            raise ContractError(f"ledger {self.path} could not be written before: start again with a new engine.")
        try:
            here, there = os.fstat(self._fd), os.stat(self.path)
        except FileNotFoundError:
            raise ContractError(f"ledger {self.path} was removed during the run: nothing more is released.") from None
        same = (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
        if not same or not (self._unsure or not self.book.head or here.st_size == self.book.end):
            raise ContractError(f"ledger {self.path} was changed by someone else: nothing more is released.")

    def __deepcopy__(self, memo: dict[int, Any]) -> Ledger:
        return self  # copies of an engine charge the same ledger

    def __reduce__(self) -> tuple[Any, ...]:
        raise ContractError(f"ledger {self.path} is held by this process and cannot be pickled.")

    def __del__(self) -> None:
        self.close()


_OPEN: weakref.WeakSet[Ledger] = weakref.WeakSet()


def _after_fork() -> None:
    """A forked process (a loader's worker) must neither charge nor keep the lock when its parent is killed."""
    for ledger in list(_OPEN):
        ledger._let_go()  # unlocking would take the parent's lock away


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _read(fd: int) -> bytes:
    parts, at = [], 0
    while part := os.pread(fd, 1 << 20, at):
        parts.append(part)
        at += len(part)
    return b"".join(parts)


def _write(fd: int, data: bytes, at: int) -> None:
    while data:
        done = os.pwrite(fd, data, at)
        data, at = data[done:], at + done


def _sync(fd: int) -> None:
    full = getattr(fcntl, "F_FULLFSYNC", None)  # macOS: fsync alone does not reach the disk
    if full is not None:
        fcntl.fcntl(fd, full)  # pyright: ignore[reportOptionalMemberAccess]
    else:
        os.fsync(fd)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
