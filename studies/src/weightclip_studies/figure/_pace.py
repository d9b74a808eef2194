"""The paper's runtime figure on real data: seconds of an epoch of whole steps, in physical batches, by views."""

from __future__ import annotations

import csv
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weightclip.errors import WeightclipError
from weightclip_studies.data import load_images
from weightclip_studies.figure._driver import CROPS
from weightclip_studies.figure._plan import NETWORK
from weightclip_studies.figure._recipe import BY_OPACUS, Recipe
from weightclip_studies.figure._train import _Engine, _Other
from weightclip_studies.images._nets import Pictures
from weightclip_studies.images._training import _now, _tf32

PACE_MODES: dict[str, str] = {
    "plain": "plain", "weightclip": "weights", "weightclip-cap": "joint", "opacus": "opacus",
}  # fmt: skip
"""Name in the table -> method of the figure. Opacus by its hooks or by ghost clipping, as the figure trains it."""
COLUMNS = ("dataset", "model", "mode", "batch", "views", "physical", "seconds_per_epoch", "peak_gib", "device")
BATCHES = (256, 1024, 4096)
SUBJECTS = {"convnet": "mnist", "wrn-16-4": "cifar10"}
"""The paper's: network -> data set."""


@dataclass
class Pace:
    """Times epochs, the modes one after the other.

    Drawing, augmentation, passes in pieces, noise, the ledger and the optimiser are inside; an epoch is records/batch
    steps. Every mode computes in TF32 on CUDA, in float32 on a CPU.

    Attributes:
        out: CSV file; rows of other settings in it are kept.
        device: cpu or cuda.
        views: Augmented views of each record. Opacus knows none: it gets every view as a record of its own, which
            takes the time that several views would, and says nothing about what it would learn.
        physical: Rows of one pass through the network at most, views counted.
        steps: Timed steps of each mode; as many go before them, untimed.
        limit: Use only so many records.
        say: Told each row.
    """

    out: Path
    device: str = "cpu"
    views: int = 1
    physical: int = 1024
    steps: int = 6
    limit: int | None = None
    say: Callable[[str], None] = print

    def run(self, datasets: Sequence[str], batches: Sequence[int], modes: Sequence[str]) -> list[dict[str, Any]]:
        """All rows, each written when it is known."""
        if self.physical < self.views:
            raise WeightclipError(f"--physical {self.physical} holds not one record of {self.views} views.")
        rows = []
        for dataset in datasets:
            data = self._records(dataset)
            for batch in batches:
                for mode in modes:
                    rows.append(self._row(dataset, data, batch, mode))
                    self.say(" ".join(f"{k}={v}" for k, v in rows[-1].items()))
                    write(rows, self.out)
        return rows

    def _records(self, dataset: str) -> Pictures:
        images, labels = (torch.from_numpy(a[: self.limit].copy()) for a in load_images(dataset, "train"))
        planes = images.unsqueeze(1) if images.dim() == 3 else images.movedim(-1, 1)
        return Pictures(planes.contiguous().to(self.device), labels.long().to(self.device), False)

    def _row(self, dataset: str, data: Pictures, batch: int, mode: str) -> dict[str, Any]:
        method, network = PACE_MODES[mode], NETWORK[dataset]
        ours = method not in (*BY_OPACUS, "plain")
        norm = network.startswith("wrn")  # as the figure's Wide-ResNet
        recipe = Recipe(network, method, batch, steps=2 * self.steps, views=self.views if ours else 1, group_norm=norm,
                        standardise=norm)  # fmt: skip
        cuda = data.x.is_cuda
        held = torch.cuda.memory_allocated() if cuda else 0
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        with tempfile.TemporaryDirectory() as folder, _tf32():
            kind = _Engine if ours else _Viewed
            run = kind(data, recipe, 1.0, 0, Path(folder) / "ledger", CROPS[dataset], self.physical)
            if isinstance(run, _Viewed):
                run.views = self.views
            try:
                run.model.train()
                paces = []
                for step in range(2 * self.steps):
                    began = _now(data.x.device)
                    run.step()
                    paces.append(_now(data.x.device) - began if step >= self.steps else 0.0)
            finally:
                run.close()
        pace = statistics.median(paces[self.steps :])
        peak = f"{(torch.cuda.max_memory_allocated() - held) / 2**30:.3g}" if cuda else ""
        return {"dataset": dataset, "model": network, "mode": mode, "batch": batch, "views": self.views,
                "physical": self.physical, "seconds_per_epoch": f"{pace * len(data) / run.batch:.4g}",
                "peak_gib": peak, "device": torch.cuda.get_device_name() if cuda else "cpu"}  # fmt: skip


class _Viewed(_Other):
    """Every view of a record as a record of its own."""

    views = 1

    def step(self) -> None:
        data = self.data
        drawn = torch.rand(len(data), generator=self.generator, device=data.x.device) < self.rate
        rows = drawn.nonzero().squeeze(1).repeat_interleave(self.views)
        if self.ledger is not None:
            self.ledger.charge(self.recipe.steps - self.ledger.charges)
        self.made += 1
        self.take(self.inputs(data.x[rows]), data.y[rows])


def write(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Put rows into the table in place of those of the same setting."""
    same = ("dataset", "model", "mode", "batch", "views", "physical", "device")
    new = {tuple(str(r[k]) for k in same) for r in rows}
    kept: list[dict[str, Any]] = []
    if path.exists():
        with path.open(newline="") as file:
            kept = [r for r in csv.DictReader(file) if tuple(r[k] for k in same) not in new]
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".part")
    with scratch.open("w", newline="") as file:
        writer: csv.DictWriter[str] = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows([*kept, *rows])
    scratch.replace(path)
