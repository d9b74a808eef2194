"""A results store: one SQLite file, one row per run, keyed by the hash of its settings.

Nothing is computed twice, also with several workers: a worker claims a key before it computes, and a claim ends with
its process (on another machine: after a while), so that what a killed worker had begun is redone. A row whose checksum
does not match its content is redone as well.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightclip.errors import WeightclipError

Key = Mapping[str, Any]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
    hash TEXT PRIMARY KEY, key TEXT NOT NULL, value TEXT, checksum TEXT, owner TEXT, claimed REAL, finished REAL
)
"""


def canonical(value: Any) -> str:
    """The one JSON text of a value: sorted keys, no spaces, shortest floats, -0 and whole floats written as integers.

    >>> canonical({"b": 1.0, "a": (True, None)})
    '{"a":[true,null],"b":1}'
    """
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, str, int)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise WeightclipError(f"a key must hold finite numbers, got {value}: leave the entry out or use None")
        return int(value) if value == int(value) and abs(value) < 2**53 else value
    if isinstance(value, Mapping):
        if not all(isinstance(k, str) for k in value):
            raise WeightclipError("a key must be a mapping with string keys")
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    raise WeightclipError(f"a key must be made of JSON values, got {type(value).__name__}")


def settings_hash(key: Key) -> str:
    """Hash of a key's canonical JSON."""
    return hashlib.sha256(canonical(key).encode()).hexdigest()[:32]


def _checksum(key: str, value: str) -> str:
    return hashlib.sha256(f"{key}\n{value}".encode()).hexdigest()[:16]


@dataclass(frozen=True)
class StoredRow:
    """A finished run."""

    key: dict[str, Any]
    value: dict[str, Any]
    finished: float


class Store:
    """Finished runs on disk.

    Args:
        path: SQLite file; made with its folder if missing.
        lapse: Seconds after which a claim without a result counts as abandoned.
    """

    def __init__(self, path: str | Path, lapse: float = 1800.0) -> None:
        self.path, self.lapse = Path(path), lapse
        self.owner = f"{platform.node()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._connect() as db:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute(_SCHEMA)

    @contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        try:
            db = sqlite3.connect(self.path, timeout=60.0, isolation_level=None)
        except sqlite3.Error as error:
            raise WeightclipError(f"results store: cannot open {self.path}: {error}") from error
        try:
            yield db
        except sqlite3.DatabaseError as error:
            raise WeightclipError(f"results store {self.path}: {error}; move the file away to start anew") from error
        finally:
            db.close()

    def get(self, key: Key) -> dict[str, Any] | None:
        """The result of a key, or None if it is missing, partial or damaged."""
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[Key]) -> list[dict[str, Any] | None]:
        """The results of several keys."""
        texts = [canonical(key) for key in keys]
        found: list[dict[str, Any] | None] = []
        with self._connect() as db:
            for text in texts:
                digest = hashlib.sha256(text.encode()).hexdigest()[:32]
                row = db.execute("SELECT key, value, checksum FROM runs WHERE hash = ?", (digest,)).fetchone()
                found.append(_read(row, text))
        return found

    def put(self, key: Key, value: Mapping[str, Any]) -> None:
        """Write a result; a key's later result replaces an earlier one."""
        self.put_many([(key, value)])

    def put_many(self, pairs: Iterable[tuple[Key, Mapping[str, Any]]]) -> None:
        """Write several results in one transaction."""
        rows = []
        for key, value in pairs:
            text, body = canonical(key), json.dumps(value, sort_keys=True)
            rows.append((settings_hash(key), text, body, _checksum(text, body), self.owner, time.time()))
        with self._connect() as db:
            db.execute("BEGIN IMMEDIATE")
            db.executemany(
                "INSERT OR REPLACE INTO runs (hash, key, value, checksum, owner, finished) VALUES (?, ?, ?, ?, ?, ?)",
                rows,
            )
            db.execute("COMMIT")

    def claim(self, keys: Sequence[Key]) -> list[bool]:
        """Take the keys that are neither done nor claimed by a living worker; which ones were taken."""
        taken = []
        with self._connect() as db:
            db.execute("BEGIN IMMEDIATE")
            for key in keys:
                text, digest = canonical(key), settings_hash(key)
                row = db.execute(
                    "SELECT key, value, checksum, owner, claimed FROM runs WHERE hash = ?", (digest,)
                ).fetchone()
                busy = row is not None and row[1] is None and row[3] != self.owner and self._alive(row[3], row[4])
                if busy or _read(row[:3] if row else None, text) is not None:
                    taken.append(False)
                    continue
                db.execute(
                    "INSERT OR REPLACE INTO runs (hash, key, owner, claimed) VALUES (?, ?, ?, ?)",
                    (digest, text, self.owner, time.time()),
                )
                taken.append(True)
            db.execute("COMMIT")
        return taken

    def _alive(self, owner: str | None, claimed: float | None) -> bool:
        """Whether a claim still counts: not lapsed, and on this machine its process is still there."""
        if owner is None or claimed is None or claimed <= time.time() - self.lapse:
            return False
        host, process, _ = owner.rsplit(":", 2)
        if host != platform.node():
            return True
        try:
            os.kill(int(process), 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True

    def release(self, keys: Sequence[Key]) -> None:
        """Give back claims of this worker that have no result."""
        with self._connect() as db:
            db.executemany(
                "DELETE FROM runs WHERE hash = ? AND value IS NULL AND owner = ?",
                [(settings_hash(key), self.owner) for key in keys],
            )

    def compute(
        self,
        keys: Sequence[Key],
        work: Callable[[list[Key]], Sequence[Mapping[str, Any]]],
        *,
        poll: float = 0.2,
    ) -> list[dict[str, Any]]:
        """The results of all keys: stored ones are read, the others computed by ``work`` in one call and stored.

        Keys that another worker has claimed are waited for, and computed here once that claim lapses.
        """
        keys = list({settings_hash(key): key for key in keys}.values()) if len(keys) > 1 else list(keys)
        missing = [key for key, value in zip(keys, self.get_many(keys), strict=True) if value is None]
        while missing:
            mine = [key for key, taken in zip(missing, self.claim(missing), strict=True) if taken]
            if mine:
                try:
                    self.put_many(zip(mine, work(mine), strict=True))
                finally:
                    self.release(mine)
            else:
                time.sleep(poll)
            missing = [key for key, value in zip(missing, self.get_many(missing), strict=True) if value is None]
        return [value for value in self.get_many(keys) if value is not None]

    def rows(self, **match: Any) -> list[StoredRow]:
        """All finished rows whose keys hold the given entries, oldest first."""
        with self._connect() as db:
            raw = db.execute("SELECT key, value, checksum, finished FROM runs ORDER BY finished, hash").fetchall()
        rows = []
        for text, body, checksum, finished in raw:
            value = _read((text, body, checksum), text)
            key = json.loads(text) if value is not None else {}
            if value is not None and all(key.get(name) == _plain(wanted) for name, wanted in match.items()):
                rows.append(StoredRow(key, value, finished))
        return rows

    def __len__(self) -> int:
        return len(self.rows())


def _read(row: tuple[Any, Any, Any] | None, text: str) -> dict[str, Any] | None:
    """The value of a raw row if it is whole: right key, right checksum, readable."""
    if row is None or row[1] is None or row[0] != text or row[2] != _checksum(row[0], row[1]):
        return None
    try:
        value = json.loads(row[1])
    except json.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None
