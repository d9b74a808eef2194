"""Losses without a softmax over classes: averages over a record's outputs, the margin loss, the cosine loss."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from weightclip.errors import ContractError, WeightclipError
from weightclip.losses._base import (
    Loss,
    Shape,
    Weights,
    _check_positive,
    _check_weights,
    _freeze_weights,
    _match_target,
    _rows,
    _slack,
)


class _Average(Loss):
    """A loss averaged over the n outputs of a record, each with a bounded slope: l2 ≤ slope/√n (SOUNDNESS 3)."""

    @abstractmethod
    def _point(self, z: Tensor, y: Tensor) -> Tensor:
        """Loss of each output."""

    @abstractmethod
    def _slope(self, z: Tensor, y: Tensor) -> Tensor:
        """Its derivative in z."""

    @abstractmethod
    def _steepest(self, shape: Shape) -> Tensor | float:
        """Upper bound of |slope|, one number or something that broadcasts over the outputs."""

    def _labels(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Targets like z, and the validity of each record."""
        y = _match_target(type(self).__name__, z, y)
        finite = torch.isfinite(y)
        return torch.where(finite, y, 0), _rows(finite).all(1)

    def _values(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        y, ok = self._labels(z, y)
        return _rows(self._point(z, y)).mean(1), ok

    def _gradient(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        y, ok = self._labels(z, y)
        return self._slope(z, y) / math.prod(z.shape[1:]), ok

    def _bound(self, shape: Shape, p: float) -> float:
        n = math.prod(shape)
        slope = torch.as_tensor(self._steepest(shape), dtype=torch.float64)
        mean = {2: (slope**2).mean().sqrt() / math.sqrt(n), math.inf: slope.mean(), 1: slope.max() / n}
        return float(mean[p])  # each entry of a broadcast slope stands for equally many outputs


@dataclass(frozen=True)
class BCEWithLogits(_Average):
    """Binary cross-entropy of one or more logits, targets in [0, 1] (anything else: the record contributes zero).

    Attributes:
        pos_weight: weight of the positive term, a number or one per output.
        weight: weight of each output, a number or one per output (never per record).
        temperature: τ, the loss is BCE(z/τ).
        scale_by_temperature: use τ·BCE(z/τ) instead, whose bound does not depend on τ.
        cap: B, an l2 bound on each record's gradient. For a single logit the capped gradient is that of a Huberised
            logistic loss and `values` is that loss; for several it is per-record clipping of a small vector.

    Formal guarantees:
        As `Loss`: one logit w·max(1, pos_weight), times 1/τ unless scaled by it; n averaged outputs: l2 1/√n, l1 1,
        l∞ 1/n of that.
    """

    pos_weight: Weights = None
    weight: Weights = None
    cap: float | None = None
    temperature: float = 1.0
    scale_by_temperature: bool = False

    def __post_init__(self) -> None:
        _check_positive("BCEWithLogits", temperature=self.temperature, cap=1.0 if self.cap is None else self.cap)
        for name in ("pos_weight", "weight"):
            object.__setattr__(self, name, _freeze_weights("BCEWithLogits", name, getattr(self, name)))

    def _values(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        y, ok = self._labels(z, y)
        if self.cap is None or math.prod(z.shape[1:]) > 1:
            return _rows(self._point(z, y)).mean(1), ok
        # Linear with slope ±B outside the logits where the slope w·(σ·(1−y+πy) − πy) passes ±B (SOUNDNESS 5).
        pi, w = self._weights(z)
        w, tau = w * self._steepness(), self.temperature
        span = (1 - y + pi * y).clamp(min=torch.finfo(z.dtype).tiny)
        near = [tau * torch.logit(((pi * y + b / w) / span).clamp(0, 1)) for b in (-self.cap, self.cap)]
        core = torch.maximum(torch.minimum(z, near[1]), near[0])
        return _rows(self._point(core, y) + self.cap * (z - core).abs()).mean(1), ok

    def both(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """In few passes in the usual case: one logit, no weights, no cap, every label and output in order."""
        plain = self.pos_weight is None and self.weight is None and self.cap is None and z.is_cpu
        if not plain or z.dtype != torch.float32 or math.prod(z.shape[1:]) != 1 or z.shape[0] == 0:
            return super().both(z, y)
        label = _match_target("BCEWithLogits", z, y)
        low, high = (float(bound) for bound in torch.aminmax(label))
        least, most = (float(bound) for bound in torch.aminmax(z))  # NaN if one is
        far = 1e30 * min(1.0, self.temperature)
        if not (low >= 0 and high <= 1 and least > -far and most < far):
            return super().both(z, y)
        # what follows is the general way, operation by operation, without masks: a record's numbers are the same
        gradient = self._slope(z, label) * (1 - _slack(z.dtype, z.dtype))
        return _rows(self._point(z, label)).mean(1), gradient

    def _steepness(self) -> float:
        """What the temperature makes of a slope."""
        return 1.0 if self.scale_by_temperature else 1 / self.temperature

    def _point(self, z: Tensor, y: Tensor) -> Tensor:
        v = z if self.temperature == 1 else z / self.temperature
        if self.pos_weight is None and self.weight is None:
            point = (1 - y) * v - F.logsigmoid(v)
        else:
            pi, w = self._weights(z)
            point = w * ((1 - y) * v - (1 - y + pi * y) * F.logsigmoid(v))
        return point * self.temperature if self.scale_by_temperature and self.temperature != 1 else point

    def _slope(self, z: Tensor, y: Tensor) -> Tensor:
        v = z if self.temperature == 1 else z / self.temperature
        if self.pos_weight is None and self.weight is None:
            slope = torch.sigmoid(v) - y
        else:
            pi, w = self._weights(z)
            slope = w * ((1 - y) * torch.sigmoid(v) - pi * y * torch.sigmoid(-v))
        return slope if self._steepness() == 1 else slope * self._steepness()

    def _labels(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        y = _match_target("BCEWithLogits", z, y)
        good = (y >= 0) & (y <= 1)
        return torch.where(good, y, 0), _rows(good).all(1)

    def _weights(self, z: Tensor) -> tuple[Tensor, Tensor]:
        shape = tuple(z.shape[1:])
        pi, w = _per_output("pos_weight", self.pos_weight, shape), _per_output("weight", self.weight, shape)
        return pi.to(z), w.to(z)

    def _steepest(self, shape: Shape) -> Tensor | float:
        pi = _per_output("pos_weight", self.pos_weight, shape)
        return _per_output("weight", self.weight, shape) * pi.clamp(min=1) * self._steepness()


def _per_output(name: str, weights: Weights, shape: Shape) -> Tensor:
    """Weights that broadcast over one record's outputs; a shape that would reach the record dimension is refused."""
    w = torch.tensor(1.0 if weights is None else weights, dtype=torch.float64)
    while w.dim() > len(shape) and w.shape[0] == 1:
        w = w.squeeze(0)
    if w.dim() > len(shape) or any(a not in (1, b) for a, b in zip(reversed(w.shape), reversed(shape), strict=False)):
        raise ContractError(
            f"BCEWithLogits: {name} of shape {tuple(w.shape)} does not fit one record's outputs {shape}; "
            "give a number or one per output"
        )
    return w


@dataclass(frozen=True)
class Huber(_Average):
    """Huber loss: quadratic within `delta`, slope `delta` beyond; bound delta/√n in l2."""

    delta: float = 1.0

    def __post_init__(self) -> None:
        _check_positive("Huber", delta=self.delta)

    def _point(self, z: Tensor, y: Tensor) -> Tensor:
        return F.huber_loss(z, y, reduction="none", delta=self.delta)

    def _slope(self, z: Tensor, y: Tensor) -> Tensor:
        return (z - y).clamp(-self.delta, self.delta)

    def _steepest(self, shape: Shape) -> Tensor | float:
        return self.delta


@dataclass(frozen=True)
class SmoothL1(_Average):
    """Huber loss divided by its width: slope at most 1; bound 1/√n in l2."""

    beta: float = 1.0

    def __post_init__(self) -> None:
        _check_positive("SmoothL1", beta=self.beta)

    def _point(self, z: Tensor, y: Tensor) -> Tensor:
        return F.smooth_l1_loss(z, y, reduction="none", beta=self.beta)

    def _slope(self, z: Tensor, y: Tensor) -> Tensor:
        return ((z - y) / self.beta).clamp(-1, 1)

    def _steepest(self, shape: Shape) -> Tensor | float:
        return 1.0


@dataclass(frozen=True)
class L1(_Average):
    """Absolute error: bound 1/√n in l2."""

    def _point(self, z: Tensor, y: Tensor) -> Tensor:
        return (z - y).abs()

    def _slope(self, z: Tensor, y: Tensor) -> Tensor:
        return torch.sign(z - y)

    def _steepest(self, shape: Shape) -> Tensor | float:
        return 1.0


@dataclass(frozen=True)
class MSE(_Average):
    """Squared error with both sides bounded: targets are clamped, beyond the output bound the loss goes on linearly.

    The slope 2(clamp(z) − clamp(y)) is that of a convex, once differentiable loss, so nothing is biased within the
    bounds; put the target's public range in `target_bound`.

    Attributes:
        output_bound: Z, each output is taken as at most Z in absolute value.
        target_bound: Y, each target is clamped to [−Y, Y].

    Formal guarantees:
        As `Loss`: 2(Z + Y) per output; n averaged outputs: l2 1/√n, l1 1, l∞ 1/n of that.
    """

    output_bound: float
    target_bound: float

    def __post_init__(self) -> None:
        _check_positive("MSE", output_bound=self.output_bound, target_bound=self.target_bound)

    def _point(self, z: Tensor, y: Tensor) -> Tensor:
        r = self._slope(z, y) / 2
        return r**2 + 2 * r * (z - z.clamp(-self.output_bound, self.output_bound))

    def _slope(self, z: Tensor, y: Tensor) -> Tensor:
        Z, Y = self.output_bound, self.target_bound
        return 2 * (z.clamp(-Z, Z) - y.clamp(-Y, Y))

    def _steepest(self, shape: Shape) -> Tensor | float:
        return 2 * (self.output_bound + self.target_bound)


@dataclass(frozen=True)
class MultiMargin(Loss):
    """Mean over classes of max(0, margin − z_y + z_c), c ≠ y (the hinge of several classes, power 1 only).

    Formal guarantees:
        As `Loss`: l2 ≤ √((C−1)/C), l1 ≤ 2(C−1)/C, l∞ ≤ (C−1)/C, each times the largest class weight.
    """

    margin: float = 1.0
    class_weights: Weights = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.margin):
            raise WeightclipError(f"MultiMargin: margin = {self.margin} must be finite")
        object.__setattr__(self, "class_weights", _freeze_weights("MultiMargin", "class_weights", self.class_weights))

    def _excess(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """max(0, margin − z_y + z_c) for c ≠ y, the label's one-hot row, its weight over C, and validity."""
        self._check_shape(tuple(z.shape[1:]))
        if y.shape != z.shape[:1] or y.is_floating_point():
            raise ContractError(
                f"MultiMargin: labels must be class indices of shape {tuple(z.shape[:1])}, "
                f"got {y.dtype} of shape {tuple(y.shape)}"
            )
        y, classes = y.long(), z.shape[1]
        safe = y.clamp(0, classes - 1)
        hot = safe.unsqueeze(1) == torch.arange(classes, device=z.device)
        excess = (self.margin + z - z.gather(1, safe.unsqueeze(1))).clamp(min=0)
        w = torch.ones((), dtype=z.dtype, device=z.device)
        if self.class_weights is not None:
            w = torch.tensor(self.class_weights, dtype=z.dtype, device=z.device)[safe].unsqueeze(1)
        return torch.where(hot, 0, excess), hot, w / classes, y == safe

    def _values(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        excess, _, w, ok = self._excess(z, y)
        return (excess * w).sum(1), ok

    def _gradient(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        excess, hot, w, ok = self._excess(z, y)
        up = (excess > 0).to(z.dtype)
        return torch.where(hot, -up.sum(1, keepdim=True), up) * w, ok

    def _check_shape(self, shape: Shape) -> None:
        if len(shape) != 1 or shape[0] < 2:
            raise ContractError(f"MultiMargin: output shape {shape} must be (classes,) with at least two classes")
        _check_weights("MultiMargin", self.class_weights, shape)

    def _bound(self, shape: Shape, p: float) -> float:
        self._check_shape(shape)
        share = (shape[0] - 1) / shape[0]
        w = max(self.class_weights) if isinstance(self.class_weights, tuple) else 1.0
        return w * {2: math.sqrt(share), math.inf: 2 * share, 1: share}[p]


@dataclass(frozen=True)
class Cosine(Loss):
    """1 − <z, t>/max(α, ||z||₂): one minus cosine similarity, with a floor on the norm of the outputs.

    t is the direction of the label: a class index stands for its unit vector, a floating target in the outputs' shape
    is divided by its norm. Without the floor α the gradient is unbounded near z = 0.

    Formal guarantees:
        As `Loss`: l2 ≤ 1/α, l1 ≤ √n/α, l∞ ≤ 1/α, n outputs.
    """

    floor: float

    def __post_init__(self) -> None:
        _check_positive("Cosine", floor=self.floor)

    def _direction(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        self._check_shape(tuple(z.shape[1:]))
        if y.is_floating_point():
            t = _match_target("Cosine", z, y)
            norm = torch.linalg.vector_norm(t, dim=1, keepdim=True)
            ok = _rows(torch.isfinite(norm)).all(1)
            return torch.where(ok.unsqueeze(1), t / norm.clamp(min=torch.finfo(z.dtype).tiny), 0), ok
        if y.shape != z.shape[:1]:
            raise ContractError(
                f"Cosine: labels must be class indices of shape {tuple(z.shape[:1])} "
                f"or targets of shape {tuple(z.shape)}, got {tuple(y.shape)}"
            )
        hot = y.long().unsqueeze(1) == torch.arange(z.shape[1], device=z.device)
        return hot.to(z.dtype), hot.any(1)

    def _values(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        t, ok = self._direction(z, y)
        # The norm is clamped before the root: its derivative at z = 0 is 0 · inf otherwise.
        norm = (z**2).sum(1).clamp(min=self.floor**2).sqrt()
        return 1 - (z * t).sum(1) / norm, ok

    def _gradient(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        t, ok = self._direction(z, y)
        norm = torch.linalg.vector_norm(z, dim=1, keepdim=True).clamp(min=self.floor)
        u = z / norm
        radial = torch.where(norm > self.floor, (u * t).sum(1, keepdim=True), 0)
        return (radial * u - t) / norm, ok

    def _check_shape(self, shape: Shape) -> None:
        if len(shape) != 1:
            raise ContractError(f"Cosine: output shape {shape} must be (outputs,)")

    def _bound(self, shape: Shape, p: float) -> float:
        self._check_shape(shape)
        return (math.sqrt(shape[0]) if p == math.inf else 1.0) / self.floor
