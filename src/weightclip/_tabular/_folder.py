"""Model folders: weights in safetensors, everything else in JSON and Markdown, checksums over all of it, no pickle."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from weightclip.errors import WeightclipError

from ._card import model_card

FORMAT = 1
WEIGHTS, PIPELINE, PRIVACY, CARD, CHECKSUMS = (
    "weights.safetensors", "pipeline.json", "privacy.json", "MODEL_CARD.md", "checksums.json",
)  # fmt: skip


def save(
    folder: str | Path,
    weights: dict[str, np.ndarray],
    pipeline: dict[str, Any],
    report: dict[str, Any],
    *,
    overwrite: bool = False,
) -> Path:
    """Write a model folder; it appears whole or not at all.

    Args:
        folder: Where to; its parent must exist.
        weights: Arrays by name.
        pipeline: JSON-ready description of everything prediction needs besides the weights.
        report: The privacy report.
        overwrite: Whether an older model folder of this name may be replaced.

    Raises:
        WeightclipError: The folder exists, is no model folder, or cannot be written.
    """  # fmt: skip
    folder = Path(folder)
    if folder.exists() and not (overwrite and (folder / CHECKSUMS).is_file()):
        hint = "it is no model folder" if overwrite else "choose another, or allow overwriting"
        raise WeightclipError(f"{folder} exists already: {hint}.")
    temporary: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        pipeline = {"format": FORMAT, **pipeline}
        contents = {
            WEIGHTS: safetensors.numpy.save({k: np.ascontiguousarray(v) for k, v in weights.items()}),
            PIPELINE: _dump(pipeline),
            PRIVACY: _dump(report),
            CARD: model_card(pipeline, report).encode(),
        }
        contents[CHECKSUMS] = _dump({name: hashlib.sha256(data).hexdigest() for name, data in contents.items()})
        for name, data in contents.items():
            with (temporary / name).open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        os.chmod(temporary, 0o755)
        if folder.exists():
            old = temporary.with_name(temporary.name + ".old")
            os.replace(folder, old)
            os.replace(temporary, folder)
            shutil.rmtree(old)
        else:
            os.replace(temporary, folder)
    except OSError as error:
        raise WeightclipError(f"cannot write the model to {folder} ({error.strerror or error}).") from error
    finally:
        if temporary is not None and temporary.exists():
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def load(folder: str | Path) -> tuple[dict[str, np.ndarray], dict[str, Any], dict[str, Any]]:
    """Weights, pipeline and privacy report of a model folder, after checking every file; runs no code from it.

    Raises:
        WeightclipError: A file is missing, was changed, or is not what it should be.
    """
    folder = Path(folder)
    expected = _parse(folder, CHECKSUMS, _read(folder, CHECKSUMS))
    contents = {}
    for name in (WEIGHTS, PIPELINE, PRIVACY, CARD):
        contents[name] = _read(folder, name)
        if hashlib.sha256(contents[name]).hexdigest() != expected.get(name):
            raise WeightclipError(f"model {folder}: {name} was changed after training (its checksum does not match).")
    pipeline, report = (_parse(folder, name, contents[name]) for name in (PIPELINE, PRIVACY))
    if pipeline.get("format") != FORMAT:
        raise WeightclipError(
            f"model {folder}: format {pipeline.get('format')!r} is not {FORMAT}: use the version that wrote it."
        )
    try:
        weights = safetensors.numpy.load(contents[WEIGHTS])
    except SafetensorError as error:
        raise WeightclipError(f"model {folder}: {WEIGHTS} is not a safetensors file ({error}).") from error
    return weights, pipeline, report


def _read(folder: Path, name: str) -> bytes:
    try:
        return (folder / name).read_bytes()
    except OSError as error:
        raise WeightclipError(f"model {folder}: cannot read {name} ({error.strerror}).") from error


def _parse(folder: Path, name: str, data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data.decode("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise WeightclipError(f"model {folder}: {name} is not JSON ({error}).") from error
    if not isinstance(value, dict):
        raise WeightclipError(f"model {folder}: {name} must hold a JSON object.")
    return value


def _dump(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()
