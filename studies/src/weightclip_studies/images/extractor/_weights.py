"""Weights of extractors in files: half precision, with the recipe and the SHA-256 beside them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from weightclip.errors import WeightclipError
from weightclip_studies.images.extractor._contrast import Recipe
from weightclip_studies.images.extractor._network import ResNet9

PLACES = "WEIGHTCLIP_EXTRACTORS"
LARGEST = 20_000_000
"""Bytes of weights that the repository takes."""


@dataclass(frozen=True)
class Stored:
    """One extractor in a folder.

    Attributes:
        name: Name of its files, without ending.
        sha256: Digest of the weights.
        recipe: What it was trained by.
        facts: Seconds, device, last loss and whatever else was told of the training.
    """

    name: str
    sha256: str
    recipe: Recipe
    facts: dict[str, Any]


def save_extractor(folder: Path, name: str, net: ResNet9, recipe: Recipe, **facts: Any) -> Stored:
    """Write ``name.safetensors`` (float16) and ``name.json``."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    half = {key: value.detach().to("cpu", torch.float16).contiguous() for key, value in net.state_dict().items()}
    for key, value in half.items():
        if not torch.isfinite(value).all():
            raise WeightclipError(f"extractor {name!r}: {key} does not fit into half precision")
    content = safetensors.torch.save(half)
    (folder / f"{name}.safetensors").write_bytes(content)
    stored = Stored(name, hashlib.sha256(content).hexdigest(), recipe, {"bytes": len(content), **facts})
    told = {"name": name, "sha256": stored.sha256, **stored.facts, "recipe": recipe.to_dict()}
    (folder / f"{name}.json").write_text(json.dumps(told, indent=1) + "\n")
    return stored


def describe_extractor(folder: Path, name: str) -> Stored:
    """What ``name.json`` says; the weights are not read."""
    path = Path(folder) / f"{name}.json"
    if not path.exists():
        raise WeightclipError(f"no extractor {name!r} in {folder}: train one with weightclip-study extractor train")
    told = json.loads(path.read_text())
    recipe = Recipe.from_dict(told.pop("recipe"))
    return Stored(told.pop("name"), told.pop("sha256"), recipe, told)


def load_extractor(folder: Path, name: str, sha256: str | None = None) -> ResNet9:
    """The network of ``name``, in single precision, for features.

    Args:
        folder: Where its files lie.
        name: Name of the files, without ending.
        sha256: Digest that is expected; by default that of ``name.json``.

    Raises:
        WeightclipError: If a file is missing or the weights have another digest.
    """
    stored = describe_extractor(folder, name)
    path = Path(folder) / f"{name}.safetensors"
    if not path.exists():
        raise WeightclipError(f"{path} is missing: train it again by the recipe in {name}.json")
    content = path.read_bytes()
    found, expected = hashlib.sha256(content).hexdigest(), sha256 or stored.sha256
    if found != expected:
        raise WeightclipError(f"{path} has SHA-256 {found}, expected {expected}: these are other weights")
    net = ResNet9(stored.recipe.width)
    net.load_state_dict({key: value.float() for key, value in safetensors.torch.load(content).items()})
    return net.eval()


def find_extractor(name: str, sha256: str) -> ResNet9:
    """The network of this name and digest, in ``$WEIGHTCLIP_EXTRACTORS`` or among the repository's results."""
    wrong = []
    for folder in places():
        if (folder / f"{name}.json").exists():
            if describe_extractor(folder, name).sha256 == sha256:
                return load_extractor(folder, name, sha256)
            wrong.append(folder)
    tail = f"; another one of this name lies in {wrong[0]}" if wrong else f": set {PLACES} to the folder that holds it"
    raise WeightclipError(f"extractor {name!r} with SHA-256 {sha256} not found{tail}")


def places() -> Iterator[Path]:
    """Folders that may hold extractors."""
    for folder in os.environ.get(PLACES, "").split(os.pathsep):
        if folder:
            yield Path(folder)
    checkout = Path(__file__).resolve().parents[5]
    if (checkout / "pyproject.toml").is_file():
        yield checkout / "results" / "images" / "extractor"
