"""The benchmark measures every mode on the same model and writes what others read."""

from __future__ import annotations

import csv
import dataclasses
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
    assert _bench.read_csv(tmp_path / "step.csv") == rows
    fast = [dataclasses.replace(rows[1], precision="bf16", compile=1), dataclasses.replace(rows[0], ms=7.0)]
    _bench.write_csv(fast, tmp_path / "step.csv", append=True)
    assert _bench.read_csv(tmp_path / "step.csv") == [*rows[1:], *fast]
    _bench.plot(rows, tmp_path / "step.png")
    assert (tmp_path / "step.png").stat().st_size > 1000


@pytest.mark.parametrize(
    "mode", ["weights", "factors", "both", "joint-cap", "exact-cap", "exact-joint-cap", "weights-fast"]
)
def test_private_modes_train_the_same_model(mode: str) -> None:
    step = _bench.prepare(mode, "mlp", 8, torch.device("cpu"))
    step()
    step()


@pytest.mark.parametrize("name", ["mlp", "encoder-tiny"])
@pytest.mark.parametrize("mode", ["plain", "factors", "exact-joint-cap"])
def test_bf16_and_poisson_draws(name: str, mode: str) -> None:
    setting = _bench.Setting("bf16", draws=True)
    assert len(set(setting.sizes(16))) > 1
    step = _bench.prepare(mode, name, 16, torch.device("cpu"), setting)
    step()
    step()


def test_the_larger_networks_have_the_sizes_of_the_literature() -> None:
    with torch.device("meta"):
        sizes = {n: sum(p.numel() for p in _bench.models()[n].factory().parameters()) for n in ("resnet18", "resnet50")}
    assert sizes == {"resnet18": 11_689_512, "resnet50": 25_557_032}


def test_a_step_as_one_call_takes_bf16_and_poisson_draws() -> None:
    step = _bench.prepare("exact-cap-graph", "mlp", 16, torch.device("cpu"), _bench.Setting("bf16", draws=True))
    step()
    step()
