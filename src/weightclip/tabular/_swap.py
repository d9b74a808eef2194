"""Putting a folder in the place of another in one step, so that dying at any moment loses neither."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import sys
from pathlib import Path

_AT_FDCWD, _EXCHANGE = -100, 2  # of Linux' renameat2; macOS' renamex_np calls the same flag RENAME_SWAP


def put(new: Path, folder: Path, overwrite: bool) -> None:
    """Make `folder` be what `new` is; what stood there before is removed afterwards, if that is allowed.

    Where the system can exchange two names, `folder` names the old or the new one at every moment. Elsewhere the old
    one is set aside under `aside(folder)` between two renames, where `standing` finds it if the process dies there.
    """
    if not overwrite or not folder.exists():
        os.replace(new, folder)  # fails where somebody else was faster: a folder that holds files stays
    elif exchange(new, folder):
        shutil.rmtree(new)
    else:
        old = aside(folder)
        if old.exists():
            shutil.rmtree(old)
        os.replace(folder, old)
        os.replace(new, folder)
        shutil.rmtree(old)
    with contextlib.suppress(OSError):  # names survive a loss of power only when their folder is written
        handle = os.open(folder.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def aside(folder: Path) -> Path:
    """Where a folder is kept while another takes its place, on systems that cannot exchange the two."""
    return folder.with_name(f".{folder.name}.old")


def standing(folder: Path) -> Path:
    """The folder, or the one set aside by a process that died before it could put the new one in its place."""
    return aside(folder) if folder.name and not os.path.lexists(folder) and aside(folder).is_dir() else folder


def recover(folder: Path) -> None:
    """Bring back a folder that a process set aside before it died."""
    if (found := standing(folder)) != folder:
        os.replace(found, folder)


def exchange(a: Path, b: Path) -> bool:
    """Exchange two names in one step; False where the system cannot."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if sys.platform == "darwin":
            return libc.renamex_np(os.fsencode(a), os.fsencode(b), _EXCHANGE) == 0
        return libc.renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _EXCHANGE) == 0
    except (AttributeError, OSError, TypeError):
        return False
