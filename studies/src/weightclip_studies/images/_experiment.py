"""The image experiment: choose features and settings on a validation split, train on all of it, test once."""

from __future__ import annotations

import csv
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weightclip.errors import WeightclipError
from weightclip_studies.data import load_images
from weightclip_studies.images._check import largest_shares
from weightclip_studies.images._features import FeatureMap, FeatureSettings
from weightclip_studies.images._heads import HeadTrainer
from weightclip_studies.images._noise import DELTA, NoiseTable
from weightclip_studies.images._product import Features
from weightclip_studies.images._search import METHODS, proposals
from weightclip_studies.images._settings import HeadSettings

EPSILONS = {"mnist": (1.0, 2.0, 3.0), "fashion_mnist": (1.0, 2.0, 3.0), "cifar10": (1.0, 3.0, 8.0)}
COLUMNS = (
    "dataset", "model", "method", "epsilon", "delta", "accountant", "seeds", "median", "sem", "seconds", "device",
)  # fmt: skip

_PATCHES = FeatureSettings(scattering=0.0, patches=1024, whiten=1.0)
# Where the greedy choice of features starts, and the changes it tries in turn.
CANDIDATES: dict[str, tuple[FeatureSettings, tuple[dict[str, Any], ...]]] = {
    "cifar10": (
        replace(_PATCHES, flip=True),
        ({"threshold": 0.25}, {"scattering": 1.0}, {"whiten": 0.3}, {"patch_size": 5}, {"root": True},
         {"patches": 1536}, {"pool": 5}, {"power": 0.7}, {"smooth": (0, 1, 0)}, {"smooth": (1, 1, 0)},
         {"smooth": (1, 2, 0)}, {"grey": 768, "smooth": (1, 2, 1)}, {"scattering": 0.7}),
    ),
    "fashion_mnist": (
        FeatureSettings(patches=512, whiten=1.0, flip=True, root=True),
        ({"flip": False}, {"patches": 1024}, {"pool": 5}),
    ),
    "mnist": (FeatureSettings(), ({"whiten": 1.0}, {"patches": 512, "whiten": 1.0, "root": True}, {"pool": 5})),
}  # fmt: skip
# Linear heads by which features are compared: epsilon -> steps, B, learning rates.
_PROBES = {
    1.0: (300, 0.2, (0.03, 0.06)),
    2.0: (500, 0.25, (0.03, 0.06)),
    3.0: (600, 0.3, (0.03, 0.06)),
    8.0: (1000, 0.4, (0.03,)),
}


@dataclass
class ImageStudy:
    """One data set: features, search, final runs.

    Formal guarantees: of each *final run*, its epsilon by PLD for adding or removing one record, given its settings.
    The choice of settings on the validation split is not charged, as usual in this literature; docs/images.md says so.
    """

    dataset: str
    out: Path
    device: str = "cpu"
    trials: int = 6
    seeds: int = 5
    hidden: int = 128
    methods: Sequence[str] = METHODS
    linear_methods: Sequence[str] = ("lip-weights", "dp-sgd", "non-private")
    features: FeatureSettings | None = None  # None: chosen on the validation split
    limit: int | None = None  # use only so many records of each part
    epsilons: Sequence[float] | None = None
    say: Callable[[str], None] = print
    _log: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.out = Path(self.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.noise = NoiseTable(self.out / "noise.json")
        self.levels = tuple(self.epsilons or EPSILONS[self.dataset])
        train, test = (self._load(part) for part in ("train", "test"))
        self.images, self.labels = train
        self.test_images, self.test_labels = test
        order = torch.randperm(len(self.images), generator=torch.Generator().manual_seed(0)).to(self.device)
        held = len(order) // 10
        self.fit_rows, self.val_rows = order[held:], order[:held]
        self.started = time.perf_counter()

    def _load(self, part: str) -> tuple[Tensor, Tensor]:
        images, labels = load_images(self.dataset, part)
        stop = self.limit or len(images)
        return tuple(torch.from_numpy(a[:stop].copy()).to(self.device) for a in (images, labels))  # pyright: ignore

    # -- choices, on the validation split ------------------------------------------------------------------------------

    def split(self, settings: FeatureSettings) -> tuple[Features, Features]:
        """Features of the training and validation parts of the training set."""
        features = FeatureMap(settings, tuple(self.images.shape[1:]), self.device).encode(self.images, self.labels)
        return features.subset(self.fit_rows), features.subset(self.val_rows)

    def trial(
        self,
        fit: Features,
        val: Features,
        settings: HeadSettings,
        epsilon: float | None,
        seed: int = 0,
        method: str = "",
    ) -> float:
        """Validation accuracy of one run."""
        sigma = self.noise.get(epsilon, len(fit), min(settings.batch, len(fit)), settings.steps)
        return HeadTrainer(fit, settings, sigma, seed, self._stream("trial", method, epsilon)).fit().accuracy(val)

    def _stream(self, stage: str, method: str, epsilon: float | None, features: FeatureSettings | None = None) -> str:
        """Name of a run's draws and noise; runs on other features are other runs."""
        told = "" if features is None else "/" + json.dumps(features.to_dict(), sort_keys=True)
        return f"{self.dataset}/{stage}/{method}/{epsilon}{told}"

    def choose_features(self) -> FeatureSettings:
        """Greedy: start from the set's first candidate, keep each change that raises the validation accuracy."""
        if self.features is not None:
            return self.features
        best, changes = CANDIDATES[self.dataset]
        score = self._feature_score(best)
        for change in changes:
            candidate = replace(best, **change)
            value = self._feature_score(candidate)
            if value > score:
                best, score = candidate, value
        return best

    def _feature_score(self, settings: FeatureSettings) -> float:
        fit, val = self.split(settings)
        accuracies = []
        for epsilon in self.levels:
            steps, cap, rates = _PROBES[epsilon]
            heads = [HeadSettings(hidden=0, steps=steps, loss_cap=cap, learning_rate=r) for r in rates]
            accuracies.append(max(self.trial(fit, val, head, epsilon) for head in heads))
        score = statistics.fmean(accuracies)
        self._note(stage="features", settings=settings.to_dict(), score=score, accuracies=accuracies, width=fit.width)
        if self.device == "cuda":
            torch.cuda.empty_cache()
        return score

    def cells(self) -> list[tuple[str, int, float | None]]:
        """(method, hidden units, epsilon) of every row of the table."""
        heads = [(m, 0) for m in self.linear_methods if m in self.methods]
        heads += [(m, self.hidden) for m in self.methods if self.hidden]
        return [(m, h, e) for m, h in heads for e in (self.levels if m != "non-private" else (None,))]

    def tune(self, fit: Features, val: Features, method: str, hidden: int, epsilon: float | None) -> HeadSettings:
        """The best of ``trials`` random settings on the validation split."""
        scored = []
        for settings in proposals(method, hidden, epsilon, self.trials):
            accuracy = self.trial(fit, val, settings, epsilon, method=method)
            scored.append((accuracy, settings))
            self._note(stage="tune", method=method, epsilon=epsilon, accuracy=accuracy, quiet=True,
                       settings=settings.to_dict())  # fmt: skip
        accuracy, best = max(scored, key=lambda s: s[0])
        spread = " ".join(f"{a:.1f}" for a, _ in scored)
        self._note(stage="chosen", method=method, epsilon=epsilon, hidden=hidden, accuracy=accuracy, trials=spread)
        return best

    # -- final runs ----------------------------------------------------------------------------------------------------

    def final(
        self, train: Features, test: Features, method: str, epsilon: float | None, settings: HeadSettings, model: str
    ) -> dict[str, Any]:
        """Train the chosen setting on the whole training set with every seed, and test each model once."""
        device = torch.cuda.get_device_name() if self.device == "cuda" else "cpu"
        batch = min(settings.batch, len(train))
        sigma = self.noise.get(epsilon, len(train), batch, settings.steps)
        spent = None if epsilon is None else self.noise.check(epsilon, len(train), batch, settings.steps)
        accuracies, shares, seconds = [], None, 0.0
        for seed in range(self.seeds):
            started = time.perf_counter()
            trainer = HeadTrainer(train, settings, sigma, seed, self._stream("final", method, epsilon, self.used)).fit()
            seconds += (time.perf_counter() - started) / self.seeds
            accuracies.append(trainer.accuracy(test))
            if seed == 0 and epsilon is not None:
                shares = largest_shares(trainer, 16)
        row = {
            "dataset": self.dataset,
            "model": model,
            "method": method,
            "epsilon": "inf" if epsilon is None else f"{epsilon:g}",
            "delta": DELTA,
            "accountant": "pld",
            "seeds": self.seeds,
            "median": f"{statistics.median(accuracies):.2f}",
            "sem": f"{statistics.stdev(accuracies) / len(accuracies) ** 0.5:.3f}" if self.seeds > 1 else "",
            "seconds": f"{seconds:.2f}",
            "device": device,
        }
        self._note(stage="final", **row, accuracies=accuracies, spent=spent, sigma=sigma, shares=shares,
                   features=self.used.to_dict(), settings=settings.to_dict(), records=len(train))  # fmt: skip
        return row

    def run(self) -> None:
        """Everything, and the files; every cell's row is written as soon as it is there."""
        features = self.used = self.choose_features()
        self._note(stage="features-chosen", settings=features.to_dict())
        feature_map = FeatureMap(features, tuple(self.images.shape[1:]), self.device)
        train = feature_map.encode(self.images, self.labels)
        test = feature_map.encode(self.test_images, self.test_labels)
        fit, val = train.subset(self.fit_rows), train.subset(self.val_rows)
        rows = []
        for method, hidden, epsilon in self.cells():
            settings = self.tune(fit, val, method, hidden, epsilon)
            model = f"{features.name}+{f'mlp{hidden}' if hidden else 'linear'}"
            rows.append(self.final(train, test, method, epsilon, settings, model))
            self._write(rows)

    # -- files ---------------------------------------------------------------------------------------------------------

    def _note(self, *, quiet: bool = False, **entry: Any) -> None:
        entry = {"at": round(time.perf_counter() - self.started, 1), "dataset": self.dataset, **entry}
        self._log.append(entry)
        with (self.out / f"{self.dataset}.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")
        if not quiet:
            self.say(" ".join(f"{k}={v}" for k, v in entry.items() if k not in ("settings", "features")))

    def _write(self, rows: list[dict[str, Any]]) -> None:
        merge_rows(self.out / "accuracy.csv", rows)
        finals = [{k: v for k, v in e.items() if k != "at"} for e in self._log if e["stage"] == "final"]
        merge_finals(self.out / f"{self.dataset}.json", finals)


def merge_finals(path: Path, finals: list[dict[str, Any]]) -> None:
    """Put final runs into a set's file, in the place of earlier ones of the same model, method and epsilon."""
    known = {_key(e): e for e in (json.loads(path.read_text()) if path.exists() else [])}
    known |= {_key(e): e for e in finals}
    path.write_text(json.dumps(list(known.values()), indent=1) + "\n")


def chosen_features(folder: Path, dataset: str) -> FeatureSettings:
    """The features of a data set's first results in ``folder``."""
    path = Path(folder) / f"{dataset}.json"
    if not path.exists():
        raise WeightclipError(f"no results of {dataset!r} in {folder}: run without --keep-features first")
    return FeatureSettings(**json.loads(path.read_text())[0]["features"])


def _key(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(row[k]) for k in ("dataset", "model", "method", "epsilon"))


def merge_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Put rows into the table, in the place of earlier ones of the same data set, model, method and epsilon."""
    table: dict[tuple[str, ...], dict[str, Any]] = {}
    if path.exists():
        with path.open(newline="") as file:
            table = {_key(r): r for r in csv.DictReader(file)}
    table |= {_key(r): r for r in rows}
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list[str](COLUMNS), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table[k] for k in sorted(table, key=lambda k: (k[0], k[1], k[2], float(k[3]))))
