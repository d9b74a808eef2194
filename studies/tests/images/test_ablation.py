"""The table of what each part of the features adds: rows of the page, run in small."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from weightclip_studies.cli import _images
from weightclip_studies.images import FeatureSettings, _ablation, _experiment, _features
from weightclip_studies.images._experiment import CANDIDATES
from weightclip_studies.images._learned import FIXED


def test_rows_are_those_of_the_page() -> None:
    text = (Path(__file__).parents[3] / "docs" / "images.md").read_text()
    tables = re.findall(r"\| features \| ε = 1 \| ε = 3 \| ε = 8 \|\n\|[-|]+\|\n((?:\|.*\n)+)", text)
    assert [len(table.splitlines()) for table in tables] == [7, 7] and len(_ablation.ROWS) == 14
    assert _ablation.ROWS[-1].features == FIXED["cifar10"]  # the features of the results
    assert [row.table for row in _ablation.ROWS] == ["features"] * 7 + ["later"] * 7
    assert _ablation.ROWS[6].features == _ablation.ROWS[7].features  # where one table ends the other begins
    for row in _ablation.ROWS:
        assert list(row.heads) == [1.0, 3.0, 8.0] and all(h.hidden == 0 for hs in row.heads.values() for h in hs)
    names = [row.name for row in _ablation.ROWS]
    assert len(set(names)) == len(names)
    for one, other in zip(_ablation.ROWS[7:], _ablation.ROWS[8:], strict=False):  # one change at a time
        a, b = one.features.to_dict(), other.features.to_dict()
        assert 1 <= sum(a[k] != b[k] for k in a) <= 2
    assert CANDIDATES["cifar10"][1][-1] == {"scattering": 0.7}


def fake_images(name: str, part: str) -> tuple[np.ndarray, np.ndarray]:
    assert part == "train" or name, part
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (200, 32, 32, 3)).astype(np.uint8), rng.integers(0, 10, 200).astype(np.uint8)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_experiment, "load_images", fake_images)
    whole = _features.dead_leaves
    monkeypatch.setattr(_features, "dead_leaves", lambda count, *a, **k: whole(min(count, 24), *a, **k))
    heads = _ablation._heads({3.0: {"steps": 2, "loss_cap": 0.3, "batch": 100}}, (0.01, 0.02))
    rows = [_ablation.FeatureRow("features", name, FeatureSettings(scattering=0.0, patches=4, flip=flip), heads)
            for name, flip in (("plain", False), ("mirrored", True))]  # fmt: skip
    monkeypatch.setattr(_ablation, "ROWS", rows)
    seen: list[str] = []
    trial = _experiment.ImageStudy.trial
    monkeypatch.setattr(_experiment.ImageStudy, "trial", lambda self, fit, val, *a, **k: (
        seen.append(f"{len(fit)}/{len(val)}"), trial(self, fit, val, *a, **k))[1])  # fmt: skip
    app = typer.Typer()
    _images.register(app)
    done = CliRunner().invoke(app, ["features", "--out", str(tmp_path), "--device", "cpu"])
    assert done.exit_code == 0, done.output
    with (tmp_path / "ablation.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [(r["features"], r["epsilon"]) for r in found] == [("plain", "3"), ("mirrored", "3")]
    assert seen == ["180/20"] * 4  # both learning rates of both rows, on the validation split alone
