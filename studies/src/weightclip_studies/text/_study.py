"""The table of the text study: settings chosen on the dev part, five seeds, the test part read once."""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weightclip_studies.images._noise import DELTA, NoiseTable
from weightclip_studies.text._networks import Head, Part
from weightclip_studies.text._prepared import SPLITS, Prepared
from weightclip_studies.text._settings import Settings
from weightclip_studies.text._training import Run, accuracy
from weightclip_studies.text._warm import cost

RATES = {"head": (0.03, 0.1, 0.3, 1.0, 3.0), "lora": (1e-2,), "last": (1e-3, 3e-3), "full": (3e-4, 1e-3)}
"""Rates of private methods. That of low-rank updates is the one of three (.005, .01, .02) that runs of four passes
chose on the dev part, under one cap and by Opacus alike."""
CEILINGS = {"lora": (1e-3, 3e-3, 1e-2), "last": (3e-4, 1e-3), "full": (1e-4, 4e-4)}
"""Rates without privacy, where batches are smaller."""
CLIPS = {"cap": 1.0, "opacus": 1.0, "quantiles": 0.1, "factors": 0.1, "non-private": 1.0}
TUNED_AT = 8.0
"""ε at which settings of an encoder's parts are chosen, for all ε; those of a head are chosen at each."""
Told = Callable[[str], None]
Line = dict[str, Any]


class Trial(NamedTuple):
    """One run: what is trained, how, at which ε (None without privacy), and on which part it is scored."""

    part: Part
    settings: Settings
    epsilon: float | None
    seed: int
    on: str


@dataclass
class Study:
    """Runs, chosen settings and rows, with every trial kept in a file so that an interrupted study goes on.

    Attributes:
        data: Encoder and sentences.
        folder: Where trials are kept.
        device: Where to train.
        epochs: Passes over the data; see `passes`.
        batch: Expected batch size.
        piece: Records of a physical batch.
        length: Tokens that are read of a sentence in training, a public shape; all of them are read in prediction.
        records: How many sentences to train on; all by default.
        until: Clock time after which no run is under way, as far as earlier ones tell how long one takes; 0 makes rows
            of the trials that are there.
        at_once: Runs trials, by default one after the other.
    """

    data: Prepared
    folder: Path
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    epochs: int = 8
    batch: int = 4096
    piece: int | None = None
    length: int = 32
    records: int | None = None
    until: float = float("inf")
    at_once: Callable[[Sequence[Trial]], list[Line | None]] | None = None

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.noise = NoiseTable(self.folder / "noise.json")
        self._inputs: dict[str, tuple[Tensor, ...]] = {}
        self.size = len(self.data.labels("train")[: self.records])

    def run(self, trial: Trial) -> Line | None:
        """Accuracy of one run; from the file if it was made before, None if there is no time left to make it."""
        part, settings, epsilon, seed, on = trial
        key, steps = self.key(part, settings.told(), epsilon, seed, on), settings.steps(self.size)
        kind = self.kind(part, settings)
        if (found := self._found(key)) is not None or not self._has_time(kind, steps):
            return found
        sigma = self.sigma(settings, epsilon)
        x, dev, test = self.inputs(part)
        labels, began = self.data.labels("train")[: self.records].to(self.device), time.time()
        scores = self._run(part, settings, sigma, seed, x, labels, key).scores(dev if on == "dev" else test)
        right = accuracy(scores, self.data.labels(on))
        pace = round((time.time() - began) / steps, 5)
        return self._keep({"key": key, "accuracy": right, "device": self._name(), "kind": kind, "pace": pace})

    def pace(self, part: Part, method: str) -> Line | None:
        """Seconds of a step and memory, to be measured while nothing else runs on the device."""
        settings = Settings(method, 1e-4, CLIPS[method], self.batch, self.epochs)
        key = self._timing(part, method)
        if (found := self.timed(part, method)) is not None or not self._has_time(f"{part!r} {method} {self.batch}", 50):
            return found
        x, labels = self.inputs(part)[0], self.data.labels("train")[: self.records].to(self.device)
        sigma = 0.0 if method == "non-private" else 1.0
        seconds, peak = self._run(part, settings, sigma, 0, x, labels, key).pace()
        return self._keep({"key": key, "seconds": seconds, "peak": peak, "device": self._name()})

    def row(self, part: Part, method: str, epsilon: float | None, seeds: int, told: Told) -> Line | None:
        """One row of the table; None where trials are missing and there is no time left to make them."""
        at = epsilon if epsilon is None or isinstance(part, Head) else TUNED_AT
        tried = [Trial(part, settings, at, 1000, "dev") for settings in self.grid(part, method)]
        found = self.ask(tried) if tried[1:] else []  # one setting need not be chosen
        for trial, entry in zip(tried, found, strict=False):
            if entry is not None:
                told(f"{part.name} {method} epsilon {at}: rate {trial.settings.rate:g}: {entry['accuracy']:.4f} on dev")
        if any(entry is None for entry in found):
            return None
        dev = [entry["accuracy"] for entry in found if entry is not None]
        chosen = tried[dev.index(max(dev)) if dev else 0].settings
        asked = self.ask([Trial(part, chosen, epsilon, seed, "test") for seed in range(seeds)])
        runs = [entry for entry in asked if entry is not None]
        if not runs:
            return None
        scores = [entry["accuracy"] for entry in runs]
        told(f"{part.name} {method} epsilon {epsilon}: {statistics.median(scores):.4f} on test, {len(runs)} seeds")
        steps, private = chosen.steps(self.size), epsilon is not None
        return {
            "part": part.name, "method": method, "epsilon": f"{epsilon:g}" if private else "",
            "delta": f"{DELTA:g}" if private else "", "accountant": "pld" if private else "", "seeds": len(runs),
            "median": f"{statistics.median(scores):.4f}",
            "sem": f"{statistics.stdev(scores) / len(scores) ** 0.5:.4f}" if len(scores) > 1 else "",
            **self._times(part, method, self.passes(part, "cap") * max(1, round(self.size / self.batch))),
            "device": runs[0]["device"], "steps": steps, "batch": chosen.batch, "rate": f"{chosen.rate:g}",
            "clip": f"{chosen.clip:g}", "dev": f"{max(dev):.4f}" if dev else "",
        }  # fmt: skip

    def grid(self, part: Part, method: str) -> list[Settings]:
        """What is tried on dev: as many trials for every private method; the ceiling takes small batches, and lower
        rates, which suit them. That of a head, which takes a second, may take both sizes."""
        clip, passes = CLIPS[method], self.passes(part, method)
        if isinstance(part, Head) and method == "non-private":
            sizes = self.batch, max(1, self.batch // 8)
            return [Settings(method, r, clip, b, passes) for b in sizes for r in RATES[part.name]]
        if method == "non-private":
            return [Settings(method, r, clip, max(1, self.batch // 4), passes) for r in CEILINGS[part.name]]
        return [Settings(method, r, clip, self.batch, passes) for r in RATES[part.name]]

    def passes(self, part: Part, method: str) -> int:
        """Passes over the data: half of those of a head or of low-rank updates where there are more weights, which take
        longer, or no noise, so that fewer are enough."""
        whole = part.name == "head" or (part.name == "lora" and method != "non-private")
        return self.epochs if whole else max(1, self.epochs // 2)

    def sigma(self, settings: Settings, epsilon: float | None) -> float:
        """The noise multiplier, calibrated once."""
        return self.multiplier(epsilon, self.size, settings.batch, settings.steps(self.size), settings.recipe.warm)

    def multiplier(self, epsilon: float | None, records: int, batch: int, steps: int, warm: float = 0.0) -> float:
        """That of a run on so many records, kept as soon as it is found."""
        known = len(self.noise.values)
        sigma = self.noise.get(epsilon, records, batch, steps, cost(warm))
        if len(self.noise.values) > known:
            self.noise.save()
        return sigma

    def inputs(self, part: Part) -> tuple[Tensor, ...]:
        """Records of the three parts, on the device."""
        kind = "features" if isinstance(part, Head) else "tokens"
        if kind not in self._inputs:
            train, dev, test = (part.inputs(self.data, split) for split in SPLITS)
            train = train[: self.records]
            train = train[:, : self.length].contiguous() if kind == "tokens" else train
            self._inputs[kind] = (train.to(self.device), dev.to(self.device), test.to(self.device))
        return self._inputs[kind]

    def _run(self, part: Part, settings: Settings, sigma: float, seed: int, x: Tensor, y: Tensor, key: str) -> Run:
        cuda = self.device.type == "cuda"
        root = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=6).digest(), "little")
        as_in_production = cuda and settings.method not in ("opacus", "non-private")  # a seed forbids CUDA graphs
        seeded = None if as_in_production else root
        even = settings.method == "non-private"
        return Run(part.model(self.data, seed), x, y, settings, sigma, seeded, self.piece, self.precision, even)

    @property
    def precision(self) -> torch.dtype | None:
        """Of autocast: half on CUDA."""
        return torch.bfloat16 if self.device.type == "cuda" else None

    def ask(self, trials: Sequence[Trial]) -> list[Line | None]:
        """What `run` gives for each, at the same time where that was asked for."""
        return [self.run(trial) for trial in trials] if self.at_once is None else self.at_once(trials)

    def _times(self, part: Part, method: str, steps: int) -> Line:
        """Time and memory of a whole run of this batch size, where they were measured."""
        entry, plain = (self.timed(part, m) for m in (method, "non-private"))
        if entry is None:
            return {"seconds": "", "ratio": "", "peak_gib": ""}
        peak = "" if entry["peak"] != entry["peak"] else f"{entry['peak']:.2f}"
        ratio = "" if plain is None else f"{entry['seconds'] / plain['seconds']:.2f}"
        return {"seconds": f"{entry['seconds'] * steps:.2f}", "ratio": ratio, "peak_gib": peak}

    def timed(self, part: Part, method: str) -> Line | None:
        """What `pace` found before."""
        return self._found(self._timing(part, method))

    def _timing(self, part: Part, method: str) -> str:
        return self.key(part, "timing", "batches of one size" if method == "non-private" else method, self.batch)

    def key(self, part: Part, *of: Any) -> str:
        here = (self.device.type, self.data.digest, self.length, self.size, self.piece)
        return json.dumps([part.name, repr(part), *of, *here])

    def once(self, key: str, make: Callable[[], Line], kind: str, steps: int) -> Line | None:
        """What is in the file under the key; made and kept if it is not, None if there is no time left for it.

        Args:
            key: What is looked for.
            make: Makes it.
            kind: What it is made by, as in `kind`.
            steps: How many steps that takes.
        """
        if (found := self._found(key)) is not None or not self._has_time(kind, steps):
            return found
        return self._keep({"key": key, **make()})

    @staticmethod
    def kind(part: Part, settings: Settings) -> str:
        """What takes as long a step."""
        return f"{part!r} {settings.method} {settings.batch}"

    def _found(self, key: str) -> Line | None:
        return next((entry for entry in self._entries() if entry["key"] == key), None)

    def _entries(self) -> Iterator[Line]:
        path = self.folder / "trials.jsonl"
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                yield json.loads(line)
            except ValueError:
                continue  # a line that a killed process left half written

    def _has_time(self, kind: str, steps: int) -> bool:
        """Whether a run of so many steps will end in time, if it takes as long as the slowest of its kind did."""
        if self.until == float("inf"):
            return True
        if time.time() > self.until:
            return False
        paces = [entry["pace"] for entry in self._entries() if entry.get("kind") == kind]
        return time.time() + max(paces, default=0.0) * steps < self.until

    def _keep(self, entry: Line) -> Line:
        with (self.folder / "trials.jsonl").open("a+b") as file:
            torn = file.tell() and (file.seek(-1, 2), file.read(1))[1] != b"\n"  # a killed process left half a line
            file.write(b"\n" * bool(torn) + json.dumps(entry).encode() + b"\n")  # one short write: processes share it
        return entry

    def _name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
