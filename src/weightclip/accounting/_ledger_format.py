"""The file format of the ledger: one JSON object a line, every line's checksum covers the line before.

A header, a line for every run, a line for every charge (or reserved block of charges) as an event of dp-accounting.
Lines cannot be changed, removed or moved unseen. The checksum is no signature: whoever may write the file can write a
new one.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import dp_accounting

from weightclip.accounting._accounting import Adjacency, Mechanism, epsilon
from weightclip.errors import WeightclipError

FORMAT = 1
_MAGIC = b'{"weightclip_ledger":'
KEY = b',"check":"'
_HEX = 32
_EVENTS = {c.__name__: c for c in (dp_accounting.PoissonSampledDpEvent, dp_accounting.GaussianDpEvent,
                                   dp_accounting.ZCDpEvent)}  # fmt: skip


# -- events of dp-accounting -------------------------------------------------------------------------------------------


def to_event(m: Mechanism) -> dp_accounting.DpEvent:
    """One application of a mechanism. Pure epsilon0-DP is exactly (rho = 0, xi = epsilon0)-zCDP."""
    bare = dp_accounting.ZCDpEvent(0.0, float(m.epsilon0)) if m.epsilon0 is not None else (
        dp_accounting.GaussianDpEvent(float(m.sigma or 0.0))
    )  # fmt: skip
    return dp_accounting.PoissonSampledDpEvent(float(m.q), bare)


def from_event(event: dp_accounting.DpEvent) -> Mechanism:
    """The inverse of :func:`to_event`."""
    q, bare = 1.0, event
    if isinstance(event, dp_accounting.PoissonSampledDpEvent):
        q, bare = event.sampling_probability, event.event
    if isinstance(bare, dp_accounting.GaussianDpEvent):
        return Mechanism("gaussian", bare.noise_multiplier, q, 1)
    if isinstance(bare, dp_accounting.ZCDpEvent) and bare.rho == 0:
        return Mechanism("pure", None, q, 1, bare.xi)
    raise WeightclipError(f"a ledger holds Gaussian and pure mechanisms, not {event}.")


def encode(event: dp_accounting.DpEvent) -> dict[str, Any]:
    """An event as JSON: its class and its fields, under dp-accounting's own names."""
    fields = {a.name: getattr(event, a.name) for a in type(event).__attrs_attrs__}  # pyright: ignore
    return {"class": type(event).__name__,
            **{k: encode(v) if isinstance(v, dp_accounting.DpEvent) else v for k, v in fields.items()}}  # fmt: skip


def decode(data: dict[str, Any]) -> dp_accounting.DpEvent:
    """The inverse of :func:`encode`."""
    fields: dict[str, Any] = {k: decode(v) if isinstance(v, dict) else v for k, v in data.items() if k != "class"}
    return _EVENTS[data["class"]](**fields)


# -- the file ----------------------------------------------------------------------------------------------------------


@dataclass
class Book:
    """What the whole lines of a ledger say, and what a torn last line is taken for."""

    id: str  # name of the ledger, random
    adjacency: Adjacency  # neighbouring relation of all its runs
    head: str  # checksum of the last line
    charges: int = 0  # number of charges
    runs: list[dict[str, Any]] = field(default_factory=list)  # public constants of every run
    torn: int = 0  # charges counted for a last line that is not whole: one block of the last run
    end: int = 0  # length of the whole lines
    _counts: dict[Mechanism, int] = field(default_factory=dict)
    _last: Mechanism | None = None
    _tail: float = 0.0

    def take(self, line: dict[str, Any], check: str) -> None:
        """Enter one line behind the others."""
        if "run" in line:
            if type(line["block"]) is not int or line["block"] < 1 or not 0 <= line["tail"] < 1:
                raise ValueError("block or tail out of range")
            self._last = replace(from_event(decode(line["event"])), label=line["label"])
            self.runs.append(line)
        else:
            if line["charge"] != self.charges or type(line["count"]) is not int or line["count"] < 1:
                raise ValueError(f"charge {line['charge']} where {self.charges} was due")
            if line["event"] != self.runs[-1]["event"]:
                raise ValueError("another mechanism than its run's")
            self._count(line["count"])
        self.head = check

    def count_torn(self) -> None:
        """A last line that is not whole was never released; it is counted all the same, as one block of its run."""
        if self.runs:  # before the first run nothing can have been charged
            self.torn = self.runs[-1]["block"]
            self._count(self.torn)

    def _count(self, count: int) -> None:
        assert self._last is not None
        self.charges += count
        self._counts[self._last] = self._counts.get(self._last, 0) + count
        self._tail += count * self.runs[-1]["tail"]

    def mechanisms(self, unused: int = 0) -> list[Mechanism]:
        """All that was charged; ``unused`` of the last run's charges are reserved, and not yet given out."""
        spent = {m: n - (unused if m == self._last else 0) for m, n in self._counts.items()}
        return [replace(m, steps=n) for m, n in spent.items() if n]

    def epsilon(self, delta: float, accountant: str = "pld") -> float:
        """Epsilon of every charge together. A part of delta covers draws beyond the slack for rounding."""
        return epsilon(self.mechanisms(), delta - self._tail, accountant, self.adjacency)


def parse(data: bytes, name: Any) -> Book | None:
    """The book of a ledger's bytes; None where not even the header is whole, so that nothing was ever charged.

    Formal guarantees:
        A line counts only if its checksum follows from the line before. The last one, if it is torn (no end of line,
        or zero bytes as a crash of the machine leaves them), counts as one block unless it would have entered a run:
        never fewer charges than releases, since a release waits for its whole line, and that for its run's.
    """
    lines = data.split(b"\n")
    rest = lines.pop()
    if not rest and lines and b"\0" in lines[-1]:
        rest = lines.pop()
    if not lines:
        if _MAGIC.startswith(rest[: len(_MAGIC)]) or not rest.strip(b"\0"):
            return None
        raise WeightclipError(f"{name} is not a weightclip ledger: choose another path.")
    book: Book | None = None
    for number, line in enumerate(lines):
        payload, check = _open(line, "" if book is None else book.head)
        if payload is None:
            if book is None and not line.startswith(_MAGIC):
                raise WeightclipError(f"{name} is not a weightclip ledger: choose another path.")
            raise WeightclipError(
                f"ledger {name}: line {number + 1} was changed, removed or moved (its checksum does not follow from "
                "the line before): restore the file."
            )
        try:
            fields = json.loads(payload)
            if book is None:
                if fields["weightclip_ledger"] != FORMAT:
                    raise ValueError(f"format {fields['weightclip_ledger']}, this version reads {FORMAT}")
                book = Book(fields["id"], Adjacency(fields["adjacency"]), check)
            else:
                book.take(fields, check)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise WeightclipError(f"ledger {name}: line {number + 1} cannot be read ({error}).") from error
        book.end += len(line) + 1
    assert book is not None
    if rest and not rest.startswith(b'{"run"'):  # a run that was not entered has charged nothing
        book.count_torn()
    return book


def read(path: str | Path) -> Book:
    """The book of a ledger file, for checking it; takes no lock and changes nothing."""
    try:
        book = parse(Path(path).read_bytes(), path)
    except OSError as error:
        raise WeightclipError(f"cannot read the ledger {path} ({error.strerror or error}).") from error
    if book is None:
        raise WeightclipError(f"the ledger {path} is empty: nothing was ever charged to it.")
    return book


def _check(payload: bytes, before: str) -> str:
    return hashlib.blake2b(before.encode() + payload, digest_size=_HEX // 2, person=b"wclip-ledger").hexdigest()


def chained(fields: dict[str, Any], before: str) -> tuple[bytes, str]:
    """A line and its checksum, behind a line whose checksum is ``before``."""
    payload = json.dumps(fields, separators=(",", ":")).encode()
    check = _check(payload, before)
    return payload[:-1] + KEY + check.encode() + b'"}\n', check


def _open(line: bytes, before: str) -> tuple[bytes | None, str]:
    """Contents and checksum of a line; no contents where the checksum does not follow from ``before``."""
    payload, check = line[: -len(KEY) - _HEX - 2] + b"}", line[-_HEX - 2 : -2]
    if line != payload[:-1] + KEY + check + b'"}' or _check(payload, before).encode() != check:
        return None, ""
    return payload, check.decode()
