"""One training run on text: the engine's caps, radii or quantiles, Opacus, or no privacy, with one recipe for all."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weightclip as wc
from weightclip.nn import ParameterAverage
from weightclip.noise import Streams
from weightclip_studies.text._networks import SCALE, Classifier
from weightclip_studies.text._opacus import steps_of_opacus
from weightclip_studies.text._optimizer import NoisyAdam
from weightclip_studies.text._settings import Settings, draws, shuffled
from weightclip_studies.text._warm import class_means, start

WARM, TIMED = 14, 20
"""Steps before a clock starts (two sizes of batch are recorded as graphs), and steps on it."""


@dataclass(frozen=True)
class Run:
    """One model on its records.

    Attributes:
        model: The model; moved and trained in place.
        x: Records.
        y: Labels.
        settings: How it is trained.
        sigma: Noise multiplier; 0 and the method "non-private" for none.
        seed: Of draws and noise. None leaves them to the operating system, as in production: on CUDA steps are then
            replayed as graphs.
        piece: Records of a physical batch.
        precision: Of autocast, or None.
        even: Whether batches without privacy have one size, as ordinary training takes them: sizes that change may slow
            it down, and everything else would look fast.

    Formal guarantees:
        Those of the engine, or of Opacus, for ``settings.steps`` draws of rate batch/n with multiplier ``sigma``, and
        of `class_means` where the head starts warm. A seed makes the noise repeatable, which is for experiments only.
    """

    model: nn.Module
    x: Tensor
    y: Tensor
    settings: Settings
    sigma: float
    seed: int | None
    piece: int | None = None
    precision: torch.dtype | None = None
    even: bool = False

    def scores(self, ask: Tensor) -> Tensor:
        """Train, and what the averaged weights say of other records."""
        if self.x.device.type == "cuda":  # processes share it
            _give_back()
        average, steps = self._average(), self.settings.steps(len(self.x))
        for done in self._steps(average):
            if done == steps:
                break
        with average.apply(), torch.no_grad(), self._autocast():
            self.model.eval()
            return torch.cat([self.model(part).float() for part in ask.split(512)]).cpu()

    def pace(self) -> tuple[float, float]:
        """Seconds of one step, and the largest memory in GiB (nan on a CPU)."""
        cuda, began = self.x.device.type == "cuda", 0.0
        if cuda:
            _give_back()
            torch.cuda.reset_peak_memory_stats()
        for done in self._steps(self._average()):
            if done in (WARM, WARM + TIMED) and cuda:
                torch.cuda.synchronize()
            if done == WARM:
                began = time.perf_counter()
            if done == WARM + TIMED:
                break
        seconds = (time.perf_counter() - began) / TIMED
        return seconds, torch.cuda.max_memory_reserved() / 2**30 if cuda else float("nan")

    def _average(self) -> ParameterAverage:
        self.model.to(self.x.device)  # first: the average lies where the weights do
        return ParameterAverage(self.model, self.settings.averaging)

    def _steps(self, average: ParameterAverage) -> Iterator[int]:
        """The number of steps made, after each."""
        settings, total = self.settings, self.settings.steps(len(self.x))
        self.model.train()
        if settings.recipe.warm and settings.method != "non-private":
            self._warm_start()
        optimizer = self._optimizer()
        runs = {"opacus": self._opacus, "non-private": self._plain}
        made = runs.get(settings.method, self._engine)(optimizer)
        while True:
            with self._autocast():  # one for each step: autocast keeps its casts of weights until it is left
                done = next(made)
            average.update()
            yield done
            for group in optimizer.param_groups:
                group["lr"] = settings.rate * max(0.0, 1 - (1 - settings.recipe.final) * done / total)

    def _optimizer(self) -> torch.optim.Optimizer:
        parameters, recipe = [p for p in self.model.parameters() if p.requires_grad], self.settings.recipe
        if not (recipe.corrected or recipe.lowpass):
            return torch.optim.Adam(parameters, lr=self.settings.rate)
        if self.settings.method not in ("cap", "opacus"):
            raise ValueError("the noise of an entry is known under one cap over all layers alone.")
        noise = self.sigma * self.settings.clip / self.settings.batch if recipe.corrected else 0.0
        return NoisyAdam(parameters, self.settings.rate, noise, recipe.lowpass)

    def _warm_start(self) -> None:
        """Release the classes' means, which ``sigma`` leaves room for in the budget, and start the head from them."""
        streams = Streams.secure() if self.seed is None else Streams.seeded(self.seed)
        tuned = isinstance(self.model, Classifier)
        with torch.no_grad(), self._autocast():
            parts = [self.model.vectors(x).float() for x in self.x.split(2048)] if tuned else [self.x]  # type: ignore
        means = class_means(torch.cat(parts), self.y, self.settings.recipe.warm if self.sigma else 0.0, streams)
        start(self.model.head if tuned else self.model, means, SCALE if tuned else 1.0)  # type: ignore[arg-type]

    def _autocast(self) -> torch.autocast:
        on = self.precision is not None
        return torch.autocast(self.x.device.type, self.precision or torch.bfloat16, enabled=on)

    def _engine(self, optimizer: torch.optim.Optimizer) -> Iterator[int]:
        engine, settings = wc.PrivacyEngine(), self.settings
        _, _, loader, _ = engine.make_private(
            module=self.model, optimizer=optimizer, criterion=nn.CrossEntropyLoss(), noise_multiplier=self.sigma,
            data_loader=DataLoader(TensorDataset(self.x, self.y), batch_size=settings.batch), bounds=settings.bounds(),
            max_physical_batch_size=self.piece,
            generator=None if self.seed is None else torch.Generator().manual_seed(self.seed),
        )  # fmt: skip
        step = engine.fused_step()
        try:
            while True:
                for x, y in loader:
                    before = engine.steps
                    step(x, y)
                    if engine.steps > before:
                        yield engine.steps
        finally:
            engine.detach()

    def _opacus(self, optimizer: torch.optim.Optimizer) -> Iterator[int]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            batches = draws(self.x, self.y, self.settings.batch, self.seed)
            made = steps_of_opacus(self.model, optimizer, batches, self.settings, self.sigma, self.seed, self.piece)
            yield from made

    def _plain(self, optimizer: torch.optim.Optimizer) -> Iterator[int]:
        loss = nn.CrossEntropyLoss()
        for done, (x, y) in enumerate(
            (shuffled if self.even else draws)(self.x, self.y, self.settings.batch, self.seed), 1
        ):
            optimizer.zero_grad()
            size = self.piece or len(x)
            for a, b in zip(x.split(size), y.split(size), strict=True):
                (loss(self.model(a), b) * (len(a) / len(x))).backward()
            optimizer.step()
            yield done


def _give_back() -> None:
    """Memory that earlier runs left behind, recorded steps above all."""
    gc.collect()
    torch.cuda.empty_cache()


def accuracy(scores: Tensor, labels: Tensor) -> float:
    """Share of right answers."""
    return float((scores.argmax(1) == labels).double().mean())
