"""LipDPClassifier and LipDPRegressor."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets

from weightclip.errors import WeightclipError
from weightclip.tabular._base import LipDP, all_or_nothing
from weightclip.tabular._fit import fit_classifier, fit_regressor
from weightclip.tabular._inputs import class_list, labels, one_target, places_of, threads, warn_of_repetition, weigh
from weightclip.tabular._plan import PublicScaling
from weightclip.tabular._table import to_numbers


@dataclass(eq=False, repr=False, kw_only=True)
class LipDPClassifier(ClassifierMixin, LipDP):
    """Differentially private classifier for tables: binary or multi-class, numbers and categories, missing values.

    ``fit`` spends exactly one budget (ε, δ): on the statistics its features need, and on training a dense network
    with bounded per-record gradients. Every mechanism is listed in ``privacy_report_``.

    Args:
        epsilon: Budget, preprocessing included.
        delta: Its δ; None: 1/n² rounded down to one digit.
        feature_bounds: Public ranges of numeric columns: (low, high), each a number or one per column, or
            {name: (low, high)}. Columns without one have their range estimated within the budget.
        categories: {column: list of values}, public. Other categorical columns have their frequent values found within
            the budget.
        schema: `Schema`, its JSON, or the path of a file: what is publicly known of the columns.
        preprocessing: `PrivateScaling()` (default), `PublicScaling()` or `NonPrivateScaling()`.
        hidden_layer_sizes: Widths of hidden layers, () for a linear model; None: by n and ε.
        epochs: Passes over the data. This and the following: None takes a default made from public numbers.
        batch_fraction: Sampling rate q.
        learning_rate: Of Adam, falling to a tenth.
        gradient_cap: B, bound of a record's gradient at the outputs.
        joint_cap: Bound of a record's whole gradient.
        temperature: τ.
        bias_scale: β.
        weight_norm: C of ClipWeights, if weights are to be clipped.
        accountant: "pld" or "rdp".
        random_state: None draws all noise from the operating system. A seed makes fits repeatable, and protects only
            while it is secret.
        n_records: Public number of records, from which q, the steps and the default δ follow; None declares the true
            number public.
        ledger: File in which every release is counted, durably, before it happens. Fits on one ledger share `epsilon`:
            it is the total of all of them, and a fit for which nothing is left is refused.
        verbose: Whether to show progress.
        n_jobs: Threads to compute with; None leaves torch's.
        classes: Public list of class labels; None takes those found in y, which counts them as public.

    Attributes:
        classes_: Class labels.
        epsilon_: ε of this fit (with a ledger: of all that is in it), recomputed from what was released.
        privacy_report_: JSON-ready statement.
        n_features_in_: Number of columns.

    Example:
        >>> import numpy as np
        >>> X = np.random.default_rng(0).uniform(-1, 1, size=(4000, 3))
        >>> model = LipDPClassifier(epsilon=1.0, feature_bounds=(-1, 1), random_state=0).fit(X, X[:, 0] + X[:, 1] > 0)
        >>> bool(model.score(X, X[:, 0] + X[:, 1] > 0) > 0.9), 0.98 < model.epsilon_ <= 1.0
        (True, True)
    """

    classes: Sequence[Any] | None = None

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.classifier_tags.poor_score = True  # a hundred records and epsilon = 1 teach little: that is the point
        return tags

    @all_or_nothing
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> LipDPClassifier:
        """Fit on private records.

        Args:
            X: Records: a data frame, an array, a sparse matrix (which is written out) or lists.
            y: Labels.
            sample_weight: One number from 0 to 1 for each record, its chance to take part in a step it was drawn for;
                cut beyond. A weight is a private part of its record.

        Formal guarantees:
            Everything the fitted estimator holds is (``epsilon_``, ``delta_``)-DP under adding or removing one record,
            given the number of records, the columns' names and types, the classes and the parameters. Labels outside
            `classes` contribute nothing.
        """
        if y is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None.")
        one_target(y)
        warn_of_repetition(self.epsilon)
        declared = self.classes if self.classes is not None else self._schema().classes
        y = labels(y, declared is not None)
        uncovered = [] if declared is not None else ["the list of classes was taken from y"]
        table, plan = self._table(X, len(y), uncovered)
        if declared is None:
            check_classification_targets(y)
            self.classes_ = np.unique(y)
        else:
            self.classes_ = class_list(declared)
        if len(self.classes_) < 2:
            raise ValueError(
                f"Classifier can't train when only one class is present: y holds {len(self.classes_)} class."
            )
        if len(set(self.classes_.tolist())) != len(self.classes_):
            raise WeightclipError("classes lists a label twice.")
        if len(self.classes_) > 100:
            warnings.warn(
                f"{len(self.classes_)} classes share one budget: expect little accuracy at small epsilon.", stacklevel=2
            )
        codes = places_of(y, self.classes_)
        if len(self.classes_) == 2:
            codes = np.where(codes < 0, 2, codes)  # outside [0, 1]: contributes nothing
        with threads(self.n_jobs):
            plan = weigh(plan, sample_weight, len(table))
            model, report, _ = fit_classifier(table, codes, tuple(self.classes_.tolist()), "", plan)
        self._finish(model, report)
        return self

    def decision_function(self, X: Any) -> np.ndarray:
        """Outputs of the network: one per record for two classes, else one per class."""
        values = self.raw(X)
        z = self.model_.logits(values)
        return z[:, 0] if z.shape[1] == 1 else z

    def predict_proba(self, X: Any) -> np.ndarray:
        """Class probabilities.  # records x classes"""
        values = self.raw(X)
        return self.model_.probabilities(values)

    def predict(self, X: Any) -> np.ndarray:
        """Most probable class of each record."""
        places = self.predict_proba(X).argmax(axis=1)
        return self.classes_[places]


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

    @all_or_nothing
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
            model, report, _ = fit_regressor(table, target, span, "", plan)
        self._finish(model, report)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Predicted numbers, within the target's range."""
        values = self.raw(X)
        return self.model_.regress(values)
