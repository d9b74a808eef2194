"""Downloading the image sets from where their authors publish them."""

from __future__ import annotations

import hashlib
import os
import tempfile
import urllib.request
from pathlib import Path

from rich.progress import Progress

from weightclip.errors import WeightclipError

from ._images import cache_folder, check_name, checksums

_IDX = tuple(f"{part}-{what}-ubyte.gz" for part in ("train", "t10k") for what in ("images-idx3", "labels-idx1"))
# Set -> (files, folders that offer all of them, tried in turn).
_SOURCES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "mnist": (
        _IDX,
        ("https://ossci-datasets.s3.amazonaws.com/mnist", "https://storage.googleapis.com/cvdf-datasets/mnist"),
    ),
    "fashion_mnist": (
        _IDX,
        (
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion",
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        ),
    ),
    "cifar10": (("cifar-10-binary.tar.gz",), ("https://www.cs.toronto.edu/~kriz",)),
}
_CHUNK = 1 << 16


def fetch(name: str, dest: Path | None = None, progress: bool = True) -> Path:
    """Download an image set; files that are already there and right are kept.

    Each file is written beside its final name, checked by SHA-256, and only then renamed: a broken download never
    looks like data.

    Args:
        name: `"mnist"`, `"fashion_mnist"` or `"cifar10"`.
        dest: Folder for the files; the user's cache, where `load_images` looks, if not given.
        progress: Whether to show a progress bar.

    Returns:
        The folder that holds the files.

    Raises:
        WeightclipError: If the name is unknown, no source can be reached, or what arrives is not the published file.
    """
    check_name(name)
    folder = cache_folder() / name if dest is None else Path(dest)
    files, sources = _SOURCES[name]
    folder.mkdir(parents=True, exist_ok=True)
    with Progress(disable=not progress) as bar:
        for file in files:
            target, expected = folder / file, checksums()[name][file]
            if target.is_file() and hashlib.sha256(target.read_bytes()).hexdigest() == expected:
                continue
            problems = []
            for source in sources:
                try:
                    _download(f"{source}/{file}", target, expected, bar)
                    break
                except (OSError, WeightclipError) as error:
                    problems.append(f"{source}: {getattr(error, 'reason', error)}")
            else:
                raise WeightclipError(
                    f"cannot fetch {file} of {name!r} ({'; '.join(problems)}): check the network, or put the file "
                    f"into {folder} by hand"
                )
    return folder


def _download(url: str, target: Path, expected: str, bar: Progress) -> None:
    handle, partial = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        digest = hashlib.sha256()
        with os.fdopen(handle, "wb") as out, urllib.request.urlopen(url, timeout=30) as response:
            length = response.headers.get("Content-Length")
            task = bar.add_task(target.name, total=int(length) if length else None)
            while chunk := response.read(_CHUNK):
                digest.update(chunk)
                out.write(chunk)
                bar.advance(task, len(chunk))
        if digest.hexdigest() != expected:
            raise WeightclipError(f"SHA-256 is {digest.hexdigest()}, expected {expected}")
        os.chmod(partial, 0o644)  # temporary files start out private; data sets are not
        os.replace(partial, target)
    finally:
        Path(partial).unlink(missing_ok=True)
