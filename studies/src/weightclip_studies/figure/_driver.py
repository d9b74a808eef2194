"""Makes the cells of the figure: settings chosen on a validation split, then each seed trained on all, tested once."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import math
import shutil
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from weightclip.errors import WeightclipError
from weightclip_studies.data import load_images
from weightclip_studies.figure._plan import Cell, Place, next_place, open_sides
from weightclip_studies.figure._recipe import BY_OPACUS, Recipe
from weightclip_studies.figure._rows import CODE, ROWS_FILE, Row, append, is_current, of_recipe, read_rows, standing
from weightclip_studies.figure._train import Crops, Trained, discard, train
from weightclip_studies.images._nets import Pictures
from weightclip_studies.images._noise import NoiseTable
from weightclip_studies.images._training import accuracy

_WHOLE = 0.98  # share of its steps that must be in the weights of a finished run
_COMPILES = 60  # seconds without which a compiled run is not worth beginning
CROPS = {"mnist": Crops(2, flip=False), "fashion_mnist": Crops(2), "cifar10": Crops(4)}


@dataclass
class Figure:
    """Runs of the figure; each finished one is a row of ``out/figure.jsonl``, and none is made twice.

    A row counts as made where its recipe (all settings), its number of records and, of a final run, the code are those
    that it would have now: with other settings, or where more trials lead to another choice, new rows are made and the
    table takes them as soon as there are as many seeds of them as of the old ones.

    Processes that make different methods or data sets may share a folder: a row is one short write at the file's end.

    Attributes:
        out: Folder of rows, noise multipliers, checkpoints and ledgers.
        device: cpu or cuda.
        trials: Settings tried on the validation split, the same number for every method; 1 chooses nothing.
        seeds: Runs of the chosen settings; 0: search only.
        limit: Use only so many records of each part.
        deadline: ``time.monotonic()`` after which nothing begins; a run under way is put aside until the next call.
        changes: Of every recipe, for tests.
        finish: A run that the deadline stops is tested as it is, with fewer releases than its noise was made for,
            instead of being put aside.

    Formal guarantees:
        Of each *final run*, its epsilon by PLD for adding or removing one record, given its settings. Choosing settings
        on the validation split is not charged, as usual in this literature. The test part is read by final runs alone,
        once by each.
    """

    out: Path
    device: str = "cpu"
    trials: int = 5
    seeds: int = 3
    limit: int | None = None
    deadline: float = math.inf
    changes: dict[str, Any] = field(default_factory=dict)
    finish: bool = False
    say: Callable[[str], None] = print

    def __post_init__(self) -> None:
        self.out = Path(self.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.noise = NoiseTable(self.out / "noise.json")
        self.rows = read_rows(self.out / ROWS_FILE)
        self.failed = 0  # cells
        self._held: tuple[str, Pictures, Pictures] | None = None
        self._raw = functools.cache(lambda dataset, part: load_images(dataset, part))

    def check(self, cells: Sequence[Cell]) -> None:
        """Refuse to begin where a package or a data set is missing; calibrate the noise of all searches' starts."""
        if any(c.method in BY_OPACUS for c in cells) and importlib.util.find_spec("opacus") is None:
            raise WeightclipError("opacus is not installed: pip install opacus, or choose other --methods.")
        sizes = {}
        for dataset in dict.fromkeys(c.dataset for c in cells):
            for part in ("train", "test"):
                labels = self._raw(dataset, part)[1][: self.limit]
                sizes[dataset] = len(labels) if part == "train" else sizes[dataset]
                self.say(f"{dataset} {part}: {len(labels)} records")
        for cell in cells:
            n, recipe = sizes[cell.dataset], self._recipe(cell, (0, 0))
            for records in ([n - n // 10] if self.trials > 1 else []) + [n]:
                self._sigma(cell, recipe, records)
        self.noise.save()

    def run(self, cells: Sequence[Cell]) -> bool:
        """Make the cells in turn until the deadline; whether all of them are there. A failure stops one cell only."""
        for number, cell in enumerate(cells, 1):
            try:
                made = self.make(cell)
            except Exception:
                self.failed += 1
                self.say(f"{cell.key} failed:\n{traceback.format_exc()}")
                continue
            if not made:
                self.say(f"stopped by the clock in cell {number} of {len(cells)}: run the same command again to go on")
                return False
        return not self.failed

    def make(self, cell: Cell) -> bool:
        """Choose settings on a tenth of the training part, then train on all of it and test, once for each seed."""
        for _ in range(self.trials if self.trials > 1 else 0):
            tried = self.tried(cell)
            place = next_place(cell, tried, self.trials, self._start(cell))
            if place is None:
                break
            train_part = self._parts(cell.dataset)[0]
            fit, val = split(train_part)
            if not self._one(cell, "trial", self._recipe(cell, place), 0, fit, val, place=list(place)):
                return False
        place = self.chosen(cell)
        choice = {"place": list(place), "trials": len(self.tried(cell)), "open_sides": self.open_sides(cell)}
        for seed in range(self.seeds):
            made = self._made(cell, place, seed)
            if made is None:
                train_part, test_part = self._parts(cell.dataset)
                if not self._one(cell, "final", self._recipe(cell, place), seed, train_part, test_part, **choice):
                    return False
            elif any(made[key] != value for key, value in choice.items()):  # the same choice, of more trials
                self._keep(made | choice)
        return True

    def _made(self, cell: Cell, place: Place, seed: int) -> Row | None:
        """The final run of these settings and this seed, if it is there and no older than a mend that concerns it."""
        recipe, records = self._recipe(cell, place), self._size(cell.dataset)
        found = [r for r in self.rows if r["stage"] == "final" and r["cell"] == cell.key and r["seed"] == seed
                 and of_recipe(r, recipe, records) and is_current(r)]  # fmt: skip
        return found[-1] if found else None

    def tried(self, cell: Cell) -> dict[Place, float]:
        """Validation accuracy by place of the lattice, of trials that would come out the same now."""
        n, found = self._size(cell.dataset), {}
        for row in self.rows:
            if row["stage"] == "trial" and row["cell"] == cell.key:
                place = (row["place"][0], row["place"][1])
                if of_recipe(row, self._recipe(cell, place), n - n // 10):
                    found[place] = row["accuracy"]
        return found

    def chosen(self, cell: Cell) -> Place:
        """The place with the best validation accuracy, or where a search would start."""
        tried = self.tried(cell)
        return max(tried, key=tried.__getitem__) if tried else self._start(cell)

    def open_sides(self, cell: Cell) -> list[str]:
        """Axes on which the choice lies at the edge of what was tried."""
        tried = self.tried(cell)
        return open_sides(cell, tried, self.chosen(cell)) if tried else []

    def _start(self, cell: Cell) -> Place:
        """Where the search of this method and set ended at the nearest epsilon, without changes; or the plan's."""
        ended = [r for r in standing(self.rows) if r["dataset"] == cell.dataset and r["trials"]
                 and r["recipe"]["method"] == cell.method and r["cell"] != cell.key and not r["changes"]]  # fmt: skip
        if not ended:
            return cell.start
        nearest = min(ended, key=lambda r: abs((r["target"] or 0) - (cell.epsilon or 0)))
        return nearest["place"][0], nearest["place"][1]

    def _one(
        self, cell: Cell, stage: str, recipe: Recipe, seed: int, fit: Pictures, judge: Pictures, **more: Any
    ) -> bool:
        """One run: a row if it ended; False if the clock stopped it."""
        if time.monotonic() + (_COMPILES if recipe.fast and fit.x.is_cuda else 0) > self.deadline:
            return False
        sigma = self._sigma(cell, recipe, len(fit))
        run = [cell.key, stage, recipe.to_dict(), sigma, seed, len(fit), more["place"], CODE]
        told = json.dumps(run, sort_keys=True)
        folder = self.out / "runs" / hashlib.sha256(told.encode()).hexdigest()[:16]
        name = f"{cell.key} {stage} seed {seed}"
        done = train(fit, recipe, sigma, seed, folder, crops=CROPS[cell.dataset], deadline=self.deadline,
                     finish=self.finish, tell=lambda line: self.say(f"{name}: {line}"))  # fmt: skip
        if done is None:
            self.say(f"{cell.key} {stage} seed {seed}: put aside in {folder}")
            return False
        if done.updates < _WHOLE * done.releases:  # killed before its first checkpoint, or much later than the last
            self.say(f"{cell.key} {stage} seed {seed}: only {done.updates} updates were kept; begun anew")
            shutil.rmtree(folder)  # nothing of it is published
            return self._one(cell, stage, recipe, seed, fit, judge, **more)
        check_spent(cell, recipe, done, self.finish)
        # how far the clock let a run come may depend on the sizes of its draws: it spent what its noise was made for
        spent = cell.epsilon if done.releases < recipe.steps else done.epsilon
        row = {"stage": stage, "cell": cell.key, "dataset": cell.dataset, "changes": dict(cell.changes), "seed": seed,
               "accuracy": accuracy(done.model, judge), "epsilon": None if cell.epsilon is None else spent,
               "target": cell.epsilon, "releases": done.releases, "updates": done.updates, "sigma": sigma,
               "records": len(fit), "seconds": round(done.seconds, 2), "step_ms": round(done.step_ms, 3),
               "device": self._device_name(), "code": CODE,
               "recipe": recipe.to_dict(), **more}  # fmt: skip
        self._keep(row)
        discard(folder)
        self.say(f"{cell.key} {stage} seed {seed}: {row['accuracy']:.2f}% in {row['seconds']:.0f} s, "
                 f"{row['step_ms']:.1f} ms a step, lr {recipe.learning_rate:g}, clip {recipe.clip:g}")  # fmt: skip
        return True

    def _keep(self, row: Row) -> None:
        self.rows.append(row)
        append(self.out / ROWS_FILE, row)

    def _size(self, dataset: str) -> int:
        """Records of the training part."""
        return len(self._raw(dataset, "train")[1][: self.limit])

    def _recipe(self, cell: Cell, place: Place) -> Recipe:
        recipe = cell.recipe(place)
        return Recipe(**(recipe.to_dict() | self.changes))

    def _sigma(self, cell: Cell, recipe: Recipe, records: int) -> float:
        known = len(self.noise.values)
        sigma = self.noise.get(cell.epsilon, records, min(recipe.batch, records), recipe.steps)
        if len(self.noise.values) > known:
            self.noise.save()
        return sigma

    def _parts(self, dataset: str) -> tuple[Pictures, Pictures]:
        """Training and test records of a data set, on the device; those of one set at a time."""
        if self._held is None or self._held[0] != dataset:
            parts = []
            for part in ("train", "test"):
                images, labels = (torch.from_numpy(a[: self.limit].copy()) for a in self._raw(dataset, part))
                planes = images.unsqueeze(1) if images.dim() == 3 else images.movedim(-1, 1)
                parts.append(Pictures(planes.contiguous().to(self.device), labels.long().to(self.device), False))
            self._held = (dataset, parts[0], parts[1])
        return self._held[1:]

    def _device_name(self) -> str:
        return torch.cuda.get_device_name() if self.device.startswith("cuda") else "cpu"


def split(train_part: Pictures) -> tuple[Pictures, Pictures]:
    """Nine tenths to train on and one to choose by, the same for every method."""
    order = torch.randperm(len(train_part), generator=torch.Generator().manual_seed(0)).to(train_part.x.device)
    held = len(order) // 10
    return train_part.subset(order[held:]), train_part.subset(order[:held])


def check_spent(cell: Cell, recipe: Recipe, done: Trained, fewer: bool = False) -> None:
    """A run that released more than it was calibrated for (or less, unless ``fewer``) is an error, not a row."""
    wrong = done.releases > recipe.steps or (done.releases < recipe.steps and not fewer)
    if cell.epsilon is not None and (done.epsilon > cell.epsilon * (1 + 1e-6) or wrong):
        raise WeightclipError(
            f"{cell.key}: {done.releases} releases of {recipe.steps}, epsilon {done.epsilon}, target {cell.epsilon}"
        )
