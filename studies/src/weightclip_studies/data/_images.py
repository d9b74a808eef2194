"""MNIST, Fashion-MNIST and CIFAR-10: found on disk, checked by SHA-256, returned as uint8 arrays."""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import json
import os
import pickle
import tarfile
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path

import numpy as np

from weightclip.errors import WeightclipError

_IDX_PREFIX = {"train": "train", "test": "t10k"}
_CIFAR_BATCHES = {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)}
_CIFAR_STRIPS = {"train": 100, "test": 20}


def image_names() -> tuple[str, ...]:
    """Names of the image sets that `load_images` and `fetch` know."""
    return tuple(sorted(checksums()))


def load_images(name: str, split: str, folder: Path | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of one part of an image set.

    Looks, unless `folder` is given, in `$WEIGHTCLIP_DATA/images/<name>`, `$WEIGHTCLIP_DATA/<name>`, then in
    `../shared/data` beside a checkout of the repository, then in the user's cache, where `fetch` puts files.

    Args:
        name: `"mnist"`, `"fashion_mnist"` or `"cifar10"`.
        split: `"train"` or `"test"`.
        folder: Folder that holds the files of this set.

    Returns:
        Images as uint8 (records x 28 x 28, or records x 32 x 32 x 3 in RGB order), and labels as uint8.

    Raises:
        WeightclipError: If the name or part is unknown, the files are not found, or one of them was changed.
    """
    check_name(name)
    if split not in _IDX_PREFIX:
        raise WeightclipError(f"image data {name!r}: split must be 'train' or 'test', got {split!r}")
    for place in _places(name) if folder is None else iter((Path(folder),)):
        for layout in (_cifar_strips, _cifar_binary, _cifar_archive) if name == "cifar10" else (_idx_files,):
            reader = layout(name, place, split)
            if reader is not None:
                return reader()
    raise WeightclipError(
        f"image data {name!r} not found{'' if folder is None else f' in {folder}'}: set WEIGHTCLIP_DATA to a folder "
        f"that holds {name}/, or download it with weightclip_studies.data.fetch({name!r})"
    )


def image_file_names(name: str) -> list[str]:
    """Names of the files of an image set in its smallest loss-free layout: strips, or idx files."""
    check_name(name)
    return [file for file in sorted(checksums()[name]) if file.endswith((".webp", "ubyte.gz"))]


def image_files(name: str) -> list[Path]:
    """The files of `image_file_names`, in the first folder of this machine that holds all of them."""
    wanted = image_file_names(name)
    for place in _places(name):
        files = [place / file for file in wanted]
        if all(file.is_file() for file in files):
            return files
    raise WeightclipError(f"image data {name!r}: no folder holds all of its {len(wanted)} strips or idx files")


@functools.cache
def checksums() -> dict[str, dict[str, str]]:
    """SHA-256 of every accepted file, by set and file name."""
    return json.loads(resources.files("weightclip_studies.data").joinpath("images.json").read_text(encoding="utf-8"))


def cache_folder() -> Path:
    """Folder below which `fetch` stores image sets by default."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "weightclip"


def read_checked(name: str, path: Path) -> bytes:
    """Content of a file after checking its SHA-256 against the table of the package."""
    content = path.read_bytes()
    found, expected = hashlib.sha256(content).hexdigest(), checksums()[name][path.name]
    if found != expected:
        raise WeightclipError(
            f"image data {name!r}: {path} has SHA-256 {found}, expected {expected}: delete it and fetch it again"
        )
    return content


def parse_idx(content: bytes) -> np.ndarray:
    """The array in a gzip-compressed idx file of unsigned bytes."""
    raw = gzip.decompress(content)
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08":
        raise WeightclipError("not an idx file of unsigned bytes: its first three bytes must be 0, 0, 8")
    ndim = raw[3]
    shape = tuple(int(n) for n in np.frombuffer(raw, ">u4", count=ndim, offset=4))
    if len(raw) != 4 + 4 * ndim + int(np.prod(shape)):
        raise WeightclipError(f"idx file is cut short or too long: header says shape {shape}, {len(raw)} bytes found")
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * ndim).reshape(shape)


def parse_strip(content: bytes) -> np.ndarray:
    """Images of 32 x 32 pixels stacked vertically in one RGB picture (needs Pillow)."""
    try:
        from PIL import Image
    except ImportError as error:
        raise WeightclipError("reading WebP strips needs Pillow: pip install 'weightclip[vision]'") from error
    with Image.open(io.BytesIO(content)) as picture:
        return np.asarray(picture.convert("RGB")).reshape(-1, 32, 32, 3)


def parse_binary(content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of a CIFAR-10 binary batch: a label byte, then the red, green and blue planes."""
    records = np.frombuffer(content, np.uint8).reshape(-1, 1 + 3 * 32 * 32)
    return _planes(records[:, 1:]), records[:, 0]


def parse_pickle(content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of a CIFAR-10 Python batch. Only for bytes whose checksum was verified: pickles run code."""
    batch = pickle.loads(content, encoding="bytes")
    return _planes(np.asarray(batch[b"data"], dtype=np.uint8)), np.asarray(batch[b"labels"], dtype=np.uint8)


def _planes(flat: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(flat.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def check_name(name: str) -> None:
    if name not in checksums():
        raise WeightclipError(f"unknown image data {name!r}: choose one of {', '.join(image_names())}")


def _places(name: str) -> Iterator[Path]:
    chosen = os.environ.get("WEIGHTCLIP_DATA")
    if chosen:
        yield Path(chosen) / "images" / name
        yield Path(chosen) / name
    checkout = Path(__file__).resolve().parents[4]
    if (checkout / "pyproject.toml").is_file():
        yield checkout.parent / "shared" / "data" / "images" / name
    yield cache_folder() / name


# Each layout below returns None when its files are not in the folder, else a function that reads them.
_Reader = Callable[[], tuple[np.ndarray, np.ndarray]]


def _idx_files(name: str, folder: Path, split: str) -> _Reader | None:
    paths = [folder / f"{_IDX_PREFIX[split]}-{part}-ubyte.gz" for part in ("images-idx3", "labels-idx1")]
    if not all(path.is_file() for path in paths):
        return None
    return lambda: (parse_idx(read_checked(name, paths[0])), parse_idx(read_checked(name, paths[1])))


def _cifar_strips(name: str, folder: Path, split: str) -> _Reader | None:
    strips = [folder / f"{split}-{i:03d}.webp" for i in range(_CIFAR_STRIPS[split])]
    labels = folder / f"{split}-labels-idx1-ubyte.gz"
    if not all(path.is_file() for path in (*strips, labels)):
        return None
    return lambda: (
        np.concatenate([parse_strip(read_checked(name, path)) for path in strips]),
        parse_idx(read_checked(name, labels)),
    )


def _cifar_binary(name: str, folder: Path, split: str) -> _Reader | None:
    for place in (folder, folder / "cifar-10-batches-bin"):
        paths = [place / f"{batch}.bin" for batch in _CIFAR_BATCHES[split]]
        if all(path.is_file() for path in paths):
            return lambda paths=paths: _joined([parse_binary(read_checked(name, path)) for path in paths])
    return None


def _cifar_archive(name: str, folder: Path, split: str) -> _Reader | None:
    for archive, members, suffix, parse in (
        ("cifar-10-binary.tar.gz", "cifar-10-batches-bin", ".bin", parse_binary),
        ("cifar-10-python.tar.gz", "cifar-10-batches-py", "", parse_pickle),
    ):
        if (folder / archive).is_file():
            wanted = [f"{members}/{batch}{suffix}" for batch in _CIFAR_BATCHES[split]]
            return lambda path=folder / archive, wanted=wanted, parse=parse: _joined(
                [parse(content) for content in _members(read_checked(name, path), wanted)]
            )
    return None


def _members(archive: bytes, wanted: list[str]) -> list[bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        contents = []
        for member in wanted:
            handle = tar.extractfile(member)
            if handle is None:
                raise WeightclipError(f"archive member {member} is not a file")
            contents.append(handle.read())
    return contents


def _joined(batches: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([images for images, _ in batches]), np.concatenate([labels for _, labels in batches])
