"""Image sets in pieces small enough to be carried to another machine one at a time, and joined there."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from weightclip.errors import WeightclipError
from weightclip_studies.data import image_file_names, image_files, read_checked
from weightclip_studies.images._climb import BATCHES, STEPS
from weightclip_studies.images._experiment import EPSILONS
from weightclip_studies.images._noise import NoiseTable

PACKAGES = (
    "dp_accounting", "absl", "attr", "attrs", "mpmath", "opacus", "opt_einsum", "typer", "click", "rich", "pygments",
    "markdown_it", "mdurl", "shellingham", "annotated_doc",
)  # fmt: skip
"""Packages without compiled parts that a machine with torch, numpy and scipy may lack."""
_RECORDS = {"cifar10": 50_000, "mnist": 60_000, "fashion_mnist": 60_000}


def pack(datasets: Sequence[str], folder: Path, largest: int = 45_000_000) -> list[Path]:
    """Copy the sets' files into ``folder/piece-1``, ``piece-2`` and so on, each of at most ``largest`` bytes.

    CIFAR-10 lies on disk as loss-free WebP strips, 99.6 MB in all. Measured on 5,000 images, zlib would need 170 MB,
    and differences of neighbouring pixels with LZMA 131 MB, so files are copied as they are.
    """
    shutil.rmtree(folder, ignore_errors=True)
    pieces: list[Path] = []
    room = 0
    for name in datasets:
        for file in image_files(name):
            size = file.stat().st_size
            if size > largest:
                raise WeightclipError(f"pack: {file.name} alone has {size} bytes, more than {largest}")
            if size > room:
                pieces.append(folder / f"piece-{len(pieces) + 1}")
                room = largest
            (pieces[-1] / name).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, pieces[-1] / name / file.name)
            room -= size
    return pieces


def pack_packages(folder: Path, names: Sequence[str] = PACKAGES) -> Path:
    """Copy the Python files of packages into ``folder/site``, to be put at the end of PYTHONPATH."""
    shutil.rmtree(folder / "site", ignore_errors=True)
    for name in names:
        found = importlib.util.find_spec(name)
        if found is None or not found.submodule_search_locations:
            raise WeightclipError(f"pack: the package {name} is not installed here")
        shutil.copytree(found.submodule_search_locations[0], folder / "site" / name,
                        ignore=shutil.ignore_patterns("__pycache__", "tests", "*_test.py"))  # fmt: skip
    return folder / "site"


def calibrate(path: Path, datasets: Sequence[str], say: Callable[[str], None] = print) -> Path:
    """Noise multipliers of every batch and number of steps that a climb can reach, so that a GPU need not wait."""
    table = NoiseTable(path)
    for records in sorted({_RECORDS[name] for name in datasets}):
        levels = sorted({e for name in datasets if _RECORDS[name] == records for e in EPSILONS[name]})
        for count in (records - records // 10, records):
            for level in levels:
                for batch in BATCHES:
                    for steps in STEPS:
                        table.get(level, count, batch, steps)
                table.save()
                say(f"noise of epsilon {level:g} on {count} records")
    return path


def join(pieces: Path, data: Path) -> list[str]:
    """Copy what came in ``pieces/piece-*`` to ``data``, digests checked; names of the sets that are then complete."""
    for file in sorted(Path(pieces).glob("piece-*/*/*")):
        name = file.parent.name
        into = Path(data) / name / file.name
        if not into.exists():
            content = read_checked(name, file)
            into.parent.mkdir(parents=True, exist_ok=True)
            into.with_suffix(".new").write_bytes(content)
            into.with_suffix(".new").replace(into)
    return [name for name in _RECORDS if complete(name, data)]


def complete(name: str, data: Path) -> bool:
    """Whether every strip or idx file of a set lies in ``data``."""
    return all((Path(data) / name / file).is_file() for file in image_file_names(name))
