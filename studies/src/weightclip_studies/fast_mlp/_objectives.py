"""Losses of a stack of runs: the capped gradient at the raw outputs, with a cap and a temperature for each run."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from weightclip import losses
from weightclip.errors import WeightclipError

_SHRINK = 1 - 8 * torch.finfo(torch.float64).eps  # the bound is a statement about stored numbers


class Objective(ABC):
    """What a dense network is trained for.

    Formal guarantees:
        For every record, `gradient` depends on that record's outputs and label alone and its l2 norm is at most
        `bound(cap)`, whatever they are; a record with a non-finite output or an invalid label gets zeros.
    """

    outputs: int

    @abstractmethod
    def labels(self, y: object) -> Tensor:
        """Labels as a tensor with one entry per record, invalid ones marked so that they contribute nothing."""

    @abstractmethod
    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        """Gradient before the cap, at outputs already divided by the temperature; NaN for invalid labels.

        Args:
            z: Outputs.  # ... x records x outputs
            y: Labels.  # ... x records
        """

    @abstractmethod
    def natural_bound(self) -> float:
        """Bound of the l2 norm of `slope`."""

    @abstractmethod
    def loss(self, temperature: float, cap: float | None) -> losses.Loss:
        """The same loss as an object the engine takes."""

    def bound(self, cap: float | None) -> float:
        """Bound of one record's gradient at the raw outputs."""
        return self.natural_bound() if cap is None else min(cap, self.natural_bound())

    def gradient(self, z: Tensor, y: Tensor, temperature: Tensor, cap: Tensor) -> Tensor:
        """Per-record gradient of τ·loss(z/τ), rescaled to norm at most the cap (infinite: no cap).

        Args:
            z: Raw outputs.  # seeds x settings x records x outputs
            y: Labels.  # seeds x 1 x records
            temperature: τ of each run.  # settings
            cap: B of each run.  # settings
        """
        g = self.slope(z / temperature[:, None, None], y)
        norm = g.abs() if g.shape[-1] == 1 else torch.linalg.vector_norm(g, dim=-1, keepdim=True)
        g = g * (_SHRINK * (cap[:, None, None] / norm).clamp(max=1.0))
        # norm = 0 gives cap/0 = inf, clamped to 1; a non-finite record gives NaN or inf, and counts zero
        return torch.where(torch.isfinite(norm), g, torch.zeros((), dtype=g.dtype, device=g.device))


@dataclass(frozen=True)
class Logistic(Objective):
    """Two classes, one output: the logistic loss; with a cap, the Huberised logistic loss (SOUNDNESS section 5)."""

    outputs: int = 1

    def labels(self, y: object) -> Tensor:
        y = torch.as_tensor(y).to(torch.float64)
        return torch.where((y >= 0) & (y <= 1), y, math.nan)

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return torch.sigmoid(z) - y.unsqueeze(-1)

    def natural_bound(self) -> float:
        return 1.0

    def loss(self, temperature: float, cap: float | None) -> losses.Loss:
        if temperature != 1:
            raise WeightclipError("BCEWithLogits has no temperature: scale the last layer instead.")
        return losses.BCEWithLogits(cap=cap)


@dataclass(frozen=True)
class Softmax(Objective):
    """C classes, C outputs: cross-entropy."""

    outputs: int

    def labels(self, y: object) -> Tensor:
        y = torch.as_tensor(y).long()
        return torch.where((y >= 0) & (y < self.outputs), y, -1)

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        hot = y.unsqueeze(-1) == torch.arange(self.outputs, device=z.device)
        valid = torch.where(y.unsqueeze(-1) >= 0, 0.0, math.nan)
        return torch.softmax(z, -1) - hot.to(z.dtype) + valid

    def natural_bound(self) -> float:
        return math.sqrt(2.0)

    def loss(self, temperature: float, cap: float | None) -> losses.Loss:
        return losses.CrossEntropy(temperature=temperature, scale_by_temperature=True, cap=cap)


@dataclass(frozen=True)
class Huber(Objective):
    """Regression with one output: slope z − y up to the cap, which is Huber's δ; it needs one."""

    outputs: int = 1

    def labels(self, y: object) -> Tensor:
        return torch.as_tensor(y).to(torch.float64)

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return z - y.unsqueeze(-1)

    def natural_bound(self) -> float:
        return math.inf

    def loss(self, temperature: float, cap: float | None) -> losses.Loss:
        if temperature != 1 or cap is None:
            raise WeightclipError("Huber takes a cap (its delta) and no temperature.")
        return losses.Huber(delta=cap)


@dataclass(frozen=True)
class Absolute(Objective):
    """Regression with one output: absolute error, slope ±1."""

    outputs: int = 1

    def labels(self, y: object) -> Tensor:
        return torch.as_tensor(y).to(torch.float64)

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return torch.sign(z - y.unsqueeze(-1))

    def natural_bound(self) -> float:
        return 1.0

    def loss(self, temperature: float, cap: float | None) -> losses.Loss:
        if temperature != 1 or cap is not None:
            raise WeightclipError("L1 has no cap and no temperature.")
        return losses.L1()
