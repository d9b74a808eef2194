"""Pieces of data: small enough, complete, checked where they are joined; noise made ahead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from weightclip.errors import WeightclipError
from weightclip_studies.data import image_file_names
from weightclip_studies.images import _pieces
from weightclip_studies.images._noise import NoiseTable


@pytest.fixture
def files(tmp_path, monkeypatch) -> Path:
    """Files with the names of CIFAR-10's, of about a kilobyte each."""
    names = image_file_names("cifar10")
    assert len(names) == 122
    folder = tmp_path / "cifar10"
    folder.mkdir()
    for i, name in enumerate(names):
        (folder / name).write_bytes(os.urandom(1000 + i))
    monkeypatch.setattr(_pieces, "image_files", lambda name: [folder / file for file in names])
    monkeypatch.setattr(_pieces, "read_checked", lambda name, path: path.read_bytes())
    return folder


def test_pieces_are_small_and_join_to_the_whole(tmp_path, files) -> None:
    pieces = _pieces.pack(["cifar10"], tmp_path / "pieces", largest=50_000)
    sizes = [sum(f.stat().st_size for f in p.rglob("*.*")) for p in pieces]
    assert len(pieces) == 3 and max(sizes) <= 50_000 and sum(sizes) == sum(f.stat().st_size for f in files.iterdir())
    last = (tmp_path / "pieces" / "piece-3").rename(tmp_path / "late")
    assert _pieces.join(tmp_path / "pieces", tmp_path / "data") == []
    last.rename(tmp_path / "pieces" / "piece-3")
    assert _pieces.join(tmp_path / "pieces", tmp_path / "data") == ["cifar10"]
    for file in files.iterdir():
        assert (tmp_path / "data" / "cifar10" / file.name).read_bytes() == file.read_bytes()
    with pytest.raises(WeightclipError, match="more than 100"):
        _pieces.pack(["cifar10"], tmp_path / "pieces", largest=100)


def test_a_changed_file_is_not_joined(tmp_path, files, monkeypatch) -> None:
    _pieces.pack(["cifar10"], tmp_path / "pieces")
    monkeypatch.undo()
    with pytest.raises(WeightclipError, match="SHA-256"):
        _pieces.join(tmp_path / "pieces", tmp_path / "data")


def test_noise_is_made_for_every_head_a_climb_can_reach(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(_pieces, "BATCHES", (8192, 16384))
    monkeypatch.setattr(_pieces, "STEPS", (60,))
    monkeypatch.setitem(_pieces.EPSILONS, "cifar10", (1.0,))
    path = _pieces.calibrate(tmp_path / "noise.json", ["cifar10"], say=lambda line: None)
    table = json.loads(path.read_text())
    assert len(table) == 2 * 2 and {key.split("/")[1] for key in table} == {"45000", "50000"}
    assert NoiseTable(path).check(1.0, 50_000, 8192, 60) <= 1.0


def test_packages_can_be_imported_from_their_copy(tmp_path) -> None:
    site = _pieces.pack_packages(tmp_path)
    code = "import dp_accounting, typer, rich.console, attr; print(dp_accounting.__file__)"
    told = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(site)}, check=True,
                          capture_output=True, text=True).stdout  # fmt: skip
    assert told.startswith(str(site))
    with pytest.raises(WeightclipError, match="no_such_package"):
        _pieces.pack_packages(tmp_path, ["no_such_package"])
