"""Convolutional networks trained by the engine itself, or by Opacus, on the whole data set in device memory."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from weightclip.certificate import Adaptive, Bounds
from weightclip.engine import PrivacyEngine
from weightclip.errors import WeightclipError
from weightclip.factors import CapNorm
from weightclip.losses import CrossEntropy
from weightclip.nn import ParameterAverage
from weightclip.sampling import poisson_indices
from weightclip_studies.images._augment import augment
from weightclip_studies.images._nets import Pictures, build, late_layers, layer_norms
from weightclip_studies.images._settings import ALLOCATIONS

# Way of bounding -> method of the results table.
BOUNDS = {
    "free": "caps", "channel": "caps", "late": "caps", "exact": "caps", "joint": "caps",
    "factors": "lip-factors", "weights": "lip-weights", "opacus": "dp-sgd", "plain": "non-private",
}  # fmt: skip

Taken = list[tuple[int, float]]  # steps done, clock


@dataclass(frozen=True)
class ConvSettings:
    """One training run; every field is public.

    Attributes:
        network: Name in `NETWORKS`.
        bound: Key of `BOUNDS`: caps measured by the free bound, by channel Grams, exactly on the smallest maps, exactly
            everywhere, jointly over layers; both factors; weights only; Opacus; or no privacy.
        batch: Expected batch size b.
        steps: Number of steps T.
        learning_rate: Adam's, decaying linearly to zero.
        average: Decay of the parameter average that is evaluated.
        quantile: Share of records that each cap or radius is to leave alone; private quantiles move it there.
        clip: Flat threshold of Opacus, or C of ClipWeights for the weights-only bound.
        loss_cap: B of the loss for the weights-only bound.
        bias_scale: beta.
        allocation: How the noise is spread over layers.
        views: Augmented views of each record (random crop and mirror image); 0: the record itself.
        bf16: bfloat16 autocast of the forward and backward pass.
        compiled: torch.compile the model.
    """

    network: str = "small-cnn"
    bound: str = "exact"
    batch: int = 2048
    steps: int = 300
    learning_rate: float = 4e-3
    average: float = 0.95
    quantile: float = 0.5
    clip: float = 1.0
    loss_cap: float | None = None
    bias_scale: float = 1.0
    allocation: str = "adam-aware"
    views: int = 0
    bf16: bool = False
    compiled: bool = False

    def __post_init__(self) -> None:
        if self.bound not in BOUNDS:
            raise WeightclipError(f"ConvSettings.bound: one of {', '.join(BOUNDS)}, got {self.bound!r}")
        if self.bound == "opacus" and self.views > 1:
            raise WeightclipError("ConvSettings.views: several views of a record are for the engine, not for Opacus")

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready values."""
        return dataclasses.asdict(self)


@dataclass
class Trained:
    """A finished run.

    Attributes:
        model: The plain model with averaged weights.
        seconds: Wall time of all steps, start-up left out.
        step_ms: Median milliseconds of a step.
        peak_gib: Peak device memory beyond the data, None on the CPU.
        report: Epsilon as the engine counted it, where a budget was given.
        rows: What ``watch`` saw.
    """

    model: nn.Module
    seconds: float
    step_ms: float
    peak_gib: float | None
    report: dict[str, Any]
    rows: list[dict[str, Any]]


def bounds_for(settings: ConvSettings, model: nn.Module, x: Tensor) -> Bounds:
    """What the engine enforces. Limits start at medians over public inputs ``x`` at the initial weights."""
    s, loss = settings, CrossEntropy(cap=settings.loss_cap)
    if s.bound == "weights":
        radius = float(x.flatten(1).norm(dim=1).median())
        return Bounds(input_radius=radius, weight_norm=s.clip, bias_scale=s.bias_scale, spectral=False)
    norms = layer_norms(model, loss, x, torch.arange(len(x), device=x.device) % 10, s.bias_scale)

    def median(key: str) -> dict[str, float]:
        return {path: max(float(n[key].median()), 1e-6) for path, n in norms.items()}

    adaptive = Adaptive(quantile=s.quantile)
    if s.bound == "factors":
        return Bounds(layer_radius=median("input"), cotangent_radius=median("cotangent"), bias_scale=s.bias_scale,
                      adaptive=adaptive)  # fmt: skip
    if s.bound == "joint":
        return Bounds(joint_cap=median("exact"), bias_scale=s.bias_scale)
    late = dict.fromkeys(late_layers(model, x[:2]), CapNorm.CHEAPEST)
    start = {
        "free": median("free"), "channel": median("channel"), "exact": median("exact"),
        "late": {p: v for p, v in median("free").items() if p not in late}
        | {p: v for p, v in median("exact").items() if p in late},
    }[s.bound]  # fmt: skip
    start = {path: start[path] for path in norms}
    kinds = {"free": CapNorm.FREE, "channel": CapNorm.CHANNEL, "exact": CapNorm.CHEAPEST, "late": late}
    return Bounds(layer_cap=start, caps=kinds[s.bound], adaptive=adaptive, bias_scale=s.bias_scale)


def run_seed(settings: ConvSettings, sigma: float, seed: int, stream: str) -> int:
    """Seed of a run's draws and noise: a hash of all that tells runs apart, so that no two of them share noise."""
    told = json.dumps([stream, settings.to_dict(), sigma, seed], sort_keys=True)
    return int.from_bytes(hashlib.sha256(told.encode()).digest()[:8], "big") >> 1


def train(
    data: Pictures, settings: ConvSettings, sigma: float, seed: int = 0, stream: str = "", *,
    watch: int = 0, every: int = 20, deadline: float = math.inf, budget: tuple[float, float] | None = None,
) -> Trained:  # fmt: skip
    """Train one network.

    Args:
        data: The records.
        settings: The network and how it is trained.
        sigma: Noise multiplier; 0 is not private.
        seed: Of the initial weights and, hashed with everything else here, of draws and noise.
        stream: Name of this run among others on the same records.
        watch: Look at so many moments of the run how tight each layer's bound is (reads 64 records without noise: a
            diagnosis for this study, not part of a private release).
        every: Read the clock (and wait for the device) every that many steps.
        deadline: ``time.monotonic()`` after which the run gives up with TimeoutError.
        budget: (epsilon, delta) the engine must confirm after the last step.

    Formal guarantees:
        Those of `PrivacyEngine` (bounds of the engine) or of Opacus with Poisson draws at rate batch/records: one
        Poisson-sampled Gaussian mechanism of multiplier ``sigma`` a step, adding or removing one record.
    """
    s, device = settings, data.x.device
    model = build(s.network, data.planes, seed).to(device)
    held = _start_memory(device)
    with _tf32():
        if s.bound in ("opacus", "plain"):
            taken, report, rows = _by_opacus(model, data, s, sigma, run_seed(s, sigma, seed, stream), every, deadline)
        else:
            taken, report, rows = _by_engine(model, data, s, sigma, run_seed(s, sigma, seed, stream), every, deadline,
                                             watch, budget)  # fmt: skip
    peak = None if device.type != "cuda" else (torch.cuda.max_memory_allocated(device) - held) / 2**30
    at, clock = (np.array(v, dtype=float) for v in zip(*taken, strict=True))
    pace = np.diff(clock) / np.diff(at)
    middle = float(np.median(pace[2:] if len(pace) > 4 else pace) * 1e3)  # the first steps choose kernels
    return Trained(model, float(clock[-1] - clock[0]), middle, peak, report, rows)


@torch.no_grad()
def accuracy(model: nn.Module, data: Pictures, chunk: int = 2000) -> float:
    """Share of records classified rightly, in percent."""
    hits = 0
    for x, y in zip(data.x.split(chunk), data.y.split(chunk), strict=True):
        hits += int((model(data.inputs(x)).argmax(1) == y).sum())
    return 100 * hits / len(data)


def _start_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


@contextlib.contextmanager
def _tf32() -> Iterator[None]:
    """TF32 products in forward and backward passes; the engine's weight-gradient products stay float64."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def _set_rate(optimizer: torch.optim.Optimizer, settings: ConvSettings, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = settings.learning_rate * (1 - step / settings.steps)


def _by_engine(
    model: nn.Module, data: Pictures, s: ConvSettings, sigma: float, root: int, every: int, deadline: float,
    watch: int, budget: tuple[float, float] | None,
) -> tuple[Taken, dict[str, Any], list[dict[str, Any]]]:  # fmt: skip
    bounds, views = bounds_for(s, model, data.synthetic()), max(1, s.views)
    optimizer = torch.optim.Adam(model.parameters(), lr=s.learning_rate)
    loss = CrossEntropy(cap=s.loss_cap)
    engine = PrivacyEngine()
    batch = min(s.batch, len(data))
    _, _, loader, criterion = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(TensorDataset(data.x, data.y), batch_size=batch),
        criterion=loss, noise_multiplier=sigma, bounds=bounds, allocation=ALLOCATIONS[s.allocation],
        generator=torch.Generator().manual_seed(root), augmentation_multiplicity=views,
        example=data.inputs(data.x[:2]).zero_(),
    )  # fmt: skip
    forward: Callable[[Tensor], Tensor] = torch.compile(model, dynamic=True) if s.compiled else model
    average = ParameterAverage(model, s.average, warmup=True)
    moments = {round(i * (s.steps - 1) / max(1, watch - 1)) for i in range(watch)}
    taken, rows, done = [(0, _now(data.x.device))], [], 0
    while done < s.steps:
        for x, y in loader:
            if done in moments:
                rows += _look(engine, model, data, s, loss, done)
            _set_rate(optimizer, s, done)
            x = augment(x, views, seed=(root + done) % 2**62) if s.views else x
            optimizer.zero_grad()
            with torch.autocast(data.x.device.type, torch.bfloat16, enabled=s.bf16):
                logits = forward(data.inputs(x))
            criterion(logits, y).backward()
            optimizer.step()
            average.update()
            done += 1
            if done % every == 0 or done == s.steps:
                taken.append((done, _now(data.x.device)))
            if time.monotonic() > deadline:
                raise TimeoutError(f"gave up after {done} of {s.steps} steps")
            if done == s.steps:
                break
    report = {}
    if budget is not None and sigma > 0:
        report["epsilon"] = engine.get_epsilon(budget[1])
        if report["epsilon"] > budget[0] * (1 + 1e-6):
            raise WeightclipError(f"the run spent epsilon {report['epsilon']}, more than {budget[0]}")
    engine.detach()
    _use(average, model)
    return taken, report, rows


def _use(average: ParameterAverage, model: nn.Module) -> None:
    """Leave the averaged weights in the model."""
    with average.apply():
        state = {k: v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict(state)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _look(
    engine: PrivacyEngine, model: nn.Module, data: Pictures, s: ConvSettings, loss: CrossEntropy, step: int
) -> list[dict[str, Any]]:
    """Certified sensitivity of each layer beside the gradients of 64 records."""
    plain = build(s.network, data.planes, 0).to(data.x.device)
    plain.load_state_dict(model.state_dict())
    norms = layer_norms(plain, loss, data.inputs(data.x[:64]), data.y[:64], s.bias_scale)
    rows = []
    for row in engine.certificate().rows:
        n = {k: float(v.median()) for k, v in norms[row.name].items()}
        rows.append({"step": step, "layer": row.name, "sensitivity": float(row.sensitivity), **n,
                     "largest": float(norms[row.name]["exact"].max())})  # fmt: skip
    return rows


def _by_opacus(
    model: nn.Module, data: Pictures, s: ConvSettings, sigma: float, root: int, every: int, deadline: float
) -> tuple[Taken, dict[str, Any], list[dict[str, Any]]]:
    """Per-record gradients and noise by Opacus (or none of both for plain training), Poisson draws on the device."""
    device, batch = data.x.device, min(s.batch, len(data))
    inner = torch.optim.Adam(model.parameters(), lr=s.learning_rate)
    optimizer: Any = inner
    forward: Any = model
    if s.bound == "opacus":
        try:
            from opacus.grad_sample import GradSampleModule
            from opacus.optimizers import DPOptimizer
        except ImportError as error:
            raise WeightclipError("Opacus is not installed: pip install opacus, or leave it out.") from error
        forward = GradSampleModule(model)
        optimizer = DPOptimizer(
            inner, noise_multiplier=sigma, max_grad_norm=s.clip, expected_batch_size=batch,
            generator=torch.Generator(device=device).manual_seed(root),
        )  # fmt: skip
    average = ParameterAverage(model, s.average, warmup=True)
    taken = [(0, _now(device))]
    for step in range(s.steps):
        draw = poisson_indices(np.random.default_rng([root, step]), batch / len(data), len(data))
        rows = torch.from_numpy(draw).to(device)
        _set_rate(inner, s, step)
        optimizer.zero_grad()
        x = augment(data.x[rows], seed=(root + step) % 2**62) if s.views else data.x[rows]
        nn.functional.cross_entropy(forward(data.inputs(x)), data.y[rows]).backward()
        optimizer.step()
        average.update()
        if (step + 1) % every == 0 or step == s.steps - 1:
            taken.append((step + 1, _now(device)))
        if time.monotonic() > deadline:
            raise TimeoutError(f"gave up after {step} of {s.steps} steps")
    if s.bound == "opacus":
        forward.to_standard_module()
    _use(average, model)
    return taken, {}, []
