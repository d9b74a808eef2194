"""Where a search is kept: an SQLite file that its owner alone may read, or a database server."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from weightclip.errors import WeightclipError

SQLITE = "sqlite:///"


@dataclass(frozen=True)
class Place:
    """Where a search is kept."""

    url: str  #: SQLAlchemy URL of the storage
    name: str  #: name of the search in it

    def refuse_begun(self) -> None:
        """Say early that a file is there already; a server is asked when the search begins."""
        if self.file is not None and os.path.lexists(self.file):
            raise WeightclipError(begun(self))

    @classmethod
    def of(cls, storage: str | None, out: Path) -> Place:
        """From ``--storage`` (a URL, or the path of an SQLite file; None: a file beside the model)."""
        out = Path(os.path.abspath(out))
        if storage is not None and storage.startswith("sqlite+"):
            raise WeightclipError("--storage: name an SQLite file by its path, or as sqlite:///path, without a driver.")
        if storage is not None and "://" in storage:
            return cls(storage, f"weightclip/{out.name}")
        file = out.with_name(out.name + ".search") if storage is None else Path(os.path.abspath(storage))
        return cls(SQLITE + str(file), f"weightclip/{out.name}")

    @property
    def file(self) -> Path | None:
        """The SQLite file; None on a server."""
        return Path(self.url.removeprefix(SQLITE)) if self.url.startswith(SQLITE) else None

    def __str__(self) -> str:
        """For people; without the password that a URL may hold."""
        return str(self.file or self.url.split("://")[0] + "://...")


def begun(place: Place) -> str:
    """What is said where a search of this name is there already."""
    where = f"remove {place}" if place.file is not None else f"delete the study {place.name!r} there"
    return f"a search was begun in {place}: go on with --resume, or {where} (a model it has written counts)."


def nothing(place: Place) -> str:
    """What is said where there is none."""
    return f"--resume: there is no search {place.name!r} in {place} (a search that ended has deleted its own)."


def make_private_file(file: Path, place: Place) -> None:
    """Make an empty file that nobody else may read."""
    try:
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        raise WeightclipError(begun(place)) from None


def check_private_file(file: Path, place: Place) -> None:
    """Refuse a file that others may read."""
    if not file.exists():
        raise WeightclipError(nothing(place))
    mode = file.lstat().st_mode
    if not stat.S_ISREG(mode):
        raise WeightclipError(f"{place} is no plain file: name the file of a search.")
    if mode & 0o077:
        raise WeightclipError(f"{place} holds private scores, and others may read it: chmod 600 it first.")
