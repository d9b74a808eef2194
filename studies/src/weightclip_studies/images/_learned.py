"""Heads on learned features: chosen on validation by climbing, tested once, and resumed where they were interrupted."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from weightclip.errors import WeightclipError
from weightclip_studies.images._climb import Chosen, climb
from weightclip_studies.images._experiment import ImageStudy
from weightclip_studies.images._features import CHUNK, FeatureMap, FeatureSettings
from weightclip_studies.images._settings import HeadSettings
from weightclip_studies.images._stored import StoredCodes
from weightclip_studies.images.extractor import LearnedSettings, describe_extractor

FIXED: dict[str, FeatureSettings] = {
    "cifar10": FeatureSettings(
        scattering=0.7, patches=1536, patch_size=5, whiten=1.0, flip=True, grey=768, power=0.7, smooth=(1, 2, 1)
    ),
    "fashion_mnist": FeatureSettings(patches=512, whiten=1.0, root=True),
    "mnist": FeatureSettings(whiten=1.0, lines=True),
}
"""The fixed features of each set's table (docs/images.md), chosen there on the validation split.

Lines for MNIST are new: first chosen in a trial that looked at test images, then confirmed on the validation split
(docs/notes/images.md).
"""
KINDS = ("learned", "joined")
_CPU_CHUNK = 100  # records of a pass on a CPU: no slower than more, and the trial of their places is short
_MIRRORED = {"cifar10": True, "fashion_mnist": False, "mnist": False}  # as the fixed features were chosen


class OutOfTime(Exception):
    """The time that was given is over; what is finished is on disk."""


def feature_settings(
    dataset: str, kind: str, folder: Path, names: Sequence[str], share: float = 0.7
) -> FeatureSettings:
    """Learned features alone, or joined to the set's fixed ones, of the extractors ``names`` in ``folder``."""
    if kind not in KINDS:
        raise WeightclipError(f"features: choose one of {', '.join(KINDS)}, got {kind!r}")
    digests = tuple(describe_extractor(folder, name).sha256 for name in names)
    lines = FIXED[dataset].lines
    learned = LearnedSettings(tuple(names), digests, share=share, flip=_MIRRORED[dataset], lines=lines)
    return replace(FIXED[dataset] if kind == "joined" else FeatureSettings(scattering=0.0), learned=learned)


@dataclass
class HeadStudy:
    """Linear heads on one set's features; finished trials and rows in ``out`` are not made again.

    Formal guarantees: those of `ImageStudy`: of each final run, its epsilon by PLD for adding or removing one record.
    Choosing on the validation split is not charged. The test part is read by final runs alone.

    Attributes:
        study: The data set, its splits and its files.
        features: The features.
        methods: Methods, each with the same number of trials.
        trials: Heads tried for each row.
        until: Time (`time.time`) after which nothing new begins.
        chunk: Records of a pass; None: as many as `FeatureMap.chunk_alone` finds. A number is taken without that trial,
            and the rows' log says so: rounding could then let a record's place enter its features.
        after_row: Called after each row, when it is on disk.
    """

    study: ImageStudy
    features: FeatureSettings
    methods: Sequence[str] = ("lip-weights", "non-private")
    trials: int = 24
    until: float = math.inf
    chunk: int | None = None
    after_row: Callable[[], None] = lambda: None
    _trials: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        told = json.dumps(self.features.to_dict(), sort_keys=True)
        self.key = hashlib.sha256(told.encode()).hexdigest()[:16]
        self._path = self.study.out / f"{self.study.dataset}.jsonl"
        self.done: set[tuple[str, str]] = set()
        for line in self._path.read_text().splitlines() if self._path.exists() else ():
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # a line that a killed run did not finish
            if entry.get("key") == self.key and entry["stage"] == "trial":
                self._trials[_trial(entry["method"], entry["epsilon"], entry["settings"])] = entry["accuracy"]
            elif entry.get("key") == self.key and entry["stage"] == "row":
                self.done.add((entry["method"], entry["epsilon"]))

    def cells(self) -> list[tuple[str, float | None]]:
        """(method, epsilon) of rows that are not there yet."""
        wanted = [(m, e) for m in self.methods for e in (self.study.levels if m != "non-private" else (None,))]
        return [cell for cell in wanted if (cell[0], _level(cell[1])) not in self.done]

    def run(self) -> bool:
        """All rows; False when time was over before the last one."""
        if not self.cells():
            return True
        try:
            self._check_time()
            self._run()
        except OutOfTime:
            return False
        return True

    def _run(self) -> None:
        study = self.study
        study.used = self.features
        feature_map = FeatureMap(self.features, tuple(study.images.shape[1:]), study.device)
        tried = self.chunk is None
        chunk = self.chunk or feature_map.chunk_alone(study.device, CHUNK if study.device == "cuda" else _CPU_CHUNK)
        encoder = StoredCodes(feature_map, study.out / "codes" / f"{study.dataset}-{self.key}-{chunk}")
        told = "in which no record's features depend on another's" if tried else "not tried for records' places"
        study.say(f"{study.dataset}: passes of {chunk}, {told}")
        train = encoder.features("train", study.images, study.labels, chunk, self._check_time)
        fit, val = train.subset(study.fit_rows), train.subset(study.val_rows)
        test = None
        study._note(
            stage="encoded", key=self.key, width=train.width, chunk=chunk, alone=tried, features=self.features.to_dict()
        )
        for method, epsilon in self.cells():
            chosen = climb(self._scorer(fit, val, method, epsilon), method, epsilon, self.trials)
            self._tell(method, epsilon, chosen)
            self._check_time()
            if test is None:
                test = encoder.features("test", study.test_images, study.test_labels, chunk, self._check_time)
            row = study.final(train, test, method, epsilon, chosen.settings, f"{self.features.name}+linear")
            study._write([row])
            study._note(stage="row", key=self.key, method=method, epsilon=_level(epsilon), quiet=True)
            self.after_row()
        del train, fit, val, test
        if study.device == "cuda":
            torch.cuda.empty_cache()

    def _scorer(self, fit: Any, val: Any, method: str, epsilon: float | None) -> Callable[[HeadSettings], float]:
        def score(settings: HeadSettings) -> float:
            name = _trial(method, _level(epsilon), settings.to_dict())
            if name not in self._trials:
                self._check_time()
                accuracy = self.study.trial(fit, val, settings, epsilon, method=f"{method}/{self.key}")
                self.study._note(stage="trial", key=self.key, method=method, epsilon=_level(epsilon), quiet=True,
                                 accuracy=accuracy, settings=settings.to_dict())  # fmt: skip
                self._trials[name] = accuracy
            return self._trials[name]

        return score

    def _tell(self, method: str, epsilon: float | None, chosen: Chosen) -> None:
        spread = " ".join(f"{a:.1f}" for a in chosen.scores)
        self.study._note(stage="chosen", key=self.key, method=method, epsilon=_level(epsilon), trials=spread,
                         accuracy=chosen.accuracy, edges=list(chosen.edges))  # fmt: skip
        if chosen.edges:
            self.study.say(
                f"warning: {', '.join(chosen.edges)} lie at the end of their lists: lengthen them (_climb.py)"
            )

    def _check_time(self) -> None:
        if time.time() > self.until:
            raise OutOfTime


def _level(epsilon: float | None) -> str:
    return "inf" if epsilon is None else f"{epsilon:g}"


def _trial(method: str, epsilon: str, settings: dict[str, Any]) -> str:
    return json.dumps([method, epsilon, HeadSettings.from_dict(settings).to_dict()], sort_keys=True)
