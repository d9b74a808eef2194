"""The benchmark measures every mode on the same model and writes what others read."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from weightclip_studies import bench as _bench


def test_rows_for_every_mode(tmp_path: Path) -> None:
    rows = _bench.measure("mlp", 16, _bench.MODES, torch.device("cpu"), seconds=0.01)
    assert [r.mode for r in rows] == list(_bench.MODES)
    assert all(r.ms > 0 and r.ratio > 0 for r in rows)
    assert next(r for r in rows if r.mode == "plain").ratio == 1
    _bench.write_csv(rows, tmp_path / "step.csv")
    with (tmp_path / "step.csv").open() as file:
        table = list(csv.DictReader(file))
    assert list(table[0])[:7] == ["device", "model", "batch", "mode", "ms", "ratio", "peak_gib"]
    assert len(table) == len(rows)
    _bench.plot(rows, tmp_path / "step.png")
    assert (tmp_path / "step.png").stat().st_size > 1000


@pytest.mark.parametrize("mode", ["weights", "factors", "both", "joint-cap", "weights-fast"])
def test_private_modes_train_the_same_model(mode: str) -> None:
    step = _bench.prepare(mode, "mlp", 8, torch.device("cpu"))
    step()
    step()
