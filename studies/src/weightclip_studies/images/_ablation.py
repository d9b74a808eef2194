"""What each part of the fixed features adds: validation accuracy of linear heads on CIFAR-10, a feature map a row."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from weightclip_studies.images._experiment import ImageStudy
from weightclip_studies.images._features import FeatureSettings
from weightclip_studies.images._settings import HeadSettings

COLUMNS = ("dataset", "table", "features", "epsilon", "accuracy", "seed", "width", "device")
Heads = dict[float, tuple[HeadSettings, ...]]


def _heads(settings: dict[float, dict[str, Any]], rates: Sequence[float] = (), **common: Any) -> Heads:
    """Linear heads for each epsilon; of several learning rates the best one counts."""

    def head(own: dict[str, Any], rate: float) -> HeadSettings:
        return HeadSettings(hidden=0, **{**common, **own, "learning_rate": rate})

    return {e: tuple(head(own, rate) for rate in rates or (own["learning_rate"],)) for e, own in settings.items()}


_LARGE = _heads(
    {1.0: {"steps": 400, "loss_cap": 0.2}, 3.0: {"steps": 800, "loss_cap": 0.3}, 8.0: {"steps": 1000, "loss_cap": 0.4}},
    (0.03,), batch=8192, average=0.95, bias_scale=0.3,
)  # fmt: skip
_SMALL = _heads(
    {1.0: {"steps": 300, "loss_cap": 0.2}, 3.0: {"steps": 600, "loss_cap": 0.3}, 8.0: {"steps": 1000, "loss_cap": 0.4}},
    (0.03, 0.06),
)  # fmt: skip
_CHOSEN = _heads(  # of the weights-only rows, with the batch and steps of the scripts that made the table
    {
        1.0: {"batch": 8192, "steps": 300, "learning_rate": 0.0737, "loss_cap": 0.113, "bias_scale": 0.1},
        3.0: {"batch": 8192, "steps": 400, "learning_rate": 0.0945, "loss_cap": 0.15, "bias_scale": 0.2},
        8.0: {"batch": 4096, "steps": 1000, "learning_rate": 0.0663, "loss_cap": 0.125, "bias_scale": 0.1},
    },
    average=0.98,
)


@dataclass(frozen=True)
class FeatureRow:
    """One line of the tables in docs/images.md: which features, and which heads are tried on them."""

    table: str
    name: str
    features: FeatureSettings
    heads: Heads


def _rows() -> tuple[FeatureRow, ...]:
    scattering = FeatureSettings(flip=True)
    patches = FeatureSettings(scattering=0.0, patches=1024, flip=True)
    both = FeatureSettings(patches=1024, flip=True, whiten=1.0)
    earlier = replace(both, patches=1536, patch_size=5)
    tamed = replace(earlier, power=0.7)
    twice = replace(tamed, smooth=(1, 2, 0))
    grey = replace(twice, grey=768, smooth=(1, 2, 1))
    first = [
        ("scattering, no mirror images", FeatureSettings(), _LARGE),
        ("scattering", scattering, _LARGE),
        ("scattering, whitened", replace(scattering, whiten=1.0), _LARGE),
        ("patches, not whitened", patches, _LARGE),
        ("patches, whitened", replace(patches, whiten=1.0), _SMALL),
        ("scattering and patches, whitened", both, _SMALL),
        ("5 x 5 patches, 1,536 filters", earlier, _SMALL),
    ]
    second = [
        ("earlier features", earlier), ("power 0.7", tamed), ("smoothed patches", replace(tamed, smooth=(0, 1, 0))),
        ("smoothed scattering", replace(tamed, smooth=(1, 1, 0))), ("patches smoothed twice", twice),
        ("grey patches", grey), ("scattering 0.7", replace(grey, scattering=0.7)),
    ]  # fmt: skip
    return (*(FeatureRow("features", *row) for row in first), *(FeatureRow("later", *row, _CHOSEN) for row in second))


ROWS = _rows()


def run(
    out: Path,
    device: str = "cpu",
    *,
    rows: Sequence[FeatureRow] | None = None,
    limit: int | None = None,
    say: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Train and score every row on CIFAR-10's validation split; ``ablation.csv`` is written as rows come.

    Formal guarantees: of each run by itself, its epsilon by PLD for adding or removing one record. All of them read the
    same records, and choosing by them is not charged. The test part is not read.
    """
    study = ImageStudy("cifar10", out, device, limit=limit, say=say)
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    found: list[dict[str, Any]] = []
    for row in ROWS if rows is None else rows:
        fit, val = study.split(row.features)
        for epsilon, heads in row.heads.items():
            method = f"ablation/{row.table}/{row.name}"
            accuracy = max(study.trial(fit, val, head, epsilon, method=method) for head in heads)
            found.append({
                "dataset": "cifar10", "table": row.table, "features": row.name, "epsilon": f"{epsilon:g}",
                "accuracy": f"{accuracy:.2f}", "seed": 0, "width": fit.width, "device": name,
            })  # fmt: skip
            say(" ".join(f"{k}={v}" for k, v in found[-1].items()))
        del fit, val
        if device == "cuda":
            torch.cuda.empty_cache()
        with (study.out / "ablation.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list[str](COLUMNS), lineterminator="\n")
            writer.writeheader()
            writer.writerows(found)
    return found
