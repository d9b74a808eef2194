"""Multi-class losses without a softmax: the margin loss and the cosine loss with a floor."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from weightclip.errors import ContractError, WeightclipError
from weightclip.losses._base import Loss, Shape, Weights, _check_positive, _freeze_weights, _match_target, _rows


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
        if isinstance(self.class_weights, tuple) and len(self.class_weights) != shape[0]:
            raise ContractError(
                f"MultiMargin: {len(self.class_weights)} class weights for {shape[0]} classes; give one per class"
            )

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
