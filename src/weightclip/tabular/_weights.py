"""Sample weights as a bounded part of every record: the chance to take part in a step, never more than one."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from weightclip.errors import WeightclipError
from weightclip.tabular._plan import FitPlan

NOTE = (
    "sample weights count as part of each record, cut to [0, 1]; feature statistics (ranges, quantiles, categories, "
    "means) are those of the unweighted records"
)


def weigh(plan: FitPlan, sample_weight: Any, rows: int) -> FitPlan:
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
    return replace(plan, not_covered=(*plan.not_covered, NOTE), weights=np.asarray(weights, dtype=np.float64))


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan  # keeps its own record out, and no other
