"""Step time and peak memory of ordinary and private training, interleaved in one process.

Every mode trains the same model on the same batch with Adam; the clock runs over zero_grad, forward, loss, backward and
step, after warm-up, and the modes take turns so that a slow spell hits all of them. Loading data is left out. As in
training, steps follow each other: the clock stops every 64 steps on a GPU (eight, two if they are slow), where nothing
waits for the device after each, and every 16 on a CPU if they are short.
"""

from __future__ import annotations

import contextlib
import csv
import gc
import itertools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from weightclip.certificate import Bounds
from weightclip.engine import PrivacyEngine
from weightclip.factors import CapNorm, Product
from weightclip.sampling import BatchInfo
from weightclip_studies.bench._models import models
from weightclip_studies.bench._others import OTHERS

# steps shorter than so many seconds, so many a look at the clock
_BLOCKS = {"cuda": ((0.01, 64), (0.05, 8), (math.inf, 2)), "cpu": ((0.01, 16), (math.inf, 1))}
MODES = (
    "plain", "weights", "weights-refresh", "factors", "both", "joint-cap", "exact-cap", "exact-joint-cap",
    "weights-fast", *OTHERS,
)  # fmt: skip
GRAPHED = (  # the step as a CUDA graph
    "plain-graph", "weights-graph", "factors-graph", "both-graph", "joint-cap-graph", "exact-cap-graph",
    "exact-joint-cap-graph",
)  # fmt: skip
COLUMNS = (
    "device", "model", "batch", "mode", "ms", "ratio", "peak_gib", "spread", "precision", "compile", "channels_last",
)  # fmt: skip
PRECISIONS = ("float32", "tf32", "bf16")


@dataclass(frozen=True)
class Setting:
    """How every mode alike computes.

    Attributes:
        precision: float32 throughout, TF32 products, or bf16 autocast.
        compiled: torch.compile on the model, batch sizes dynamic where they vary.
        channels_last: Memory format of images.
        draws: Steps take batches of the sizes of Poisson draws around the expected one, eight in turn, instead of one
            size; the same in every mode.
    """

    precision: str = "float32"
    compiled: bool = False
    channels_last: bool = False
    draws: bool = False

    def sizes(self, batch: int) -> list[int]:
        """Sizes of the batches of eight steps."""
        if not self.draws:
            return [batch]
        found = torch.poisson(torch.full((8,), float(batch)), torch.Generator().manual_seed(0))
        return [int(n) for n in found.clamp(min=1)]

    def cast(self, device: torch.device) -> Any:
        """The context of forward and loss."""
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.precision == "bf16")


USUAL = Setting()


@dataclass(frozen=True)
class StepRow:
    """One line of results/bench/step.csv; ``ratio`` is to plain training of the same model and batch, that of a step
    recorded as a CUDA graph to plain training recorded likewise."""

    device: str
    model: str
    batch: int
    mode: str
    ms: float
    ratio: float
    peak_gib: float | None
    spread: float  # interquartile range over median
    precision: str
    compile: int = 0  # 1: both sides by torch.compile
    channels_last: int = 0


def bounds_of(mode: str) -> Bounds:
    """The bounds each private mode trains under."""
    return {
        "weights": Bounds(input_radius=1.0, weight_norm=1.0, spectral=False),
        # certified norms and clipping of weights every 64 steps; in between how far the weights moved is added
        "weights-refresh": Bounds(input_radius=1.0, weight_norm=1.0, spectral=False, refresh=64),
        "factors": Bounds(layer_radius=1.0, cotangent_radius=0.1),
        "both": Bounds(input_radius=1.0, weight_norm=1.0, spectral=False, layer_radius=1.0, cotangent_radius=0.1),
        "joint-cap": Bounds(joint_cap=1.0, caps=CapNorm.FREE),
        "exact-cap": Bounds(layer_cap=0.1),
        "exact-joint-cap": Bounds(joint_cap=1.0),
        # as "weights", with the rounding of float32 sums left out of the guarantee (Product.fast)
        "weights-fast": Bounds(input_radius=1.0, weight_norm=1.0, spectral=False, product=Product.fast()),
    }[mode]


def prepare(mode: str, name: str, batch: int, device: torch.device, setting: Setting = USUAL) -> Callable[[], None]:
    """A function that takes one training step."""
    timed, graphed = models()[name], mode in GRAPHED
    torch.manual_seed(0)
    model, sizes = timed.factory().to(device), setting.sizes(batch)
    x, y = timed.batch(max(sizes), device)
    if setting.channels_last and x.dim() == 4:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=1e-4, capturable=graphed and device.type == "cuda")
    loss: Any = nn.CrossEntropyLoss()
    batches = itertools.cycle([(x[:n], y[:n]) for n in sizes])

    def compiled(forward: Any) -> Any:
        return torch.compile(forward, dynamic=None) if setting.compiled else forward

    def loop(forward: Any, optimizer: Any, loss: Any, before: Callable[[int], None] = lambda n: None):
        forward = compiled(forward)

        def step() -> None:
            a, b = next(batches)
            if setting.compiled and setting.draws:
                torch._dynamo.mark_dynamic(a, 0)
                torch._dynamo.mark_dynamic(b, 0)
            before(len(a))
            optimizer.zero_grad()
            with setting.cast(device):
                value = loss(forward(a), b)
            value.backward()
            optimizer.step()

        return step

    if mode == "plain":
        return loop(model, optimizer, loss)
    if mode == "plain-graph":
        return _recorded(compiled(model), optimizer, loss, x[:batch], y[:batch], setting.cast(device))
    loader = DataLoader(TensorDataset(x, y), batch_size=batch)
    if mode in OTHERS:
        return loop(*OTHERS[mode](model, optimizer, loss, loader))
    engine = PrivacyEngine()
    engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, criterion=loss, noise_multiplier=1.0,
        bounds=bounds_of(mode.removesuffix("-graph")), sample_rate=0.01, expected_batch_size=batch,
    )  # fmt: skip
    draws = itertools.count(1)

    def before(size: int) -> None:
        engine.training.hand_out(BatchInfo(next(draws), 0, True, None, size))  # it is there: only the step counts

    if not graphed:
        return loop(model, optimizer, engine.criterion, before)
    fused = engine.fused_step(compiled(model) if setting.compiled else None)

    def step() -> None:
        a, b = next(batches)
        before(len(a))
        with setting.cast(device):
            fused(a, b)

    return step


def endless_steps(
    engine: PrivacyEngine, model: Any, optimizer: Any, loader: Any, loss: Any
) -> Callable[[], None]:  # fmt: skip
    """A function that takes one private step of an ordinary loop: all pieces of the next draw, pass after pass."""

    def batches() -> Iterator[Any]:
        while True:
            yield from loader

    source = batches()

    def step() -> None:
        before = engine.steps
        while engine.steps == before:
            x, y = next(source)
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()

    return step


def _recorded(model: Any, optimizer: Any, loss: Any, x: Tensor, y: Tensor, cast: Any) -> Callable[[], None]:
    """Plain training with the whole step, the optimiser's part included, as one CUDA graph; the batch is copied in.

    It takes batches of the expected size, also where the private modes take those of Poisson draws.
    """
    side = torch.cuda.Stream(x.device)
    side.wait_stream(torch.cuda.current_stream())
    held = x.clone(), y.clone()

    def take_step() -> None:
        optimizer.zero_grad()
        with cast:
            value = loss(model(held[0]), held[1])
        value.backward()
        optimizer.step()

    with torch.cuda.stream(side):
        for _ in range(3):
            take_step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad()
    with torch.cuda.graph(graph):
        take_step()

    def step(kept: Any = (model, optimizer)) -> None:  # the graph writes to their memory, which must not be freed
        held[0].copy_(x)
        held[1].copy_(y)
        graph.replay()

    return step


@contextlib.contextmanager
def precision(name: str) -> Iterator[None]:
    """float32 throughout (or for what autocast leaves), or TF32 products, for every mode alike."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = name == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def measure(
    name: str, batch: int, modes: Sequence[str], device: torch.device, *, seconds: float = 3.0,
    setting: Setting = USUAL, within: float = math.inf,
) -> list[StepRow]:  # fmt: skip
    """Median step time of each mode in turn, for about ``seconds`` per mode; a mode out of memory is left out.

    So are modes whose preparation (compiling, mostly) would begin later than ``within`` seconds after the first's.
    """
    began = time.perf_counter()
    steps: dict[str, Callable[[], None]] = {}
    peaks: dict[str, float | None] = {}
    with precision(setting.precision), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for mode in modes:
            if steps and time.perf_counter() - began > within:
                break
            try:
                steps[mode], peaks[mode] = _warm(mode, name, batch, device, setting)
            except torch.OutOfMemoryError:
                steps.pop(mode, None)
        once = {mode: _timed(step, device, 1) for mode, step in steps.items()}
        usual = statistics.median(once.values())
        block = next(count for limit, count in _BLOCKS.get(device.type, _BLOCKS["cpu"]) if usual < limit)
        rounds = max(5, min(400, math.ceil(seconds / max(1e-5, block * usual))))
        times: dict[str, list[float]] = {mode: [] for mode in steps}
        for _ in range(rounds):
            for mode, step in steps.items():
                times[mode].append(_timed(step, device, block))
    medians = {mode: statistics.median(t) for mode, t in times.items()}
    label = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu x{torch.get_num_threads()}"
    rows = []
    for mode, values in times.items():
        low, _, high = statistics.quantiles(values, n=4)
        base = "plain-graph" if mode.endswith("-graph") else "plain"
        rows.append(
            StepRow(label, name, batch, mode, round(1e3 * medians[mode], 4),
                    round(medians[mode] / medians[base], 4) if base in medians else float("nan"),
                    peaks[mode], round((high - low) / medians[mode], 4), setting.precision, int(setting.compiled),
                    int(setting.channels_last))
        )  # fmt: skip
    return rows


def _warm(
    mode: str, name: str, batch: int, device: torch.device, setting: Setting
) -> tuple[Callable[[], None], float | None]:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
    step = prepare(mode, name, batch, device, setting)
    if setting.compiled and device.type == "cuda":  # what compilation itself takes is no part of training
        step()
        torch.cuda.reset_peak_memory_stats(device)
    # the third step of a size records a graph, the sixth a whole step
    for _ in range((60 if setting.draws and mode in GRAPHED else 12) if device.type == "cuda" else 3):
        step()
    if device.type != "cuda":
        return step, None
    torch.cuda.synchronize(device)
    return step, round((torch.cuda.max_memory_allocated(device) - held) / 2**30, 4)


def _timed(step: Callable[[], None], device: torch.device, block: int) -> float:
    wait = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)
    wait()
    began = time.perf_counter()
    for _ in range(block):
        step()
    wait()
    return (time.perf_counter() - began) / block


def read_csv(path: Path) -> list[StepRow]:
    """The rows of a file that :func:`write_csv` wrote."""
    with path.open(newline="") as file:
        return [
            StepRow(
                r["device"], r["model"], int(r["batch"]), r["mode"], float(r["ms"]), float(r["ratio"]),
                float(r["peak_gib"]) if r["peak_gib"] else None, float(r["spread"]), r["precision"],
                int(r.get("compile") or 0), int(r.get("channels_last") or 0),
            ) for r in csv.DictReader(file)
        ]  # fmt: skip


def write_csv(rows: Sequence[StepRow], path: Path, append: bool = False) -> None:
    """All rows as CSV, written whole or not at all; ``append`` keeps rows of the file that were not measured again."""

    def what(r: StepRow) -> tuple[Any, ...]:
        return r.device, r.model, r.batch, r.mode, r.precision, r.compile, r.channels_last

    if append and path.exists():
        again = {what(r) for r in rows}
        rows = [*(r for r in read_csv(path) if what(r) not in again), *rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".part")
    with scratch.open("w", newline="") as file:
        writer: csv.DictWriter[str] = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for row in rows:
            writer.writerow(asdict(row))
    scratch.replace(path)


def plot(rows: Sequence[StepRow], path: Path) -> None:
    """Ratio to plain training against batch size, one panel per model and device."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib import ticker

    def panel(row: StepRow) -> tuple[str, ...]:
        extra = ", compiled" * row.compile + ", channels last" * row.channels_last
        return row.device, row.model, row.precision + extra

    panels = sorted({panel(r) for r in rows})
    across = min(3, len(panels))
    down = -(-len(panels) // across)
    figure, grid = plt.subplots(down, across, figsize=(4.2 * across, 3.6 * down), squeeze=False, layout="constrained")
    axes, lines = grid.flatten(), {}
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    for axis, (device, model, kind) in zip(axes, panels, strict=False):
        for mode in (*MODES, *GRAPHED):
            points = sorted((r.batch, r.ratio) for r in rows if (*panel(r), r.mode) == (device, model, kind, mode))
            if points and not mode.startswith("plain"):
                colour = plt.get_cmap("tab20")(2 * MODES.index(mode.removesuffix("-graph")) % 19)  # no two alike
                style = {"linestyle": "--", "marker": "s"} if mode.endswith("-graph") else {"marker": "o"}
                (lines[mode],) = axis.plot(*zip(*points, strict=True), color=colour, **style)
        axis.axhline(1.0, color="#888888", linewidth=1)
        axis.set(title=f"{model}\n{device}, {kind}", xlabel="batch", xscale="log", yscale="log")
        batches = sorted({r.batch for r in rows if panel(r) == (device, model, kind)})
        axis.set_xticks(batches, [str(b) for b in batches])
        axis.set_xticks([], minor=True)
        for which in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
            which(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    for row in grid:
        row[0].set_ylabel("step time / plain training")
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)
