"""LipDPRegressor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.base import RegressorMixin

from weightclip.errors import WeightclipError
from weightclip.tabular._base import LipDP
from weightclip.tabular._fit import fit_regressor
from weightclip.tabular._inputs import labels, threads, warn_of_repetition
from weightclip.tabular._plan import PublicScaling
from weightclip.tabular._shapes import one_target
from weightclip.tabular._table import to_numbers
from weightclip.tabular._weights import weigh


@dataclass(eq=False, repr=False, kw_only=True)
class LipDPRegressor(RegressorMixin, LipDP):
    """Differentially private regressor for tables, with a robust loss.

    As `LipDPClassifier`, with these of its own:

    Args:
        loss: "huber" or "l1".
        target_bounds: Public range (low, high) of the target; None estimates one within the budget.

    Example:
        >>> import numpy as np
        >>> X = np.random.default_rng(0).uniform(-1, 1, size=(4000, 2))
        >>> model = LipDPRegressor(epsilon=1.0, feature_bounds=(-1, 1), target_bounds=(-2, 2), random_state=0)
        >>> bool(model.fit(X, X.sum(1)).score(X, X.sum(1)) > 0.8)
        True
    """

    loss: str = "huber"
    target_bounds: tuple[float, float] | None = None

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = True
        return tags

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> LipDPRegressor:
        """Fit on private records; arguments and guarantees as those of `LipDPClassifier.fit`."""
        if y is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None.")
        if self.loss not in ("huber", "l1"):
            raise WeightclipError(f"loss must be 'huber' or 'l1', got {self.loss!r}.")
        one_target(y)
        warn_of_repetition(self.epsilon)
        span = self.target_bounds or self._schema().target_range
        if span is not None:
            span = (float(span[0]), float(span[1]))
            if not (math.isfinite(span[0]) and math.isfinite(span[1]) and span[0] < span[1]):
                raise WeightclipError(f"target_bounds must be (low, high) with low < high, got {span}.")
        elif isinstance(self.preprocessing, PublicScaling):
            raise WeightclipError("PublicScaling needs target_bounds, the public range of the target.")
        y = labels(y, span is not None)
        target = y.astype(np.float64) if y.dtype.kind in "iufb" else to_numbers(y.tolist())
        table, plan = self._table(X, len(y), ())
        with threads(self.n_jobs):
            plan = weigh(plan, sample_weight, len(table))
            model, report, run = fit_regressor(table, target, span, "", plan)
        self._finish(model, report, run)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Predicted numbers, within the target's range."""
        values = self._values(X)
        return self.model_.regress(values)
