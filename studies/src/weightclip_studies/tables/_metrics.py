"""What a classifier is judged by: accuracy, area under the curve, log-loss, calibration; and the signed-rank test."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def metrics(probabilities: Array, y: NDArray[np.int64]) -> dict[str, float]:
    """Accuracy, AUC (one against the rest, macro average, for several classes), log-loss and ECE.

    Args:
        probabilities: records x classes.
        y: Class codes.
    """
    p = np.clip(np.nan_to_num(np.asarray(probabilities, dtype=np.float64), nan=0.0), 1e-12, 1.0)
    p = p / p.sum(axis=1, keepdims=True)
    classes = p.shape[1]
    if classes == 2:
        auc = area_under_curve(p[:, 1], y == 1)
    else:  # a class that the part does not hold has no curve
        present = [c for c in range(classes) if 0 < (y == c).sum() < len(y)]
        auc = np.mean([area_under_curve(p[:, c], y == c) for c in present])
    return {
        "accuracy": float((p.argmax(axis=1) == y).mean()),
        "auc": float(auc),
        "log_loss": float(-np.log(p[np.arange(len(y)), y]).mean()),
        "ece": expected_calibration_error(p, y),
    }


def area_under_curve(score: Array, positive: NDArray[np.bool_]) -> float:
    """Chance that a positive record scores above a negative one, ties counting half (Mann and Whitney)."""
    from scipy.stats import rankdata

    ones = int(positive.sum())
    if not 0 < ones < len(positive):
        return 0.5
    ranks = rankdata(score)[positive].sum()
    return float((ranks - ones * (ones + 1) / 2) / (ones * (len(positive) - ones)))


def expected_calibration_error(probabilities: Array, y: NDArray[np.int64], bins: int = 15) -> float:
    """Mean over records of |confidence - accuracy| within equal-width bins of the confidence."""
    confidence, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == y
    place = np.minimum((confidence * bins).astype(int), bins - 1)
    gap = np.bincount(place, confidence - right, minlength=bins)
    return float(np.abs(gap).sum() / len(y))


def wilcoxon_p(ours: Array, theirs: Array) -> float:
    """Two-sided p-value of the Wilcoxon signed-rank test on pairs; 1 where all pairs are equal."""
    from scipy.stats import wilcoxon

    difference = np.asarray(ours, dtype=float) - np.asarray(theirs, dtype=float)
    difference = np.round(difference, 12)  # equal counts of right answers are ties, whatever the division says
    if not difference.any():
        return 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SciPy says when ties make it use the normal approximation
        return float(wilcoxon(difference, zero_method="wilcox")[1])  # pyright: ignore[reportArgumentType, reportIndexIssue]


def holm(values: Sequence[float]) -> list[float]:
    """p-values of several tests, each corrected so that all of them together err with at most the level (Holm 1979)."""
    corrected, largest = [1.0] * len(values), 0.0
    for rank, place in enumerate(sorted(range(len(values)), key=lambda i: values[i])):
        largest = max(largest, min(1.0, (len(values) - rank) * values[place]))
        corrected[place] = largest
    return corrected
