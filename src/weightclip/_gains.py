"""Certified gains over training: recomputed every r steps, enlarged by the Frobenius drift in between."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from weightclip._bank import NormBank
from weightclip.bounds import Numerics, Scalar, kernel_overlap, layer_norm_tensor, layer_rule
from weightclip.bounds._layer_norms import effective_weight, is_layer, norm_function
from weightclip.certificate import Plan
from weightclip.clipping import Rescale
from weightclip.config import Bounds


class Gains:
    """l2 gains of the model's Linear and Conv layers between full evaluations.

    Formal guarantees:
        ``current`` returns, for every such layer, an upper bound of its gain at the present weights: a certified norm
        at some earlier step s plus sqrt(m) ||theta_t - theta_s||_F (m the kernel overlap, 1 for dense layers).
    """

    def __init__(self, plan: Plan, bounds: Bounds) -> None:
        self.plan, self.refresh = plan, bounds.refresh
        self._since: int | None = None  # the step of the last snapshot
        # without the DFT bound all norms are of one kind and can be taken together
        self.bank = (
            NormBank(_plain_layers(plan)) if not bounds.spectral and bounds.p == 2 and self.refresh == 1 else None
        )
        self._free = list(_plain_layers(plan))
        self._clipped: tuple[list[float], dict[str, Tensor]] | None = None
        self._numerics: Numerics | None = None
        self._gain: dict[str, Tensor] = {}
        self._then: dict[str, Tensor] = {}

    def current(self, numerics: Numerics, step: int) -> Mapping[str, Scalar]:
        """Bounds to use at ``step``; empty when every gain is to be evaluated afresh, infinite where none is wanted."""
        if not self.plan.needs_gains:
            return dict.fromkeys(self._free, math.inf)
        if self.bank is not None:
            return self._from_bank(self.bank, numerics)
        if self.refresh == 1:
            return {}
        if self._since is None or not 0 <= step - self._since < self.refresh or numerics != self._numerics:
            self._snapshot(numerics)
            self._since = step
        known = {}
        for path, then in self._then.items():
            module = self.plan.model.get_submodule(path)
            now = effective_weight(module).to(numerics.weights)
            m = kernel_overlap(module) if isinstance(module, _ConvNd) else 1
            drift = torch.linalg.vector_norm((now - then).to(torch.float32), dtype=torch.float64)
            known[path] = self._gain[path] + math.sqrt(m) * drift * (1 + 1e-6)
        return known

    def _from_bank(self, bank: NormBank, numerics: Numerics) -> dict[str, Scalar]:
        norms = None
        if self._clipped is not None and numerics.weights == torch.float32:
            seen, kept = self._clipped
            norms = kept if seen == self._fingerprint(bank) else None  # changed meanwhile, perhaps through .data
        norms = bank.norms(numerics.weights) if norms is None else norms
        known: dict[str, Scalar] = {}
        for path, norm in norms.items():
            rule = layer_rule(bank.layers[path])
            assert rule is not None
            factor = rule.inflation(bank.layers[path], numerics)
            known[path] = float(norm) * factor if norm.device.type == "cpu" else norm * factor
        return known

    def _fingerprint(self, bank: NormBank) -> list[float]:
        return [float(cast(Tensor, m.weight).detach().flatten().dot(cast(Tensor, m.weight).detach().flatten()))
                for m in bank.layers.values()]  # fmt: skip

    def clip(self, limits: dict[str, float]) -> None:
        """ClipWeights by rescaling (the paper's), on the norms of the bank, which then serve the next evaluation."""
        assert self.bank is not None
        norms = self.bank.norms()
        weights, scales = [], []
        for path, limit in limits.items():
            weight = cast(Tensor, self.bank.layers[path].weight)
            # rounding the scaled weights to float32 moves their norm by at most 2^-24 sqrt(rank) of itself
            room = 1 - 2.0**-24 * (2 + math.sqrt(min(weight.shape[0], weight.numel() // weight.shape[0])))
            weights.append(weight)
            scales.append((limit * room / norms[path]).clamp(max=1.0))
            norms[path] = norms[path].clamp(max=limit)
        if weights and weights[0].device.type == "cpu":
            for weight, scale in zip(weights, scales, strict=True):
                if float(scale) != 1.0:
                    weight.mul_(float(scale))
        else:
            for weight, scale in zip(weights, scales, strict=True):
                weight.mul_(scale.to(weight.dtype))
        on_cpu = all(cast(Tensor, m.weight).device.type == "cpu" for m in self.bank.layers.values())
        # on a device the norms are taken again rather than waiting for it
        self._clipped = (self._fingerprint(self.bank), norms) if on_cpu else None

    def reset(self) -> None:
        """Weights were replaced from outside: evaluate afresh next time."""
        self._since = None

    def _snapshot(self, numerics: Numerics) -> None:
        self._numerics, self._gain, self._then = numerics, {}, {}
        for node in self.plan.graph.nodes:
            module = node.op.module
            if node.layer is None or module is None or not is_layer(module) or node.op.path in self._gain:
                continue
            self._then[node.op.path] = effective_weight(module).to(numerics.weights, copy=True)
            self._gain[node.op.path] = cast(Tensor, node.layer.gain(module, node.op, 2, numerics))


class WeightClipper:
    """ClipWeights over the trainable layers, prepared once and run after every step."""

    def __init__(self, model: nn.Module, bounds: Bounds, paths: list[str], gains: Gains) -> None:
        self.strategy, self.gains = bounds.clip, gains
        self.limits: dict[str, float] = {}
        self.work = []
        for path in paths:
            module, limit = model.get_submodule(path), bounds.of("weight_norm", path)
            if hasattr(module, "effective_weight"):  # clipping W would not bound W-hat, whose norm is certified anyway
                continue
            if limit is not None and is_layer(module) and cast(Tensor, module.weight).requires_grad:
                self.work.append((cast(Tensor, module.weight), float(limit), norm_function(module, bounds.p)))
                self.limits[path] = float(limit)

    @torch.no_grad()
    def __call__(self) -> None:
        if self.gains.bank is not None and isinstance(self.strategy, Rescale):
            self.gains.clip(self.limits)
            return
        for weight, limit, norm in self.work:
            self.strategy(weight, limit, norm)


def _plain_layers(plan: Plan) -> dict[str, nn.Module]:
    """Linear and Conv layers that compute with their weight itself."""
    found = {}
    for node in plan.graph.nodes:
        module = node.op.module
        if (
            node.layer is not None
            and module is not None
            and is_layer(module)
            and not hasattr(module, "effective_weight")
        ):
            found[node.op.path] = module
    return found


def numerics_for(device: torch.device, autocast: torch.dtype | None) -> Numerics:
    """How passes round on this device: autocast's type, TF32 where torch may use it, float32 otherwise."""
    if autocast in (torch.bfloat16, torch.float16):
        return Numerics(autocast, {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}[autocast])
    if device.type == "cuda" and (torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32):
        return Numerics(torch.float32, 2.0**-10)
    return Numerics()


__all__ = ["Gains", "WeightClipper", "layer_norm_tensor", "numerics_for"]
