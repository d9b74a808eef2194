"""Step time and peak memory of ordinary and private training, interleaved in one process.

Every mode trains the same model on the same batch with Adam; the clock runs over zero_grad, forward, loss, backward and
step, after warm-up, and the modes take turns so that a slow spell hits all of them. Loading data is left out. As in
training, steps follow each other: the clock stops every 64 steps on a GPU (eight, two if they are slow), where nothing
waits for the device after each, and every 16 on a CPU if they are short.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
from weightclip_studies.bench._rows import GRAPHED, StepRow

# steps shorter than so many seconds, so many a look at the clock
_BLOCKS = {"cuda": ((0.01, 64), (0.05, 8), (math.inf, 2)), "cpu": ((0.01, 16), (math.inf, 1))}
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
    """A step that has settled, and the peak of the steps that follow: compiling, recording and warming up are over.

    An ordinary step's peak is of what it allocates. A recorded one's is of what is reserved, once unused memory was
    given back: a graph's own pool, which is all its replays use, counts as allocated in none of them.
    """
    cuda, recorded = device.type == "cuda", mode in GRAPHED
    held = _held(device, recorded) if cuda else 0
    step = prepare(mode, name, batch, device, setting)
    # the third step of a size records a graph, the sixth a whole step
    for _ in range((60 if setting.draws and recorded else 12) if cuda else 3):
        step()
    if not cuda:
        return step, None
    _held(device, recorded)
    torch.cuda.reset_peak_memory_stats(device)
    for _ in setting.sizes(batch):
        step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved if recorded else torch.cuda.max_memory_allocated
    return step, round((peak(device) - held) / 2**30, 4)


def _held(device: torch.device, reserved: bool) -> int:
    """Bytes that are held now, after what nobody uses was given back."""
    torch.cuda.synchronize(device)
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device) if reserved else torch.cuda.memory_allocated(device)


def _timed(step: Callable[[], None], device: torch.device, block: int) -> float:
    wait = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)
    wait()
    began = time.perf_counter()
    for _ in range(block):
        step()
    wait()
    return (time.perf_counter() - began) / block
