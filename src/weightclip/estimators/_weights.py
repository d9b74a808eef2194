"""Sample weights as a bounded part of every record: the chance to take part in a step, never more than one."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weightclip import losses
from weightclip._fast_mlp import Objective
from weightclip._streams import Streams
from weightclip._tabular._fit import Plan
from weightclip.errors import WeightclipError

NOTE = (
    "sample weights count as part of each record, cut to [0, 1]; feature statistics (ranges, quantiles, categories, "
    "means) are those of the unweighted records"
)


class Weighted(Objective):
    """An objective whose records take part in a step with a chance of their own.

    A drawn record is kept with probability w, so that it contributes w times as often and its gradient is never
    larger than without weights. Scaling gradients instead would do next to nothing: most are cut to the same norm.

    Formal guarantees:
        A record takes part in a step with probability q·w <= q, independently of all others, and contributes what
        `inner` bounds: the step is a Poisson-sampled Gaussian mechanism whose rate for this record is at most q, and
        the sampled mechanism's privacy loss grows with the rate. A weight that is no number keeps the record out.

    Args:
        inner: The objective.
        y: Labels, as `inner.labels` takes them.
        weights: One for each record; beyond [0, 1] they are cut.
        streams: Randomness of the run.
    """

    def __init__(self, inner: Objective, y: Any, weights: np.ndarray, streams: Streams) -> None:
        self.inner, self.outputs, self.streams, self.step = inner, inner.outputs, streams, 0
        self.truth = inner.labels(y)
        self.weights = torch.from_numpy(np.clip(np.asarray(weights, dtype=np.float64), 0.0, 1.0))

    def labels(self, y: Any) -> Tensor:
        """Numbers of the records: labels and weights are looked up when they are drawn."""
        return torch.arange(len(self.truth))

    def gradient(self, z: Tensor, y: Tensor, temperature: Tensor, cap: Tensor) -> Tensor:
        chance = torch.from_numpy(self.streams.numpy("estimators/weights", self.step).random(tuple(y.shape)))
        self.step += 1
        kept = (chance < self.weights[y]).to(z.device)
        return self.inner.gradient(z, self.truth[y], temperature, cap) * kept.unsqueeze(-1)

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return self.inner.slope(z, self.truth[y])

    def natural_bound(self) -> float:
        return self.inner.natural_bound()

    def loss(self, temperature: float, cap: float | None) -> losses.Loss:
        return self.inner.loss(temperature, cap)


def weigh(plan: Plan, sample_weight: Any, rows: int) -> Plan:
    """The plan of a weighted fit; as it is without weights.

    Raises:
        WeightclipError: The weights are not one number for each record. Their values never stop a fit: it would tell.
    """
    if sample_weight is None:
        return plan
    weights = np.asarray(sample_weight)
    if weights.dtype.kind not in "iufb":
        weights = np.array([_number(v) for v in weights.ravel()]).reshape(weights.shape)
    if weights.shape != (rows,):
        raise WeightclipError(
            f"sample_weight.shape == {weights.shape}, expected ({rows},): one number from 0 to 1 for each record."
        )
    return replace(
        plan, not_covered=(*plan.not_covered, NOTE),
        objective=lambda inner, y: Weighted(inner, y, weights, plan.streams),
    )  # fmt: skip


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan  # keeps its own record out, and no other
