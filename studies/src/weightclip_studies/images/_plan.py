"""Everything about learned features in calls of a few minutes on one GPU: train, encode, heads; each call goes on."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from weightclip.errors import WeightclipError
from weightclip_studies.images._experiment import COLUMNS, ImageStudy, merge_finals, merge_rows
from weightclip_studies.images._learned import HeadStudy, feature_settings
from weightclip_studies.images._pieces import join
from weightclip_studies.images.extractor import PLACES, Recipe, Stored, extractor_name, train_extractor

ORDER = (
    ("cifar10", "joined"), ("fashion_mnist", "joined"), ("mnist", "joined"),
    ("cifar10", "learned"), ("fashion_mnist", "learned"), ("mnist", "learned"),
)  # fmt: skip
"""Heads by importance: (data set, kind of features)."""
_NEEDED = ("torch", "safetensors", "PIL", "dp_accounting")
_RESULTS = "results.tar.gz"
_BEGIN = 90.0  # seconds: making pictures and compiling take about a minute of a GPU, before the first step


@dataclass
class ExtractorPlan:
    """One call of the whole experiment.

    Attributes:
        work: Folder that stays on the machine: checkpoints, weights, data, rows.
        out: Folder for what is to be kept: weights, and ``results.tar.gz`` with rows and tables.
        device: "cpu" or "cuda".
        recipes: The extractors; features use all of them.
        minutes: Training time of each; None: by the recipes' steps.
        pieces: Folder of pieces of data that came with this call.
        earlier: Folder of what an earlier machine gave back; used where ``work`` has nothing.
        noise: Table of noise multipliers made ahead.
        order: (data set, kind) of heads, in order.
        trials: Heads tried for each row.
        seeds: Seeds of each chosen head.
        methods: Methods of the rows.
        share: Square of the learned block's weight where it is joined.
        limit: Use only so many records of each set.
        chunk: As in `HeadStudy`.
        within: Seconds of this call.
        say: Told how far it has come.
    """

    work: Path
    out: Path
    device: str = "cuda"
    recipes: Sequence[Recipe] = (Recipe(),)
    minutes: float | None = 4.0
    pieces: Path | None = None
    earlier: Path | None = None
    noise: Path | None = None
    order: Sequence[tuple[str, str]] = ORDER
    trials: int = 24
    seeds: int = 5
    methods: Sequence[str] = ("lip-weights", "non-private")
    share: float = 0.7
    limit: int | None = None
    chunk: int | None = None
    within: float = 520.0
    say: Callable[[str], None] = print
    _began: float = field(default_factory=time.time)
    _studies: dict[str, ImageStudy] = field(default_factory=dict)

    def run(self) -> list[str]:
        """Do what fits into the time; names of the jobs that are left."""
        check_machine(self.device)
        for folder in (self.work, self.out, self.weights, self.results):
            folder.mkdir(parents=True, exist_ok=True)
        self._take_over()
        ready = self._data()
        self._tell(f"data there: {', '.join(ready) or 'none yet'}")
        stored = self._train()
        left = [] if None not in stored else ["train"]
        for dataset, kind in self.order:
            name = f"{dataset} {kind}"
            try:
                done = left[:1] != ["train"] and dataset in ready and self._heads(dataset, kind, stored)
            except (WeightclipError, RuntimeError) as error:  # a set that is not there, a full GPU: the others go on
                self._tell(f"{name} failed: {type(error).__name__}: {error}")
                done = False
            if not done:
                left.append(name)
        self._keep()
        self._tell(f"left: {', '.join(left) or 'nothing'}")
        return left

    @property
    def weights(self) -> Path:
        """Folder of the extractors."""
        return self.work / "extractor"

    @property
    def results(self) -> Path:
        """Folder of rows and tables."""
        return self.work / "results"

    @property
    def until(self) -> float:
        """When nothing new may begin."""
        return self._began + self.within

    def _data(self) -> list[str]:
        """Data sets that can be read, after joining what came; those of this machine count where none was sent."""
        if self.pieces is None:
            return list(dict.fromkeys(dataset for dataset, _ in self.order))
        ready = join(self.pieces, self.work / "data")
        os.environ["WEIGHTCLIP_DATA"] = str(self.work / "data")
        return ready

    def _train(self) -> list[Stored | None]:
        stored: list[Stored | None] = []
        for recipe in self.recipes:
            left = self.until - time.time()
            there = (self.weights / f"{extractor_name(recipe.width, recipe.seed)}.json").exists()
            if not there and left < (_BEGIN if self.device == "cuda" else 0):
                stored.append(None)
                continue
            stored.append(
                train_extractor(recipe, self.weights, self.work, self.device, self.minutes, left, self._tell)
            )  # fmt: skip
            self._keep()
        return stored

    def _heads(self, dataset: str, kind: str, stored: Sequence[Stored | None]) -> bool:
        """Rows of one set and kind; whether all of them are there."""
        if time.time() > self.until:
            return False
        os.environ[PLACES] = str(self.weights)
        names = [one.name for one in stored if one is not None]
        features = feature_settings(dataset, kind, self.weights, names, self.share)
        self._tell(f"{dataset} {kind}")
        if dataset not in self._studies:  # reading the images takes seconds
            self._studies[dataset] = ImageStudy(
                dataset, self.results, self.device, seeds=self.seeds, limit=self.limit, say=self._tell
            )
        done = HeadStudy(
            self._studies[dataset], features, self.methods, self.trials, self.until, self.chunk, self._keep
        ).run()
        self._keep()
        return done

    def _take_over(self) -> None:
        """Put what an earlier machine gave back where it was."""
        if self.noise is not None and not (self.results / "noise.json").exists():
            shutil.copyfile(self.noise, self.results / "noise.json")
        if self.earlier is None:
            return
        for file in sorted(Path(self.earlier).glob("resnet9-*")):
            if not (self.weights / file.name).exists():
                shutil.copyfile(file, self.weights / file.name)
        archive = Path(self.earlier) / _RESULTS
        if archive.exists() and not list(self.results.glob("*.jsonl")):
            with tarfile.open(archive) as tar:
                tar.extractall(self.results, filter="data")

    def _keep(self) -> None:
        """Copy weights and rows to ``out``, so that a call that is cut off has left them."""
        for file in self.weights.iterdir():
            if not (self.out / file.name).exists():
                shutil.copyfile(file, self.out / file.name)
        new = self.out / f".{_RESULTS}"
        with tarfile.open(new, "w:gz") as tar:
            for file in sorted(path for path in self.results.iterdir() if path.is_file()):
                tar.add(file, file.name)
        new.replace(self.out / _RESULTS)

    def _tell(self, line: str) -> None:
        self.say(f"[{time.time() - self._began:5.0f} s] {line}")


def adopt(kept: Path, out: Path, weights: Path) -> list[str]:
    """Put what a plan kept beside earlier results: rows into the tables, weights into their folder; names of the sets.

    Rows replace earlier ones of the same set, model, method and epsilon; lines of the logs are added once.
    """
    weights.mkdir(parents=True, exist_ok=True)
    for file in sorted(Path(kept).glob("resnet9-*")):
        shutil.copyfile(file, weights / file.name)
    found = []
    with tempfile.TemporaryDirectory() as folder, tarfile.open(Path(kept) / _RESULTS) as tar:
        tar.extractall(folder, filter="data")
        for path in sorted(Path(folder).glob("*.jsonl")):
            log = out / path.name
            old = log.read_text().splitlines() if log.exists() else []
            new = [line for line in path.read_text().splitlines() if line.endswith("}") and line not in set(old)]
            log.write_text("".join(f"{line}\n" for line in [*old, *new]))
            finals = path.with_suffix(".json")
            if finals.exists():
                entries = json.loads(finals.read_text())
                merge_finals(out / finals.name, entries)
                merge_rows(out / "accuracy.csv", [{k: e[k] for k in COLUMNS} for e in entries])
                found.append(path.stem)
    return found


def check_machine(device: str) -> None:
    """Stop at once where a package or the GPU is missing, before time is spent."""
    for name in _NEEDED:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise WeightclipError(f"plan: {error}; `weightclip-study extractor pack` copies what it can") from error
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise WeightclipError("plan: torch sees no GPU here; --device cpu runs without one")
