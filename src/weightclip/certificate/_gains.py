"""Certified gains over training: recomputed every r steps, enlarged by how far weights have moved in between."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from weightclip._device import Recorder, constant
from weightclip._torch import ConvNd, norms_of_all, version_of
from weightclip.bounds import (
    Numerics,
    Rescale,
    Scalar,
    effective_weight,
    gain_is_norm,
    is_layer,
    kernel_overlap,
    layer_rule,
    norm_function,
)
from weightclip.certificate._bank import NormBank, as_cast
from weightclip.certificate._bounds import Bounds
from weightclip.certificate._drift import drift
from weightclip.certificate._open import OpenPlan
from weightclip.certificate._plan import Plan


class Gains:
    """l2 gains of the model's Linear and Conv layers between full evaluations.

    Formal guarantees:
        ``current`` returns, for every such layer, an upper bound of its gain at the present weights: a certified norm
        at some earlier step s plus sqrt(m) times a bound of ||theta_t - theta_s|| (m the kernel overlap, 1 for dense
        layers), at most the Frobenius norm.
    """

    def __init__(self, plan: Plan | OpenPlan, bounds: Bounds, recorder: Recorder | None = None) -> None:
        self.plan, self.refresh = plan, bounds.refresh
        self.recorder = recorder or Recorder(torch.device("cpu"))
        self._since: int | None = None  # the step of the last snapshot
        # without the DFT bound all norms are of one kind and can be taken together
        together = not bounds.spectral and bounds.p == 2
        layers = _plain_layers(plan)
        self.bank = NormBank(layers) if together and layers else None
        self._weightless: dict[int, bool] = {}
        self._inflations: dict[Numerics, tuple[float, ...]] = {}
        self._clipped: _Clipped | None = None
        self._kept: Tensor | None = None
        self._numerics: Numerics | None = None
        self._gain: dict[str, Tensor] = {}
        self._then: dict[str, Tensor] = {}

    def current(self, numerics: Numerics, step: int) -> Mapping[str, Scalar]:
        """Bounds to use at ``step``; empty when every gain is to be evaluated afresh, infinite where none is wanted."""
        if not self.plan.needs_gains:
            return dict.fromkeys(_plain_layers(self.plan), math.inf)
        if self.refresh == 1:
            return {} if self.bank is None else self._from_bank(self.bank, numerics)
        self.renew(numerics, step)
        known = {}
        for path, then in self._then.items():
            module = self.plan.model.get_submodule(path)
            m = kernel_overlap(module) if isinstance(module, ConvNd) else 1
            rule = layer_rule(module)
            assert rule is not None
            moved = drift(module, as_cast(effective_weight(module).detach(), numerics.weights), then)
            known[path] = self._gain[path] + math.sqrt(m) * moved * (1 + 1e-9) * rule.inflation(module, numerics)
        return known

    @torch.no_grad()
    def renew(self, numerics: Numerics, step: int) -> bool:
        """Take a snapshot if one is due at ``step``; whether it was. Between two, ``current`` may be recorded."""
        if self.refresh == 1 or not self.plan.needs_gains:
            return False
        if self._since is not None and 0 <= step - self._since < self.refresh and numerics == self._numerics:
            return False
        self._snapshot(numerics)
        self._since = step
        return True

    @torch.no_grad()
    def settle(self) -> None:
        """Weights were clipped: between refreshes, certify them as they are now, for the steps up to the next."""
        if self.refresh == 1 or not self.plan.needs_gains:
            return
        self._snapshot(self._numerics or Numerics())
        self._clipped = None  # not for a snapshot after later steps: not every write to a weight can be seen
        # clipping comes at multiples of `refresh`; were this not the present step, there would be one more snapshot
        self._since = 0 if self._since is None else (self._since // self.refresh + 1) * self.refresh

    @property
    def places(self) -> tuple[int, ...]:
        """Where the last snapshot lies."""
        return tuple(t.data_ptr() for t in (*self._then.values(), *self._gain.values()))

    def _from_bank(self, bank: NormBank, numerics: Numerics) -> dict[str, Scalar]:
        kept = self._clipped if numerics.weights == torch.float32 else None
        weights = bank.weights()
        norms = None if kept is None else kept.norms_if_unchanged(bank, weights)
        if norms is None:
            on_host = weights[0].is_cpu
            norms = bank.numbers(weights, numerics.weights) if on_host else bank.vector(numerics.weights, self._waits)
        if numerics not in self._inflations:
            rules = [(layer_rule(module), module) for module in bank.layers.values()]
            self._inflations[numerics] = tuple(r.inflation(m, numerics) for r, m in rules if r is not None)
        inflations = self._inflations[numerics]
        if isinstance(norms, list):
            return {path: n * i for path, n, i in zip(bank.layers, norms, inflations, strict=True)}
        return dict(zip(bank.layers, (norms * constant(inflations, norms.device)).unbind(), strict=True))

    @property
    def _waits(self) -> bool:
        """Norms that serve many steps are never part of what is recorded: finding them may wait for the device."""
        return self.refresh > 1

    def clip(self, limits: dict[str, float]) -> None:
        """ClipWeights by rescaling (the paper's), on the norms of the bank, which then serve the next evaluation."""
        assert self.bank is not None
        weights = self.bank.weights()
        if weights[0].is_cpu:
            norms = _rescale_on_host(self.bank, weights, limits)
            self._clipped = _Clipped(norms, _versions(weights), _frobenius(weights))
            return
        places = tuple([(weight.data_ptr(), weight.stride()) for weight in weights])
        found = self._rescale(limits) if self._waits else self.recorder(("clip", places), lambda: self._rescale(limits))
        if self._kept is None:  # a place of its own: what is recorded reads it there
            self._kept = torch.empty_like(found)
        self._kept.copy_(found)
        limited = [cast(Tensor, self.bank.layers[path].weight) for path in limits]
        if self.recorder.on and limited:
            torch.autograd.graph.increment_version(limited)  # a replay does not count as a write
        self._clipped = _Clipped(self._kept[0], _versions(weights), self._kept[1])

    def replayed(self) -> None:
        """A recorded step has changed the weights and clipped them: norms lie where clipping leaves them."""
        if self.bank is not None and self._kept is not None:
            self._clipped = _Clipped(self._kept[0], _versions(self.bank.weights()), self._kept[1])

    def _rescale(self, limits: dict[str, float]) -> Tensor:
        """The same on a device; bounds of norms, and Frobenius norms, after that: 2 x layers, float64."""
        assert self.bank is not None
        norms, layers = self.bank.vector(wait=self._waits), self.bank.layers
        weights = {path: cast(Tensor, layers[path].weight) for path in limits}
        room = {path: _room(weight) for path, weight in weights.items()}
        most = tuple(limits.get(path, math.inf) for path in layers)
        target = tuple(limits.get(path, math.inf) * room.get(path, 1.0) for path in layers)
        scales = (constant(target, norms.device) / norms).clamp(max=1.0)
        narrow = scales.float().unbind()
        for place, path in enumerate(layers):
            if path in limits:
                weights[path].mul_(narrow[place])
        # a weight that was multiplied, by however little, was rounded: its norm before does not bound it any more
        norms = torch.where(scales < 1, constant(most, norms.device), norms)
        return torch.stack([norms, cast(Tensor, _frobenius(self.bank.weights()))])

    @property
    def weightless(self) -> bool:
        """Whether bounds never look at a weight: every factor is bounded by itself, and no other layer has weights."""
        plan = self.plan
        if id(plan) not in self._weightless:
            plain = _plain_layers(plan)
            others = [m for path, m in plan.modules() if path not in plain]
            bare = plan.graph is None or all(next(m.parameters(), None) is None for m in others)
            self._weightless[id(plan)] = bare and not plan.needs_gains
        return self._weightless[id(plan)]

    @property
    def clipped(self) -> bool:
        """Whether the next evaluation may start from the norms that clipping has found."""
        kept = self._clipped
        return kept is not None and self.bank is not None and kept.versions == _versions(self.bank.weights())

    def reset(self) -> None:
        """Weights were replaced from outside: evaluate afresh next time."""
        self._since, self._clipped = None, None

    def state(self, tensors: dict[str, Tensor]) -> dict[str, Any] | None:
        """What an exact resume needs between two snapshots; the weights of the last one go to ``tensors``."""
        if self._since is None or self._numerics is None:
            return None
        tensors |= {f"gains.{path}": then.cpu().clone() for path, then in self._then.items()}
        gains = {path: float(gain) for path, gain in self._gain.items()}
        return {"since": self._since, "gain": gains, "numerics": [str(self._numerics.weights), self._numerics.operand]}

    def restore(self, state: dict[str, Any] | None, tensors: dict[str, Tensor]) -> None:
        """Continue from :meth:`state`."""
        if state is None:
            return
        kind, operand = state["numerics"]
        self._numerics = Numerics(getattr(torch, kind.removeprefix("torch.")), operand)
        self._since, self._gain, self._then = state["since"], {}, {}
        for path, gain in state["gain"].items():
            device = cast(Tensor, self.plan.model.get_submodule(path).weight).device
            self._gain[path] = torch.tensor(gain, dtype=torch.float64, device=device)
            self._then[path] = tensors[f"gains.{path}"].to(device)

    def _snapshot(self, numerics: Numerics) -> None:
        """Certify the norms of the weights as they are, and keep a copy of them, in the places of the last one."""
        assert self.plan.graph is not None
        known = {} if self.bank is None else self._from_bank(self.bank, numerics)  # those that clipping has just found
        gain: dict[str, Tensor] = {}
        then: dict[str, Tensor] = {}
        for node in self.plan.graph.nodes:
            module, path = node.op.module, node.op.path
            if node.layer is None or module is None or not gain_is_norm(module) or path in gain:
                continue  # others are evaluated afresh at every step
            weight = as_cast(effective_weight(module).detach(), numerics.weights)
            found = known[path] if path in known else node.layer.gain(module, node.op, 2, numerics)
            found = torch.as_tensor(found, dtype=torch.float64, device=weight.device)
            gain[path] = _kept_in(self._gain.get(path), found)
            then[path] = _kept_in(self._then.get(path), weight)
        self._numerics, self._gain, self._then = numerics, gain, then


def _kept_in(place: Tensor | None, value: Tensor) -> Tensor:
    """A copy of the value, in a place that recorded work may know."""
    if place is None or (place.shape, place.dtype, place.device) != (value.shape, value.dtype, value.device):
        return value.clone()
    return place.copy_(value)


@dataclass(frozen=True)
class _Clipped:
    """Norms that clipping has just established, valid while the weights stay as they are."""

    norms: Tensor | list[float]  # of all layers of the bank; plain numbers on the CPU
    versions: list[int]
    frobenius: Tensor | list[float]

    def norms_if_unchanged(self, bank: NormBank, weights: list[Tensor]) -> Tensor | list[float] | None:
        """The norms; None when weights changed. Writes through ``.data`` bump no version, but they move ||W||_F."""
        if self.versions != _versions(weights):
            return None
        now = _frobenius(weights)
        if isinstance(now, list) or isinstance(self.norms, list):
            return self.norms if now == self.frobenius else None
        assert isinstance(self.frobenius, Tensor)
        changed = now != self.frobenius
        # nothing waits for the device: where a weight moved, its Frobenius norm is a bound as well
        free = now * constant(tuple(1.01 * factor for factor in bank.factors.values()), now.device)
        return torch.where(changed, free, self.norms)


def _versions(weights: list[Tensor]) -> list[int]:
    return [version_of(weight) for weight in weights]


def _frobenius(weights: list[Tensor]) -> Tensor | list[float]:
    """Frobenius norm of each: plain numbers on the CPU, float64 on a device."""
    norms = norms_of_all(weights)
    return [float(norm) for norm in norms] if norms[0].is_cpu else torch.stack(norms).double()


def _rescale_on_host(bank: NormBank, weights: list[Tensor], limits: dict[str, float]) -> list[float]:
    """Rescale the weights; bounds of their norms after that, in plain numbers."""
    norms = bank.numbers(weights)
    for i, (path, weight) in enumerate(zip(bank.layers, weights, strict=True)):
        if path in limits and norms[i] > (target := limits[path] * _room(weight)):  # a NaN stays
            weight.mul_(target / norms[i])
            norms[i] = limits[path]  # multiplied, by however little, it was rounded: see `_rescale`
    return norms


def _room(weight: Tensor) -> float:
    """Rounding scaled weights to float32 moves their norm by at most 2^-24 sqrt(rank) of itself."""
    return 1 - 2.0**-24 * (2 + math.sqrt(min(weight.shape[0], weight.numel() // weight.shape[0])))


class WeightClipper:
    """ClipWeights over the trainable layers, prepared once and run after every step."""

    def __init__(self, model: nn.Module, bounds: Bounds, paths: list[str], gains: Gains) -> None:
        self.strategy, self.gains = bounds.clip, gains
        self.limits: dict[str, float] = {}  # of layers whose norms the bank finds
        self.work = []  # of all others
        self.by_bank = gains.bank is not None and isinstance(self.strategy, Rescale)
        banked = gains.bank.layers if gains.bank is not None and self.by_bank else {}
        for path in paths:
            module, limit = model.get_submodule(path), bounds.of("weight_norm", path)
            if hasattr(module, "effective_weight"):  # clipping W would not bound W-hat, whose norm is certified anyway
                continue
            if limit is None or not is_layer(module) or not cast(Tensor, module.weight).requires_grad:
                continue
            if path in banked:
                self.limits[path] = float(limit)
            else:
                self.work.append((cast(Tensor, module.weight), float(limit), norm_function(module, bounds.p)))
        self.due = bool(self.work or self.limits)  # whether there is anything to do

    @torch.no_grad()
    def __call__(self) -> None:
        for weight, limit, norm in self.work:
            self.strategy(weight, limit, norm)
        if self.by_bank:
            self.gains.clip(self.limits)
        self.gains.settle()


def _plain_layers(plan: Plan | OpenPlan) -> dict[str, nn.Module]:
    """Linear and Conv layers that compute with their weight itself, by no rule of a user's own."""
    layers = plan.modules()
    return {path: m for path, m in layers if gain_is_norm(m) and not hasattr(m, "effective_weight")}


@functools.cache
def _products(cuda: bool) -> tuple[Any, Any]:
    """torch's settings of matrix products and convolutions."""
    backends = cast(Any, torch.backends)
    return (backends.cuda.matmul, backends.cudnn.conv) if cuda else (backends.mkldnn.matmul, backends.mkldnn.conv)


@contextlib.contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Inside, passes round as float32 does: without autocast, TF32 or bfloat16 products."""
    kinds = _products(device.type == "cuda")
    before = [kind.fp32_precision for kind in kinds]
    try:
        for kind in kinds:
            kind.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for kind, precision in zip(kinds, before, strict=True):
            kind.fp32_precision = precision


def numerics_for(device: torch.device, autocast: torch.dtype | None) -> Numerics:
    """How passes round on this device: autocast's type, TF32 or bfloat16 where torch may use them, else float32."""
    if autocast in (torch.bfloat16, torch.float16):
        return Numerics(autocast, {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}[autocast])
    matmul, conv = _products(device.type == "cuda")
    modes = {matmul.fp32_precision, conv.fp32_precision} - {"ieee", "none"}
    if not modes:
        return Numerics()
    return Numerics(torch.float32, 2.0**-10) if modes == {"tf32"} else Numerics(torch.bfloat16, 2.0**-8)
