"""Seconds per epoch and peak memory against logical batch size: ConvNet on MNIST, Wide-ResNet-16-4 on CIFAR-10."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from weightclip_studies import bench as _bench

COLUMNS = ("dataset", "model", "mode", "batch", "seconds_per_epoch", "peak_gib", "device")
# Name here -> mode of the step benchmark.
MODES = {
    "plain": "plain",
    "weightclip": "weights",
    "weightclip-factors": "factors",
    "opacus-hooks": "opacus-hooks",
    "opacus-ghost": "opacus-ghost",
    "plain-graph": "plain-graph",
    "weightclip-graph": "weights-graph",
    "weightclip-factors-graph": "factors-graph",
}
EVERYWHERE = tuple(name for name in MODES if not name.endswith("-graph"))  # the others are CUDA graphs
SUBJECTS = {"convnet": ("mnist", 60_000, (256, 1024, 4096)), "wrn-16-4": ("cifar10", 50_000, (256, 1024, 2048))}


def run(
    out: Path,
    device: str = "cpu",
    *,
    batches: Sequence[int] | None = None,
    models: Sequence[str] = tuple(SUBJECTS),
    modes: Sequence[str] | None = None,
    seconds: float = 1.0,
    tf32: bool = False,
    say: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Median step time times the steps of an epoch, modes taking turns; rows are written as they come.

    Batches are random images already on the device: the time of a step does not depend on pixel values, and loading is
    the same for every mode. One epoch is records/batch steps.
    """
    rows: list[dict[str, Any]] = []
    modes = modes or (EVERYWHERE if torch.device(device).type != "cuda" else tuple(MODES))
    for model in models:
        _, _, default = SUBJECTS[model]
        for batch in batches or default:
            setting = _bench.Setting("tf32" if tf32 else "float32")
            measured = _bench.measure(
                model, batch, [MODES[m] for m in modes], torch.device(device), seconds=seconds, setting=setting
            )
            for row in as_epochs(measured):
                rows.append(row)
                say(" ".join(f"{k}={v}" for k, v in row.items()))
            write(rows, out / "runtime.csv")
    return rows


def as_epochs(measured: Sequence[_bench.StepRow]) -> list[dict[str, Any]]:
    """Rows of the step benchmark as rows of this table; modes and models it does not have are left out."""
    rows, names = [], {bench: name for name, bench in MODES.items()}
    for row in measured:
        if row.mode in names and row.model in SUBJECTS:
            dataset, records, _ = SUBJECTS[row.model]
            rows.append({
                "dataset": dataset, "model": row.model, "mode": names[row.mode], "batch": row.batch,
                "seconds_per_epoch": f"{row.ms * records / row.batch / 1e3:.4g}",
                "peak_gib": "" if row.peak_gib is None else f"{row.peak_gib:.3g}", "device": row.device,
            })  # fmt: skip
    return rows


def write(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """The table as CSV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list[str](COLUMNS), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
