"""Probabilities that mean what they say, learnt on public records."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.optimize import minimize_scalar
from sklearn.utils.validation import check_is_fitted

from weightclip.errors import WeightclipError


def calibrate(estimator: Any, X: Any, y: Any) -> Any:
    """A copy of a fitted classifier whose outputs are divided by the temperature that suits PUBLIC records best.

    Noise and caps leave probabilities too bold or too timid; one number on top puts that right and changes no
    predicted class. scikit-learn's `CalibratedClassifierCV` fits several private models instead, and each costs its
    own epsilon.

    Args:
        estimator: A fitted `LipDPClassifier`.
        X: Public records. The temperature of private ones is a release that nobody has paid for.
        y: Their labels.

    Formal guarantees:
        A function of the released model and of X and y: costs no privacy of the records that were fitted, and gives
        X and y none.
    """
    check_is_fitted(estimator)
    if getattr(estimator, "classes_", None) is None:
        raise WeightclipError("calibrate needs a classifier.")
    places = {label: i for i, label in enumerate(estimator.classes_.tolist())}
    codes = np.array([places.get(label, -1) for label in np.asarray(y).tolist()])
    logits = estimator.model_.logits(estimator.raw(X))
    if len(codes) != len(logits) or not (codes >= 0).any():
        raise WeightclipError("calibrate needs one label of a known class for each public record.")
    logits, codes = logits[codes >= 0], codes[codes >= 0]
    if logits.shape[1] == 1:
        logits = np.concatenate([-logits / 2, logits / 2], axis=1)

    def loss(log_temperature: float) -> float:
        z = logits / np.exp(log_temperature)
        z = z - z.max(axis=1, keepdims=True)
        return float(np.mean(np.log(np.exp(z).sum(axis=1)) - z[np.arange(len(codes)), codes]))

    found = minimize_scalar(loss, bounds=(-5.0, 5.0), method="bounded")
    temperature = np.float32(np.exp(found.x))  # type: ignore[union-attr]
    *hidden, (w, b) = estimator.model_.weights
    result = copy.copy(estimator)
    result.model_ = replace(estimator.model_, weights=(*hidden, (w / temperature, b / temperature)))
    return result
