"""A whole training step in one call; on CUDA everything from the batch to the noisy gradient is one recorded graph."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from weightclip._device import Reads, constant, side_stream
from weightclip._torch import optimizer_hooks
from weightclip.certificate import numerics_for
from weightclip.engine._gate import refuse_strangers
from weightclip.errors import ContractError
from weightclip.factors import conv_weights
from weightclip.noise import NOISE, Streams, fill_normal_
from weightclip.sampling import BatchInfo

if TYPE_CHECKING:
    from weightclip.engine._engine import PrivacyEngine

_WARM = 2  # ordinary steps of a size before it is recorded
_MOST = 32  # graphs kept
_CHECKED = 64  # every so many steps the host looks whether weights and bounds are finite


@dataclass
class _Recorded:
    """One graph and what it reads and leaves behind."""

    graph: torch.cuda.CUDAGraph
    noise: _Noise
    inputs: _Inputs
    value: Tensor
    gradients: list[Tensor]
    flat: Tensor | None  # all gradients in one piece, where they lie so
    whole: bool  # whether the optimiser's step is in the graph
    bounds: tuple[Tensor, Tensor | None, Tensor | None]
    kept: list[Any]


class FusedStep:
    """``loss = step(x, y)``: zero_grad, forward, loss, backward and the optimiser's step, for a batch of the loader.

    On CUDA, forward, loss, backward, bounds and noise are recorded once for each size of batch and then launched as one
    CUDA graph; sizes are rounded up and the rest is padded with rows that count nothing. The optimiser runs as it is
    written, so that schedules and hooks work. One that is made with ``capturable=True`` joins the graph, with clipping,
    while its numbers stay as they are (a learning rate that is a tensor may change) and nobody has hooked it; ``.grad``
    is empty after such a step. Everywhere else, and while a size is new, this is the ordinary loop.

    What a graph asks for: the model's forward does the same operations at every call (no branches on values, no work of
    Python's that matters). Draws in several pieces, adaptive limits, K-norm noise, models that draw random numbers
    (dropout), seeded noise (``generator=``) and batches that are not one input and one target tensor take the ordinary
    way. With ``compiled``, the model as torch.compile returns it, its kernels are what is recorded.

    Formal guarantees:
        A replay runs the recorded kernels of the ordinary step (projection, certified loss gradient, bounded factors,
        sensitivities at the present weights, allocation, noise) with the step's own noise stream, charged before it is
        launched. What a graph holds fixed and the user can change (modes, precision, places of tensors) is part of the
        key under which it is found, as are sigma, b and the noise streams; loss, bounds, allocation and views are the
        engine's for good. Padding rows have a gradient of exact zeros.
    """

    def __init__(self, engine: PrivacyEngine, compiled: Any = None) -> None:
        self.engine, self.training = engine, engine.training
        t = self.training
        if compiled is not None and getattr(compiled, "_orig_mod", None) is not t.model:
            raise ContractError(
                "fused_step takes the private model compiled, torch.compile(model), and nothing else in its place."
            )
        self.compiled = compiled
        self._model = t.model if compiled is None else compiled
        plain = t.quantiles is None and t.sensitivity.entrywise is None and engine.bounds.refresh == 1
        # a graph would draw a model's masks from a generator whose seed the user knows, and a seeded run's noise is
        # keyed by the sum, which is not there before the launch
        drawn_before = engine.noise_multiplier == 0 or not engine.streams.needs_content
        alone = t.alone and t.release.exact is None
        self.on = engine.device.type == "cuda" and plain and alone and drawn_before and not t.draws
        self._runs: dict[Hashable, int] = {}
        self._graphs: dict[Hashable, _Recorded] = {}
        self._buffers: dict[Hashable, _Inputs] = {}
        self._pool: Any = None
        self._last: torch.cuda.Stream | None = None  # where the last step was launched
        self._optimizer = _Optimizer(engine.optimizer)

    def __call__(self, x: Any, y: Any) -> Tensor:
        """One step on a batch of the private loader; the displayed loss, detached (it is not private)."""
        tensors = isinstance(x, Tensor) and isinstance(y, Tensor)
        info = self.training.info or self.training.admit_batch()
        if not self.on or not tensors or not (info.piece == 0 and info.last):
            return self._ordinary(x, y)
        with torch.cuda.device(self.engine.device):
            stream = torch.cuda.current_stream()
            if self._last is not None and self._last != stream:  # batch and seeds have one place: no step may overtake
                stream.wait_stream(self._last)
            self._last = stream
            return self._padded(info, x, y)

    def _ordinary(self, x: Any, y: Any) -> Tensor:
        """The sequence of :mod:`weightclip.engine._step`, called directly instead of by hooks of a backward pass."""
        engine, t = self.engine, self.training
        # as a graph's places take batches from anywhere: whether one is padded or in pieces depends on the draw
        x, y = (b.to(engine.device) if isinstance(b, Tensor) else b for b in (x, y))
        engine.optimizer.zero_grad()
        with torch.enable_grad():
            loss = engine.criterion.take(self._model(x), y)
            t.collect(loss.passage, loss.draw, loss.mask)
        engine.optimizer.step()
        return loss.value

    def _padded(self, info: BatchInfo, x: Tensor, y: Tensor) -> Tensor:
        engine = self.engine
        if x.shape[:1] != (info.rows * engine.views,) or y.shape[:1] not in ((info.rows,), x.shape[:1]):
            return self._ordinary(x, y)  # refuses with a message of its own
        rows = _rounded(info.rows, engine.expected_batch_size)
        per_view = engine.views if y.shape[0] == x.shape[0] else 1
        shape = rows, tuple(x.shape[1:]), x.dtype, per_view, tuple(y.shape[1:]), y.dtype
        if shape not in self._buffers:
            self._buffers[shape] = _Inputs.like(x, y, rows, engine.views, per_view, engine.device)
        inputs = self._buffers[shape]
        inputs.fill(x, y, info, engine.views, per_view)
        self.training.info = BatchInfo(info.draw, 0, True, inputs.mask, rows)
        fixed = self._optimizer.fixed()
        key = (*shape, *self._circumstances(), fixed)
        known = key in self._graphs
        often = engine.steps % _CHECKED == 0
        if not known and (often or self._runs.get(key, 0) < _WARM):
            self._runs[key] = self._runs.get(key, 0) + 1
            return self._warm_up(inputs)
        self.training.admit_batch()
        if often and not self.training.sensitivity.fit():  # the ordinary way says so, unless weights were mended since
            return self._ordinary(inputs.x, inputs.y)
        if not known and not self._record(key, inputs, fixed is not None):
            return self._ordinary(inputs.x, inputs.y)
        return self._replay(self._graphs[key])

    def _warm_up(self, inputs: _Inputs) -> Tensor:
        """An ordinary step; of a compiled model on the stream of recordings, which what is compiled may hold on to."""
        if self.compiled is None:
            return self._ordinary(inputs.x, inputs.y)
        here, stream = torch.cuda.current_stream(), side_stream(self.engine.device, "step")
        stream.wait_stream(here)
        try:
            with torch.cuda.stream(stream):
                return self._ordinary(inputs.x, inputs.y)
        finally:
            here.wait_stream(stream)

    def _circumstances(self) -> tuple[Hashable, ...]:
        """All that a graph holds fixed."""
        engine, t, release = self.engine, self.training, self.training.release
        enabled = torch.is_autocast_enabled("cuda")
        autocast = torch.get_autocast_dtype("cuda") if enabled else None
        return (
            t.watch.modes(), autocast, numerics_for(engine.device, autocast), t.watch.addresses(),
            t.sensitivity.gains.clipped, release.sigma, release.batch, release.grid, tuple(release.slack),
            id(engine.streams),
        )  # fmt: skip

    def _replay(self, found: _Recorded) -> Tensor:
        engine, t, release = self.engine, self.training, self.training.release
        t.drop()
        t.sensitivity.use_mode(t.watch.modes())
        if found.whole:
            refuse_strangers(engine.optimizer, t.trained)

        def launch(step: int) -> None:
            found.noise.set(step)
            found.graph.replay()

        t.spend(launch)
        t.sensitivity.values, t.sensitivity.factors, t.sensitivity.reach = found.bounds
        value = found.value.clone()
        if found.whole:
            for parameter in release.parameters:
                parameter.grad = None
            torch.autograd.graph.increment_version(release.parameters)
            t.sensitivity.gains.replayed()
            return value
        # new tensors: gradients that are kept never show a later step
        flat = found.flat
        gradients = [g.clone() for g in found.gradients] if flat is None else release.split(flat.clone())
        for parameter, gradient in zip(release.parameters, gradients, strict=True):
            parameter.grad = gradient
        t.released = True
        try:
            engine.optimizer.step()
        finally:
            t.released = False
        return value

    def _record(self, key: Hashable, inputs: _Inputs, whole: bool) -> bool:
        """Record the step for one size; False if that was not possible (after an error of CUDA's: for good)."""
        engine, before = self.engine, torch.cuda.current_stream()
        if len(self._graphs) >= _MOST:
            self._graphs.clear()
            self._pool = None  # a pool ends with its last graph
        graph, noise, reads = torch.cuda.CUDAGraph(), _Noise(engine.streams, engine.device), Reads()
        for generator in noise.generators:
            graph.register_generator_state(generator)
        stream, caches = side_stream(engine.device, "step"), (_caches(), list(conv_weights.values()))
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"), reads:
                value, flat, gradients = self._step(inputs, noise, reads)
                if whole:
                    self.training.released = True
                    engine.optimizer.step()
        except Exception as error:
            torch.cuda.set_stream(before)
            if not whole and not isinstance(error, RuntimeError):
                raise
            if whole:  # next time without the optimiser
                self._optimizer.on = False
            else:
                self.on = False
                reason = " ".join(line.strip() for line in str(error).splitlines()[:3])
                warnings.warn(f"fused steps run without a CUDA graph: {reason}", stacklevel=5)
            torch.cuda.synchronize()
            self.training.drop()
            _forget_unmade(caches[0])
            return False
        finally:
            self.training.released = False
            self.training.sensitivity.gains.reset()  # recording runs nothing: no norms are known
            for parameter in self.training.release.parameters:
                parameter.grad = None
        if _forget_unmade(caches[0]):
            return False
        # nobody looks at what compiled code reads: tensors that modules hold as plain attributes are kept with the rest
        plain = [v for m in self.training.model.modules() for v in vars(m).values() if isinstance(v, Tensor)]
        found, kept = self.training.sensitivity, [reads.kept, caches[1], plain]
        bounds = found.values, found.factors, found.reach
        self._graphs[key] = _Recorded(graph, noise, inputs, value, gradients, flat, whole, bounds, kept)
        return True

    def _step(self, inputs: _Inputs, noise: _Noise, reads: Reads) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """What is recorded: (displayed loss, all gradients in one piece or None, the gradient of each parameter)."""
        engine, t, release = self.engine, self.training, self.training.release
        stream, found = torch.cuda.current_stream(), t.sensitivity
        beside = side_stream(engine.device, "bounds")
        beside.wait_stream(stream)  # bounds look at weights alone: they run beside the passes
        outputs, leaves = self._forward(inputs.x, reads)
        found.recorder.aside = beside
        try:
            loss = engine.criterion.take(outputs, inputs.y)
        finally:
            found.recorder.aside = None
        stream.wait_stream(beside)  # where this step's limits are set
        t.run_backward(loss.passage, leaves, loss.mask)
        with torch.cuda.stream(beside):  # nor does the noise wait for the passes
            drawn = release.noise(found.values, noise, 0, found.factors)  # type: ignore[arg-type]
        stream.wait_stream(beside)
        flat = release.release(found.values, engine.streams, 0, found.factors, drawn)
        t.draw = None
        gradients = [p for block in release.blocks if (p := block.parameter.grad) is not None]
        whole = all(block.pull_back is None and block.parameter.dtype == flat.dtype for block in release.blocks)
        return loss.value, flat if whole else None, gradients

    def _forward(self, x: Tensor, reads: Reads) -> tuple[Any, list[Tensor]]:
        """The model's outputs in a recording, and the leaves that its backward pass must not reach."""
        model, parameters = self.training.model, self.training.release.parameters
        # leaves of this recording's own: those of the parameters belong to the stream they were made on
        leaves = {name: nn.Parameter(p.detach(), p.requires_grad) for name, p in model.named_parameters()}
        names = {id(p): name for name, p in model.named_parameters()}
        prefix, stance, as_compiled = "", contextlib.nullcontext(), contextlib.nullcontext()
        if self.compiled is not None:  # sizes were compiled before
            prefix, stance, as_compiled = "_orig_mod.", torch.compiler.set_stance("fail_on_recompile"), reads.paused()
        with stance, as_compiled:
            outputs = torch.func.functional_call(self._model, {prefix + k: v for k, v in leaves.items()}, (x,))
        return outputs, [leaves[names[id(p)]] for p in parameters]


class _Optimizer:
    """Whether the optimiser's step may be part of a graph, and what such a graph holds fixed."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.on = optimizer, True
        self._last: Hashable = None
        self._same = 0  # steps since it changed

    def fixed(self) -> Hashable:
        """Numbers and places its step reads; None where it is to run as it is written, or they have just changed."""
        groups = self.optimizer.param_groups
        asked = all(group.get("capturable") for group in groups)
        if not self.on or not asked or optimizer_hooks(self.optimizer) != (0, 0, 1, 1):  # those are ours
            return None
        tables = [*groups, *self.optimizer.state.values()]
        read = tuple([(name, _constant(value)) for table in tables for name, value in table.items()])
        step = self.optimizer.step
        found = getattr(step, "__func__", step), read
        try:
            hash(found)
        except TypeError:  # it holds what may change unseen
            return None
        self._same = self._same + 1 if found == self._last else 0
        self._last = found
        return found if self._same >= _WARM else None


def _constant(value: Any) -> Any:
    """A tensor of a device counts by its place; everything else, which the host reads, by its value."""
    if isinstance(value, Tensor):
        return (value.data_ptr() if not value.is_cpu else _constant(value.tolist())), value.dtype
    return tuple([_constant(v) for v in value]) if isinstance(value, (list, tuple)) else value


class _Inputs:
    """The places a graph reads its batch from."""

    def __init__(self, x: Tensor, y: Tensor, mask: Tensor) -> None:
        self.x, self.y, self.mask = x, y, mask

    @classmethod
    def like(cls, x: Tensor, y: Tensor, rows: int, views: int, per_view: int, device: torch.device) -> _Inputs:
        return cls(
            torch.zeros(rows * views, *x.shape[1:], dtype=x.dtype, device=device),
            torch.zeros(rows * per_view, *y.shape[1:], dtype=y.dtype, device=device),
            torch.zeros(rows, dtype=torch.bool, device=device),
        )

    @torch.no_grad()
    def fill(self, x: Tensor, y: Tensor, info: BatchInfo, views: int, per_view: int) -> None:
        """Copy a batch; what an earlier one left behind it becomes zeros."""
        rows = info.rows
        self.x[: rows * views].copy_(x, non_blocking=True)
        self.y[: rows * per_view].copy_(y, non_blocking=True)
        if rows < len(self.mask):
            self.x[rows * views :].zero_()
            self.y[rows * per_view :].zero_()
            self.mask[rows:].fill_(False)
        if info.mask is None:
            self.mask[:rows].fill_(True)
        else:
            self.mask[:rows].copy_(info.mask, non_blocking=True)


class _Noise:
    """Stands for a release's streams inside a graph, by generators that are seeded before each launch."""

    def __init__(self, streams: Streams, device: torch.device) -> None:
        self.streams = streams
        self.generators = [torch.Generator(device) for _ in range(2 if streams.is_secure else 1)]

    def normal_(self, out: Tensor, label: str, *ints: int) -> Tensor:
        """Standard normals of whichever step the generators are set to."""
        return fill_normal_(out, self.generators)

    def set(self, step: int) -> None:
        """The next launch draws the noise of ``step``."""
        streams = self.streams.for_release(step, bytes)  # a seeded run is here only without noise
        for generator, seed in zip(self.generators, streams.seeds(NOISE, step), strict=False):
            generator.manual_seed(seed)


def _rounded(rows: int, batch: float) -> int:
    """Rows of the graph that takes a draw: sizes are a sixteenth of the expected one apart, so that few are needed."""
    step = 1 << max(3, round(math.log2(max(batch, 1.0) / 16)))
    return -(-rows // step) * step


def _caches() -> tuple[int, int]:
    return len(conv_weights), constant.cache_info().currsize


def _forget_unmade(before: tuple[int, int]) -> bool:
    """Whether constants were made in a recording: they have no value before it is launched, and are dropped."""
    made = _caches() != before
    if made:
        conv_weights.clear()
        constant.cache_clear()  # graphs keep the memory they read
    return made
