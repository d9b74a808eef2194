"""Trains one recipe to its end, across as many calls as that takes: checkpoints hold the state, a ledger the count."""

from __future__ import annotations

import functools
import gc
import itertools
import json
import math
import os
import secrets
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from weightclip.accounting import Adjacency, Ledger, Mechanism, epsilon
from weightclip.engine import PrivacyEngine
from weightclip.nn import ParameterAverage
from weightclip.sampling import TAIL, largest_batch
from weightclip_studies.figure._opacus import opacus_step, plain_step
from weightclip_studies.figure._recipe import BY_OPACUS, Recipe, bounds_for, build
from weightclip_studies.images._augment import augment
from weightclip_studies.images._nets import Pictures
from weightclip_studies.images._noise import DELTA
from weightclip_studies.images._settings import ALLOCATIONS
from weightclip_studies.images._training import _now, _tf32, _use

ROWS = 10_240  # of one pass through the network: WRN-16-4 in bfloat16 needs about 30 GiB for them
_CLOCK = 10  # steps between two looks at the clock, for which the device must be waited for
_LATEST = "latest.json"


@dataclass(frozen=True)
class Crops:
    """How views are made: zero padding before a random crop, and whether half of them are mirrored."""

    padding: int = 4
    flip: bool = True


USUAL = Crops()


@dataclass
class Trained:
    """A finished run: the plain model with the weights to be evaluated, what it cost, how long it took.

    ``updates`` are the releases that are in the weights: kills lose those since the last checkpoint.
    """

    model: nn.Module
    epsilon: float
    releases: int
    updates: int
    seconds: float
    step_ms: float


class _Steps(Protocol):
    """A run that takes one step at a time."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def done(self) -> int: ...
    def step(self) -> None: ...
    def save(self, place: Path) -> None: ...
    def load(self, place: Path) -> None: ...
    def close(self) -> float: ...


def train(
    data: Pictures, recipe: Recipe, sigma: float, seed: int, folder: Path, *, crops: Crops = USUAL,
    deadline: float = math.inf, every: float = 30.0, finish: bool = False, tell: Callable[[str], None] | None = None,
) -> Trained | None:  # fmt: skip
    """Train, or go on with a run that an earlier call began in ``folder``.

    Args:
        data: The records.
        recipe: How.
        sigma: Noise multiplier; 0 for the method without privacy.
        seed: Of the initial weights. Draws, views and noise come from the operating system: runs of one seed differ.
        folder: Holds the ledger and the last checkpoint.
        crops: How views are made.
        deadline: ``time.monotonic()`` at which a checkpoint is written and the call ends.
        every: Seconds between checkpoints.
        finish: At the deadline the run ends there and is returned, with fewer releases than the recipe has.
        tell: Told how far the run is at every checkpoint.

    Returns:
        The finished run, or None at the deadline: call again.

    Formal guarantees:
        At most ``recipe.steps`` releases of the Poisson-sampled Gaussian mechanism of multiplier ``sigma`` are made in
        all calls on ``folder`` together, killed ones included: each is charged to the ledger on the disk before it
        happens, and the run is over when that many are charged (Theorem 31). ``Trained.epsilon`` is theirs, for adding
        or removing one record, by PLD. Runs by Opacus are charged to the same kind of ledger.
    """
    folder.mkdir(parents=True, exist_ok=True)
    device = data.x.device
    with _tf32():
        run = _start(data, recipe, sigma, seed, folder / "ledger", crops)
        spent = None
        try:
            average = ParameterAverage(run.model, recipe.average, warmup=True) if recipe.average else None
            before, updates = _resume(run, average, folder)
            began = saved = time.perf_counter()
            clock = [(run.done, _now(device))]
            run.model.train()
            while run.done < recipe.steps:
                for group in run.optimizer.param_groups:
                    group["lr"] = recipe.rate(run.done)
                run.step()
                updates += 1
                if average is not None:
                    average.update()
                if run.done % _CLOCK and run.done < recipe.steps:
                    continue
                clock.append((run.done, _now(device)))
                late = time.monotonic() > deadline
                if run.done == recipe.steps or late or clock[-1][1] - saved > every:
                    saved = clock[-1][1]
                    _save(run, average, folder, before + saved - began, updates)
                    if tell is not None and run.done < recipe.steps:
                        tell(f"{run.done} of {recipe.steps} steps after {before + saved - began:.0f} s")
                    if late and run.done < recipe.steps:
                        if finish:
                            break
                        return None
            took = clock[-1][1] - began
            paces = [(b - a) / (m - n) for (n, a), (m, b) in itertools.pairwise(clock)]  # the first ones compile
            releases, spent = run.done, run.close()
            if average is not None and average.steps:
                _use(average, run.model)
            run.model.eval()
            return Trained(run.model, spent, releases, updates, before + took, 1e3 * statistics.median(paces or [0.0]))
        finally:
            if spent is None:
                run.close()


def discard(folder: Path) -> None:
    """Remove the checkpoints of a finished run; its ledger stays."""
    (folder / _LATEST).unlink(missing_ok=True)
    for place in folder.glob("step-*"):
        shutil.rmtree(place)


def _start(data: Pictures, recipe: Recipe, sigma: float, seed: int, ledger: Path, crops: Crops) -> _Steps:
    own = recipe.method in (*BY_OPACUS, "plain")
    return (_Other if own else _Engine)(data, recipe, sigma, seed, ledger, crops)


def _save(run: _Steps, average: ParameterAverage | None, folder: Path, seconds: float, updates: int) -> None:
    """A new checkpoint beside the old one, which goes when the new one is whole."""
    place = folder / f"step-{run.done}"
    place.mkdir(exist_ok=True)
    run.save(place)
    state = {"steps": 0, "average": {}} if average is None else average.state_dict()
    packed = {name: value.contiguous() for name, value in state["average"].items()}  # channels last are refused
    save_file(packed, str(place / "average.safetensors"))
    scratch = folder / f"{_LATEST}.part"
    told = {"place": place.name, "seconds": seconds, "averaged": state["steps"], "updates": updates}
    scratch.write_text(json.dumps(told))
    os.replace(scratch, folder / _LATEST)
    for old in folder.glob("step-*"):
        if old != place:
            shutil.rmtree(old)


def _resume(run: _Steps, average: ParameterAverage | None, folder: Path) -> tuple[float, int]:
    """Load the last checkpoint, if there is one: (the seconds spent before it, the updates it holds)."""
    if not (folder / _LATEST).exists():
        return 0.0, 0
    latest = json.loads((folder / _LATEST).read_text())
    place = folder / latest["place"]
    run.load(place)
    if average is not None:
        values = load_file(str(place / "average.safetensors"))
        names = [name for name, _ in run.model.named_parameters()]
        average.load_state_dict({"steps": latest["averaged"], "average": {name: values[name] for name in names}})
    return float(latest["seconds"]), int(latest["updates"])


class _Common:
    """Model, optimiser and records of a run."""

    def __init__(self, data: Pictures, recipe: Recipe, seed: int, crops: Crops) -> None:
        self.data, self.recipe, self.crops = data, recipe, crops
        self.batch, self.on_gpu = min(recipe.batch, len(data)), data.x.is_cuda
        self.model = build(recipe, data.planes, data.x.shape[-1], seed).to(data.x.device)
        if self.on_gpu:  # what an earlier run compiled and recorded is in the way of this one
            torch.compiler.reset()
            gc.collect()
            torch.cuda.empty_cache()
        # Opacus neither compiles nor sums in half precision
        self.fast = recipe.fast and self.on_gpu and recipe.method not in BY_OPACUS
        if self.fast:
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        kind = torch.optim.Adam if recipe.adam else torch.optim.SGD
        self.optimizer: torch.optim.Optimizer = kind(self.model.parameters(), lr=recipe.rate(0))

    def inputs(self, x: Tensor) -> Tensor:
        """What the network reads of a batch: views by secret random numbers, then public constants."""
        if self.recipe.views:  # a known seed would tie a record's view to its row, and so to the records before it
            x = augment(x, self.recipe.views, self.crops.padding, self.crops.flip, secrets.randbits(62))
        x = self.data.inputs(x)
        return x.contiguous(memory_format=torch.channels_last) if self.fast else x

    def cast(self) -> torch.autocast:
        return torch.autocast(self.data.x.device.type, torch.bfloat16, enabled=self.fast)


class _Engine(_Common):
    """Steps by the engine, each in one call; passes of at most ``rows`` rows."""

    def __init__(
        self, data: Pictures, recipe: Recipe, sigma: float, seed: int, ledger: Path, crops: Crops, rows: int = 0
    ) -> None:
        super().__init__(data, recipe, seed, crops)
        views = max(1, recipe.views)
        most = largest_batch(self.batch, self.batch / len(data), len(data))
        pieces = math.ceil(most * views / (rows or ROWS))
        bounds = bounds_for(recipe, self.model, data.synthetic())
        self.engine = PrivacyEngine(ledger=ledger, ledger_block=_block(recipe))
        try:
            _, _, self.loader, _ = self.engine.make_private(
                module=self.model, optimizer=self.optimizer, criterion=recipe.loss(), noise_multiplier=sigma,
                data_loader=DataLoader(TensorDataset(data.x, data.y), batch_size=self.batch), bounds=bounds,
                allocation=ALLOCATIONS["adam-aware" if recipe.adam else "equal"], augmentation_multiplicity=views,
                max_physical_batch_size=None if pieces == 1 else math.ceil(most / pieces),
                example=data.inputs(data.x[:2]).zero_(),
            )  # fmt: skip
        except BaseException:
            if self.engine.ledger is not None:
                self.engine.ledger.close()
            raise
        self.engine.budget = recipe.steps
        compiled = torch.compile(self.model) if self.fast else None
        if compiled is self.model:  # TORCHDYNAMO_DISABLE=1
            compiled = None
        self.fused = self.engine.fused_step(compiled)
        self.fused.on &= not self.fast  # large steps hold the device up by themselves: no need of graphs
        self.batches = self._endless()

    def _endless(self) -> Iterator[list[Tensor]]:
        while True:
            yield from self.loader

    @property
    def done(self) -> int:
        return self.engine.steps

    def step(self) -> None:
        before = self.engine.steps
        while self.engine.steps == before:  # all pieces of a draw
            x, y = next(self.batches)
            x = self.inputs(x)
            if self.fast:  # one kernel for draws of all sizes; only the number of rows differs
                torch._dynamo.mark_dynamic(x, 0)
            with self.cast():
                self.fused(x, y)

    def save(self, place: Path) -> None:
        self.engine.save(place)

    def load(self, place: Path) -> None:
        self.engine.load(place)
        self.batches = self._endless()

    def close(self) -> float:
        steps, mechanisms = self.engine.steps, tuple(self.engine.mechanisms())
        self.engine.detach()
        return _epsilon(mechanisms, DELTA - steps * TAIL)  # as `PrivacyEngine.get_epsilon`


class _Other(_Common):
    """Steps by Opacus, or without privacy, on Poisson draws of the same rate; passes of at most ``rows`` rows."""

    def __init__(
        self, data: Pictures, recipe: Recipe, sigma: float, seed: int, ledger: Path, crops: Crops, rows: int = 0
    ) -> None:
        super().__init__(data, recipe, seed, crops)
        self.private: Any = None
        self.ledger: Ledger | None = None
        self.made = 0
        self.rate = self.batch / len(data)
        self.generator = torch.Generator(device=data.x.device)
        self.generator.seed()
        if recipe.method == "plain":
            self.take = plain_step(self._forward(), self.optimizer, self.cast, rows or ROWS)
            return
        self.take, self.private = opacus_step(self.model, self.optimizer, recipe, self.batch, sigma, rows or ROWS)
        self.ledger = Ledger(ledger, block=_block(recipe))
        mechanism = Mechanism("gaussian", sigma, self.rate, 1, label="noisy gradients (Opacus)")
        self.ledger.begin(mechanism, Adjacency.ADD_OR_REMOVE_ONE, 0.0, {"recipe": recipe.to_dict()})

    def _forward(self) -> Callable[[Tensor], Tensor]:
        """The network, compiled once for pieces of all sizes where it is to be fast."""
        if not self.fast:
            return self.model
        compiled = torch.compile(self.model)

        def forward(x: Tensor) -> Tensor:
            torch._dynamo.mark_dynamic(x, 0)
            return compiled(x)

        return forward

    @property
    def done(self) -> int:
        return self.made if self.ledger is None else self.ledger.charges

    def step(self) -> None:
        data = self.data
        drawn = torch.rand(len(data), generator=self.generator, device=data.x.device) < self.rate
        rows = drawn.nonzero().squeeze(1)
        if self.ledger is not None:
            self.ledger.charge(self.recipe.steps - self.ledger.charges)
        self.made += 1
        self.take(self.inputs(data.x[rows]), data.y[rows])

    def save(self, place: Path) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "made": self.made}
        if self.private is not None:
            state["clip"] = float(self.private.max_grad_norm)
        torch.save(state, place / "state.pt")

    def load(self, place: Path) -> None:
        state = torch.load(place / "state.pt", map_location=self.data.x.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.made = state["made"]
        if self.private is not None:
            self.private.max_grad_norm = state["clip"]

    def close(self) -> float:
        if self.ledger is None:
            return math.inf
        mechanisms = tuple(self.ledger.mechanisms())
        self.ledger.close()
        self.private.grad_sample_module.to_standard_module()
        return _epsilon(mechanisms, DELTA)


def _block(recipe: Recipe) -> int:
    """Releases that one write to the ledger counts: all but nothing of a long step, much of a short one."""
    return 1 if recipe.fast else max(1, recipe.steps // 50)


@functools.lru_cache(maxsize=256)
def _epsilon(mechanisms: tuple[Mechanism, ...], delta: float) -> float:
    """Computed once for runs that released the same: it takes longer than many steps."""
    return epsilon(list(mechanisms), delta) if mechanisms else 0.0
