"""The table of the text study: settings chosen on the dev part, five seeds, the test part read once."""

from __future__ import annotations

import csv
import hashlib
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weightclip.text import TextEncoder
from weightclip_studies.images._noise import DELTA, NoiseTable
from weightclip_studies.text._data import Sentences
from weightclip_studies.text._networks import Head, Part
from weightclip_studies.text._training import Settings, accuracy, fit

COLUMNS: tuple[str, ...] = (
    "part", "method", "epsilon", "delta", "accountant", "seeds", "median", "sem", "seconds", "ratio", "peak_gib",
    "device", "steps", "batch", "rate", "clip", "dev",
)  # fmt: skip
RATES = {"head": (0.003, 0.01, 0.03, 0.1), "lora": (0.001, 0.003, 0.01), "last": (3e-4, 1e-3, 3e-3),
         "full": (1e-4, 3e-4, 1e-3)}  # fmt: skip
CLIPS = {"cap": (0.1, 1.0), "opacus": (0.1, 1.0), "quantiles": (0.1, 1.0), "factors": (0.1, 1.0),
         "non-private": (1.0,)}  # fmt: skip
Told = Callable[[str], None]
Line = dict[str, Any]


@dataclass
class Study:
    """Runs, chosen settings and rows, with every trial kept in a file so that an interrupted study goes on.

    Attributes:
        encoder: The pretrained encoder.
        train: Records to train on.
        dev: Records to choose by.
        test: Records that are scored once, by the chosen settings.
        folder: Where trials are kept.
        device: Where to train.
        epochs: Passes over the data.
        batch: Expected batch size.
        piece: Records of a physical batch.
    """

    encoder: TextEncoder
    train: Sentences
    dev: Sentences
    test: Sentences
    folder: Path
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    epochs: int = 20
    batch: int = 4096
    piece: int | None = None

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.noise = NoiseTable(self.folder / "noise.json")
        self._inputs: dict[str, tuple[Tensor, Tensor, Tensor]] = {}

    def inputs(self, part: Part) -> tuple[Tensor, Tensor, Tensor]:
        """Records of the three parts as the model takes them; features are kept in a file."""
        kind = "features" if isinstance(part, Head) else "tokens"
        if kind not in self._inputs:
            made = []
            for data in (self.train, self.dev, self.test):
                name = hashlib.sha256("\n".join(data.texts).encode()).hexdigest()[:16]
                path = self.folder / f"{kind}-{self.encoder.digest[:8]}-{name}.pt"
                if not path.exists():
                    torch.save(part.inputs(self.encoder, data), path)
                made.append(torch.load(path).to(self.device))
            self._inputs[kind] = (made[0], made[1], made[2])
        return self._inputs[kind]

    def run(self, part: Part, settings: Settings, epsilon: float | None, seed: int, on: str) -> Line:
        """Accuracy and seconds of one run, on "dev" or "test"; from the file if it was made before."""
        key = json.dumps(
            [part.name, repr(part), asdict(settings), epsilon, seed, on, self.device.type, len(self.train)]
        )
        path = self.folder / "trials.jsonl"
        for line in path.read_text().splitlines() if path.exists() else ():
            if (entry := json.loads(line))["key"] == key:
                return entry
        x, dev, test = self.inputs(part)
        sigma = self.noise.get(epsilon, len(x), settings.batch, settings.steps(len(x)))
        self.noise.save()
        labels = torch.from_numpy(self.train.labels).to(self.device)
        root = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=6).digest(), "little")
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        found = fit(part.model(self.encoder, seed), x, labels, dev if on == "dev" else test, settings, sigma, root,
                    piece=self.piece, precision=torch.bfloat16 if self.device.type == "cuda" else None)  # fmt: skip
        peak = torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else float("nan")
        data = self.dev if on == "dev" else self.test
        entry = {"key": key, "accuracy": accuracy(found, data.labels), "seconds": found.seconds, "peak": peak}
        with path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        return entry

    def choose(self, part: Part, method: str, epsilon: float | None, told: Told) -> tuple[Settings, float]:
        """The best of the same grid for every method, on the dev part, one seed."""
        tried = []
        for rate in RATES[part.name]:
            for clip in CLIPS[method]:
                settings = Settings(method, rate, clip, self.batch, self.epochs)
                score = self.run(part, settings, epsilon, 1000, "dev")["accuracy"]
                told(f"{part.name} {method} epsilon {epsilon}: rate {rate:g}, clip {clip:g}: {score:.4f} on dev")
                tried.append((score, settings))
        score, best = max(tried, key=lambda t: t[0])
        return best, score

    def row(
        self, part: Part, method: str, epsilon: float | None, seeds: Sequence[int], told: Told
    ) -> dict[str, object]:
        """One row of the table; time is beside that of training without privacy with the same steps."""
        settings, dev = self.choose(part, method, epsilon, told)
        runs = [self.run(part, settings, epsilon, seed, "test") for seed in seeds]
        plain = self.run(part, replace(settings, method="non-private"), None, seeds[0], "test")
        scores = [r["accuracy"] for r in runs]
        seconds = statistics.median(r["seconds"] for r in runs)
        told(f"{part.name} {method} epsilon {epsilon}: {statistics.median(scores):.4f} on test")
        return dict(zip(COLUMNS, (
            part.name, method, "" if epsilon is None else f"{epsilon:g}", "" if epsilon is None else f"{DELTA:g}",
            "" if epsilon is None else "pld", len(seeds), f"{statistics.median(scores):.4f}",
            f"{statistics.stdev(scores) / len(scores) ** 0.5:.4f}" if len(scores) > 1 else "", f"{seconds:.2f}",
            f"{seconds / plain['seconds']:.2f}", "" if runs[0]["peak"] != runs[0]["peak"] else f"{runs[0]['peak']:.2f}",
            self.device.type, settings.steps(len(self.train)), settings.batch, f"{settings.rate:g}",
            f"{settings.clip:g}", f"{dev:.4f}",
        ), strict=True))  # fmt: skip


def write(path: Path, rows: Sequence[Line]) -> None:
    """The table as a file; rows of a part, method, ε and device that are there already are replaced."""
    kept: list[Line] = []
    same = ("part", "method", "epsilon", "device")
    new = {tuple(str(r[k]) for k in same) for r in rows}
    if path.exists():
        with path.open(newline="") as file:
            kept = [dict(r) for r in csv.DictReader(file) if tuple(r[k] for k in same) not in new]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(COLUMNS), lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted([*kept, *rows], key=lambda r: [str(r[k]) for k in same]))
