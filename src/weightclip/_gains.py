"""Certified gains over training: recomputed every r steps, enlarged by the Frobenius drift in between."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from weightclip.bounds import Numerics, kernel_overlap, layer_norm_tensor
from weightclip.bounds._layer_norms import is_layer, norm_function
from weightclip.certificate import Plan
from weightclip.config import Bounds


class Gains:
    """l2 gains of the model's Linear and Conv layers between full evaluations.

    Formal guarantees:
        ``current`` returns, for every such layer, an upper bound of its gain at the present weights: a certified norm at
        some earlier step s plus sqrt(m) ||theta_t - theta_s||_F (m the kernel overlap, 1 for dense layers).
    """

    def __init__(self, plan: Plan, refresh: int) -> None:
        self.plan, self.refresh = plan, refresh
        self._age = 0
        self._numerics: Numerics | None = None
        self._gain: dict[str, Tensor] = {}
        self._then: dict[str, Tensor] = {}

    def current(self, numerics: Numerics) -> dict[str, Tensor]:
        """Bounds to use now; empty when every gain is to be evaluated afresh."""
        if self.refresh == 1:
            return {}
        if self._age % self.refresh == 0 or numerics != self._numerics:
            self._snapshot(numerics)
        self._age += 1
        known = {}
        for path, then in self._then.items():
            module = self.plan.model.get_submodule(path)
            now = cast(Tensor, module.weight).detach().to(numerics.weights)
            m = kernel_overlap(module) if isinstance(module, _ConvNd) else 1
            drift = torch.linalg.vector_norm((now - then).to(torch.float32), dtype=torch.float64)
            known[path] = self._gain[path] + math.sqrt(m) * drift * (1 + 1e-6)
        return known

    def reset(self) -> None:
        """Weights were replaced from outside: evaluate afresh next time."""
        self._age = 0

    def _snapshot(self, numerics: Numerics) -> None:
        self._numerics, self._age, self._gain, self._then = numerics, 0, {}, {}
        for node in self.plan.graph.nodes:
            module = node.op.module
            if node.layer is None or module is None or not is_layer(module) or node.op.path in self._gain:
                continue
            self._then[node.op.path] = cast(Tensor, module.weight).detach().to(numerics.weights, copy=True)
            self._gain[node.op.path] = cast(Tensor, node.layer.gain(module, node.op, 2, numerics))


class WeightClipper:
    """ClipWeights over the trainable layers, prepared once and run after every step."""

    def __init__(self, model: nn.Module, bounds: Bounds, paths: list[str]) -> None:
        self.strategy = bounds.clip
        self.work = []
        for path in paths:
            module, limit = model.get_submodule(path), bounds.of("weight_norm", path)
            if limit is not None and is_layer(module) and cast(Tensor, module.weight).requires_grad:
                self.work.append((cast(Tensor, module.weight), float(limit), norm_function(module, bounds.p)))

    @torch.no_grad()
    def __call__(self) -> None:
        for weight, limit, norm in self.work:
            self.strategy(weight, limit, norm)


def numerics_for(device: torch.device, autocast: torch.dtype | None) -> Numerics:
    """How passes round on this device: autocast's type, TF32 where torch may use it, float32 otherwise."""
    if autocast in (torch.bfloat16, torch.float16):
        return Numerics(autocast, {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}[autocast])
    if device.type == "cuda" and (torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32):
        return Numerics(torch.float32, 2.0**-10)
    return Numerics()


__all__ = ["Gains", "WeightClipper", "layer_norm_tensor", "numerics_for"]
