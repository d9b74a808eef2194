"""Convolutional networks at a given epsilon: settings chosen on a validation split, then every seed tested once."""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from weightclip_studies.data import load_images
from weightclip_studies.images._experiment import merge_rows
from weightclip_studies.images._nets import Pictures
from weightclip_studies.images._noise import DELTA, NoiseTable
from weightclip_studies.images._training import BOUNDS, ConvSettings, accuracy, train

CAPS_COLUMNS = (
    "dataset", "model", "bound", "epsilon", "delta", "accountant", "seeds", "median", "sem", "trials", "batch", "steps",
    "learning_rate", "quantile", "allocation", "views", "precision", "cost", "device",
)  # fmt: skip
COST_COLUMNS = ("dataset", "model", "bound", "batch", "precision", "ms_per_step", "ratio", "peak_gib", "device")
TIGHTNESS_COLUMNS = ("dataset", "model", "bound", "epsilon", "step", "layer", "sensitivity", "exact", "channel", "free",
                     "largest")  # fmt: skip
CHOSEN = "convolutions.json"
MIN_SEEDS = 5  # of a row in the table of methods

# network -> batch, steps by epsilon
_LENGTH: dict[str, tuple[int, dict[float | None, int]]] = {
    "small-cnn": (2048, {1.0: 250, 2.0: 350, 3.0: 400, 8.0: 250, None: 400}),
    "scattering+cnn": (4096, {1.0: 200, 2.0: 300, 3.0: 300, 8.0: 400, None: 300}),
    "wrn-16-4": (4096, {8.0: 60, None: 60}),
    "wrn-10-1": (64, {8.0: 4, 3.0: 4, None: 4}),
}
_RATES = {"scattering+cnn": (3e-3, 8e-3)}
_DEFAULT_RATES = (2e-3, 6e-3)
# What each way of bounding has to choose besides the learning rate.
_KNOBS: dict[str, tuple[dict[str, Any], ...]] = {
    "opacus": ({"clip": 0.1}, {"clip": 1.0}),
    "weights": ({"clip": 1.0, "loss_cap": 0.5}, {"clip": 2.0, "loss_cap": 0.5}),
    "plain": ({}, {"average": 0.99}),
}
_QUANTILES = ({"quantile": 0.4}, {"quantile": 0.7})


@dataclass(frozen=True)
class Cell:
    """One row to be made: a network under one bound at one epsilon (None: not private)."""

    network: str
    bound: str
    epsilon: float | None
    trials: int = 4
    seeds: int = 5
    changes: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """For files and streams."""
        changed = "".join(f"-{k}={v}" for k, v in self.changes)
        return f"{self.network}-{self.bound}-{'inf' if self.epsilon is None else f'{self.epsilon:g}'}{changed}"


def proposals(cell: Cell) -> list[ConvSettings]:
    """Settings to try, the same number for every way of bounding: learning rates times one knob of each way."""
    batch, steps = _LENGTH[cell.network]
    base = ConvSettings(cell.network, cell.bound, batch, steps[cell.epsilon])
    knobs = _KNOBS.get(cell.bound, _QUANTILES)
    every = [replace(base, learning_rate=r, **k) for k in knobs for r in _RATES.get(cell.network, _DEFAULT_RATES)]
    order = (3, 2, 1, 0)  # two trials differ in the learning rate
    return [replace(every[i], **dict(cell.changes)) for i in order[: cell.trials]]


@dataclass
class ConvStudy:
    """Cells on one data set; every trial and every row goes to files as soon as it is there.

    Formal guarantees: of each *final run*, its epsilon by PLD for adding or removing one record, given its settings;
    choosing settings on the validation split is not charged.
    """

    dataset: str
    out: Path
    device: str = "cpu"
    limit: int | None = None
    changes: dict[str, Any] = field(default_factory=dict)  # of every setting, for tests
    deadline: float = math.inf
    say: Callable[[str], None] = print

    def __post_init__(self) -> None:
        self.out = Path(self.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.noise = NoiseTable(self.out / "noise.json")
        self._raw = {part: load_images(self.dataset, part) for part in ("train", "test")}
        self._held: dict[str, tuple[Pictures, Pictures]] = {}

    def pictures(self, network: str) -> tuple[Pictures, Pictures]:
        """Training and test records as the network reads them, on the device."""
        if network not in self._held:
            self._held.clear()
            made = []
            for part in ("train", "test"):
                images, labels = (torch.from_numpy(a[: self.limit].copy()).to(self.device) for a in self._raw[part])
                made.append(Pictures.load(images, labels, network))
            self._held[network] = (made[0], made[1])
        return self._held[network]

    def run(self, cell: Cell, watch: int = 0) -> dict[str, Any]:
        """Choose on a tenth of the training set, train on all of it with every seed, test each model once."""
        train_set, test_set = self.pictures(cell.network)
        order = torch.randperm(len(train_set), generator=torch.Generator().manual_seed(0)).to(self.device)
        held = len(order) // 10
        tried = [replace(s, **self.changes) for s in proposals(cell)]
        chosen, scores = tried[0], []
        if len(tried) > 1:
            fit, val = train_set.subset(order[held:]), train_set.subset(order[:held])
            known = self._trials(cell)
            for settings in tried:
                if (score := known.get(json.dumps(settings.to_dict()))) is not None:
                    scores.append(score)
                    continue
                sigma = self._sigma(cell.epsilon, fit, settings)
                model = train(fit, settings, sigma, 0, self._stream("trial", cell), deadline=self.deadline).model
                scores.append(accuracy(model, val))
                self._note(cell, stage="trial", accuracy=scores[-1], settings=settings.to_dict())
            chosen = tried[max(range(len(tried)), key=scores.__getitem__)]
            del fit, val
        sigma = self._sigma(cell.epsilon, train_set, chosen)
        spent = None
        if cell.epsilon is not None:
            batch = min(chosen.batch, len(train_set))
            spent = self.noise.check(cell.epsilon, len(train_set), batch, chosen.steps)
        runs: list[dict[str, Any]] = []
        rows: list[dict[str, Any]] = []
        for seed in range(cell.seeds):
            try:
                done = train(
                    train_set, chosen, sigma, seed, self._stream("final", cell), watch=watch if seed == 0 else 0,
                    deadline=self.deadline, budget=None if cell.epsilon is None or seed else (cell.epsilon, DELTA),
                )  # fmt: skip
            except TimeoutError:
                if not runs:
                    raise
                break  # a row of fewer seeds says so
            rows += done.rows
            run = {"seed": seed, "accuracy": accuracy(done.model, test_set), "seconds": done.seconds,
                   "step_ms": done.step_ms, "peak_gib": done.peak_gib, **done.report}  # fmt: skip
            runs.append(run)
            self._note(cell, stage="run", **run)
        entry = {
            "dataset": self.dataset, "model": cell.network, "bound": cell.bound, "method": BOUNDS[cell.bound],
            "epsilon": "inf" if cell.epsilon is None else f"{cell.epsilon:g}", "changes": dict(cell.changes),
            "settings": chosen.to_dict(), "trials": [round(a, 2) for a in scores], "runs": runs, "sigma": sigma,
            "spent": spent, "records": len(train_set), "device": self._device_name(), "tightness": rows,
        }  # fmt: skip
        self._note(cell, stage="final", **entry)
        return entry

    def _trials(self, cell: Cell) -> dict[str, float]:
        """Validation accuracy by settings of the trials that were made before: they are not made again."""
        path = self.out / f"{self.dataset}-{cell.name}.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return {json.dumps(e["settings"]): e["accuracy"] for e in lines if e["stage"] == "trial"}

    def _sigma(self, epsilon: float | None, data: Pictures, settings: ConvSettings) -> float:
        return self.noise.get(epsilon, len(data), min(settings.batch, len(data)), settings.steps)

    def _stream(self, stage: str, cell: Cell) -> str:
        return f"{self.dataset}/{stage}/{cell.name}"

    def _device_name(self) -> str:
        return torch.cuda.get_device_name() if self.device.startswith("cuda") else "cpu"

    def _note(self, cell: Cell, **entry: Any) -> None:
        with (self.out / f"{self.dataset}-{cell.name}.jsonl").open("a") as file:
            file.write(json.dumps({"dataset": self.dataset, "cell": cell.name, **entry}) + "\n")
        shown = {k: v for k, v in entry.items() if k in ("stage", "accuracy", "seconds", "step_ms", "trials", "device")}
        self.say(f"{self.dataset} {cell.name} " + " ".join(f"{k}={v}" for k, v in shown.items()))


def cost(
    data: Pictures, dataset: str, network: str, bounds: Iterable[str], batch: int, *, steps: int = 8, **changes: Any
) -> list[dict[str, Any]]:
    """Milliseconds of a step and peak memory under each bound, alone on the device; the ratio is to plain training."""
    rows: list[dict[str, Any]] = []
    base = math.nan
    for bound in bounds:
        settings = ConvSettings(network, bound, batch, steps, **changes)
        done = train(data, settings, 0.0 if bound == "plain" else 1.0, stream="cost", every=1)
        base = done.step_ms if bound == "plain" else base
        name = torch.cuda.get_device_name() if data.x.is_cuda else "cpu"
        values = (dataset, network, bound, batch, _precision(settings.to_dict()), f"{done.step_ms:.4g}",
                  f"{done.step_ms / base:.3g}", "" if done.peak_gib is None else f"{done.peak_gib:.3g}",
                  name)  # fmt: skip
        rows.append(dict(zip(COST_COLUMNS, values, strict=True)))
    return rows


def _precision(settings: dict[str, Any]) -> str:
    return ("bf16" if settings["bf16"] else "tf32") + (", compiled" if settings["compiled"] else "")


def collect(entries: list[dict[str, Any]], out: Path) -> None:
    """Merge finished rows into the tables of ``out``: convolutions.json, caps.csv, accuracy.csv, conv_tightness.csv.

    The column ``cost`` of caps.csv is a step's time over plain training's, from conv_cost.csv where it was measured
    (alone on the device; the runs themselves share it).
    """
    path, costs = out / CHOSEN, out / "conv_cost.csv"
    table = {_key(e): e for e in (json.loads(path.read_text()) if path.exists() else [])}
    table |= {_key(e): e for e in entries}
    finals = [table[k] for k in sorted(table)]
    path.write_text(json.dumps(finals, indent=1) + "\n")
    paid: dict[tuple[str, ...], str] = {}
    if costs.exists():
        with costs.open(newline="") as file:
            paid = {(r["dataset"], r["model"], r["bound"], r["precision"]): r["ratio"] for r in csv.DictReader(file)}
    rows, public, tight = [], [], []
    for e in finals:
        s, accuracies = e["settings"], [r["accuracy"] for r in e["runs"]]
        middle = f"{statistics.median(accuracies):.2f}"
        sem = f"{statistics.stdev(accuracies) / len(accuracies) ** 0.5:.3f}" if len(accuracies) > 1 else ""
        where = (e["dataset"], e["model"], e["bound"])
        shared = (e["epsilon"], DELTA, "pld", len(accuracies), middle, sem)
        values = (*where, *shared, len(e["trials"]), s["batch"], s["steps"], s["learning_rate"], s["quantile"],
                  s["allocation"], s["views"], _precision(s), paid.get((*where, _precision(s)), ""),
                  e["device"])  # fmt: skip
        rows.append(dict(zip(CAPS_COLUMNS, values, strict=True)))
        # one row per method in the table of methods, where settings were chosen; of the caps, the exact ones
        if e["trials"] and len(accuracies) >= MIN_SEEDS and (BOUNDS[e["bound"]] != "caps" or e["bound"] == "exact"):
            names = ("dataset", "model", "method", "epsilon", "delta", "accountant", "seeds", "median", "sem")
            seconds = f"{statistics.fmean(r['seconds'] for r in e['runs']):.2f}"
            row = dict(zip(names, (*where[:2], e["method"], *shared), strict=True))
            public.append(row | {"seconds": seconds, "device": e["device"]})
        for t in e["tightness"]:
            numbers = (f"{t[k]:.4g}" for k in TIGHTNESS_COLUMNS[6:])
            tight.append(dict(zip(TIGHTNESS_COLUMNS, (*where, e["epsilon"], t["step"], t["layer"], *numbers),
                                  strict=True)))  # fmt: skip
    write_table(out / "caps.csv", rows, CAPS_COLUMNS)
    write_table(out / "conv_tightness.csv", tight, TIGHTNESS_COLUMNS)
    merge_rows(out / "accuracy.csv", public)


def read_finals(folder: Path) -> list[dict[str, Any]]:
    """The finished rows among a study's jsonl files."""
    found = []
    for path in sorted(Path(folder).glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found += [
            {k: v for k, v in e.items() if k not in ("cell", "stage")} for e in lines if e.get("stage") == "final"
        ]
    return [e for e in found if "bound" in e]


def write_costs(out: Path, rows: list[dict[str, Any]]) -> None:
    """Merge rows of `cost` into conv_cost.csv, and into the column ``cost`` of caps.csv."""
    path = out / "conv_cost.csv"
    kept: list[dict[str, Any]] = []
    if path.exists():
        with path.open(newline="") as file:
            kept = list(csv.DictReader(file))
    table = {tuple(r[k] for k in ("dataset", "model", "bound", "precision")): r for r in (*kept, *rows)}
    write_table(path, list(table.values()), COST_COLUMNS)
    if (out / CHOSEN).exists():
        collect([], out)


def write_table(path: Path, rows: list[dict[str, Any]], columns: tuple[str, ...]) -> None:
    """Rows as CSV."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list[str](columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _key(e: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(e[k]) for k in ("dataset", "model", "bound", "epsilon", "changes"))
