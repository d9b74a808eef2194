"""Files that commands write: whole or not at all, and only where a plain file may stand."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from weightclip.errors import WeightclipError


def check_file(path: Path, inputs: tuple[Path, ...] = (), option: str = "--out") -> None:
    """Refuse what is no plain file: replacing a device node or a link is never what was meant.

    Args:
        path: Where a file is to be written.
        inputs: Files that are read; writing over one of them is refused.
        option: The option that named it.
    """
    try:
        if os.path.lexists(path):
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode):
                raise WeightclipError(f"{option} {path} is a symbolic link: name a plain file.")
            if not stat.S_ISREG(mode):
                what = "a folder" if stat.S_ISDIR(mode) else "no plain file (a device, a pipe or a socket)"
                raise WeightclipError(f"{option} {path} is {what}: name a plain file, or leave {option} away.")
            if any(p.exists() and path.samefile(p) for p in inputs):
                raise WeightclipError(f"{option} {path} is the table that is read: name another file.")
        parent = path.absolute().parent
        if not parent.is_dir():
            raise WeightclipError(f"{option} {path}: cannot write it ({parent} is no folder).")
    except OSError as error:
        raise WeightclipError(f"{option} {str(path)[:200]}: cannot write it ({error.strerror or error}).") from error


@contextlib.contextmanager
def whole_file(path: Path, option: str = "--out") -> Iterator[IO[str]]:
    """A text file that takes its place when the block ends well, and leaves nothing when it does not."""
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(prefix=".weightclip-", dir=path.absolute().parent)
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except OSError as error:
        raise WeightclipError(f"{option} {path}: cannot write it ({error.strerror or error}).") from error
    finally:
        if temporary:
            Path(temporary).unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
