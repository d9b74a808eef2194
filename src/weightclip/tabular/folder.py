"""Model folders: weights in safetensors, everything else in JSON and Markdown, checksums over all of it, no pickle."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import shutil
import stat
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from weightclip.errors import WeightclipError
from weightclip.tabular._checks import check_pipeline, check_report, strict_json
from weightclip.tabular._report import model_card

FORMAT = 1
WEIGHTS, PIPELINE, PRIVACY, CARD, CHECKSUMS = (
    "weights.safetensors", "pipeline.json", "privacy.json", "README.md", "checksums.json",
)  # fmt: skip
OLD_CARD = "MODEL_CARD.md"  # of version 0.1
FILES = frozenset({WEIGHTS, PIPELINE, PRIVACY, CARD, OLD_CARD, CHECKSUMS})


def save(
    folder: str | Path,
    weights: dict[str, np.ndarray],
    pipeline: dict[str, Any],
    report: dict[str, Any],
    *,
    overwrite: bool = False,
) -> Path:
    """Write a model folder; it appears whole or not at all, and an older one stays until the new one is in its place.

    Args:
        folder: Where to; parents are made.
        weights: Arrays by name.
        pipeline: JSON-ready description of everything prediction needs besides the weights.
        report: The privacy report.
        overwrite: Whether an older model folder of this name may be replaced.

    Raises:
        WeightclipError: The folder exists, is no model folder, or cannot be written.
    """
    pipeline = {"format": FORMAT, **pipeline}
    contents = {
        WEIGHTS: safetensors.numpy.save({k: np.ascontiguousarray(v) for k, v in weights.items()}),
        PIPELINE: _dump(pipeline),
        PRIVACY: _dump(report),
        CARD: model_card(pipeline, report).encode(),
    }
    return write(folder, contents, overwrite=overwrite)


def save_network(
    folder: str | Path, weights: bytes, report: dict[str, Any], card: str, *, overwrite: bool = False
) -> Path:
    """Write the folder of a network that is the user's own: as `save`, without a pipeline.

    `weights` are the contents of a safetensors file.
    """
    return write(folder, {WEIGHTS: weights, PRIVACY: _dump(report), CARD: card.encode()}, overwrite=overwrite)


def write(folder: str | Path, contents: dict[str, bytes], *, overwrite: bool) -> Path:
    """Write files and their checksums; see `save`."""
    check_place(folder, overwrite)
    folder = Path(os.path.abspath(folder))
    temporary: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        sums = _dump({name: hashlib.sha256(data).hexdigest() for name, data in contents.items()})
        contents = {**contents, CHECKSUMS: sums}
        for name, data in contents.items():
            with (temporary / name).open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        os.chmod(temporary, 0o755)
        put(temporary, folder, overwrite)
    except OSError as error:
        raise WeightclipError(f"cannot write the model to {folder} ({error.strerror or error}).") from error
    finally:
        if temporary is not None and temporary.exists():
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def check_place(folder: str | Path, overwrite: bool, option: str = "") -> None:
    """Refuse a place that cannot or must not be written, before minutes of training.

    Errors call it `option`, "--out " for instance.
    """
    shown = f"{option}{folder}"
    place = Path(os.path.abspath(folder))
    try:
        recover(place)
        if place.is_symlink():
            raise WeightclipError(f"{shown} is a symbolic link: name the folder itself.")
        if place.exists():
            held = set(os.listdir(place)) if place.is_dir() else None
            if not overwrite or held is None or CHECKSUMS not in held:
                hint = "it is no model folder" if overwrite else "choose another, or allow overwriting (--overwrite)"
                raise WeightclipError(f"{shown} exists already: {hint}.")
            if foreign := sorted(held - FILES):
                raise WeightclipError(f"{shown} holds {foreign[0]!r} besides a model: move it away, it would be lost.")
        parent = place.parent
        while not parent.exists():
            parent = parent.parent
        if not parent.is_dir():
            raise WeightclipError(f"{shown}: {parent} is no folder.")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise WeightclipError(f"{shown}: no permission to write into {parent}.")
        if len(os.fsencode(place.name)) > 200:
            raise WeightclipError(f"{shown[:60]}...: the name is too long.")
    except OSError as error:
        raise WeightclipError(f"{shown[:200]}: cannot write there ({error.strerror or error}).") from error


def load(folder: str | Path) -> tuple[dict[str, np.ndarray], dict[str, Any], dict[str, Any]]:
    """Weights, pipeline and privacy report of a model folder, after checking every file; runs no code from it."""
    folder = Path(folder)
    place = standing(folder)
    expected = _parse(folder, CHECKSUMS, _read(folder, place, CHECKSUMS))
    contents = {}
    for name in (WEIGHTS, PIPELINE, PRIVACY, OLD_CARD if OLD_CARD in expected else CARD):
        contents[name] = _unchanged(folder, place, name, expected)
    pipeline, report = (_parse(folder, name, contents[name]) for name in (PIPELINE, PRIVACY))
    if pipeline.get("format") != FORMAT or isinstance(pipeline["format"], bool):
        found = str(pipeline.get("format"))[:20]
        raise WeightclipError(f"model {folder}: format {found!r} is not {FORMAT}: use the version that wrote it.")
    try:
        weights = safetensors.numpy.load(contents[WEIGHTS])
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise WeightclipError(f"model {folder}: {WEIGHTS} is not a safetensors file ({error}).") from error
    check_pipeline(pipeline, weights, f"model {folder}: {PIPELINE}")
    check_report(report, f"model {folder}: {PRIVACY}")
    return weights, pipeline, report


def is_network(folder: str | Path) -> bool:
    """Whether a folder says that `save_network` wrote it."""
    place = standing(Path(folder))
    return (place / CHECKSUMS).is_file() and PIPELINE not in _parse(place, CHECKSUMS, _read(place, place, CHECKSUMS))


def check_network(folder: str | Path) -> dict[str, Any]:
    """The privacy report of a folder that `save_network` wrote, after checking every file."""
    folder = Path(folder)
    place = standing(folder)
    expected = _parse(folder, CHECKSUMS, _read(folder, place, CHECKSUMS))
    contents = {name: _unchanged(folder, place, name, expected) for name in (WEIGHTS, PRIVACY, CARD)}
    return _parse(folder, PRIVACY, contents[PRIVACY])


def _unchanged(folder: Path, place: Path, name: str, expected: dict[str, Any]) -> bytes:
    data = _read(folder, place, name)
    if hashlib.sha256(data).hexdigest() != expected.get(name):
        raise WeightclipError(f"model {folder}: {name} was changed after training (its checksum does not match).")
    return data


def _read(folder: Path, place: Path, name: str) -> bytes:
    try:
        if not stat.S_ISREG((place / name).stat().st_mode):
            raise WeightclipError(f"model {folder}: cannot read {name} (it is no regular file).")
        return (place / name).read_bytes()
    except OSError as error:
        raise WeightclipError(f"model {folder}: cannot read {name} ({error.strerror}).") from error


def _parse(folder: Path, name: str, data: bytes) -> dict[str, Any]:
    try:
        value = strict_json(data)
    except ValueError as error:
        raise WeightclipError(f"model {folder}: {name} is not JSON ({error}).") from error
    if not isinstance(value, dict):
        raise WeightclipError(f"model {folder}: {name} must hold a JSON object.")
    return value


def _dump(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()


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
