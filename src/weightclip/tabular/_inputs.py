"""Small helpers of the estimators: labels, bounds by name, threads, warnings."""

from __future__ import annotations

import contextlib
import sys
import warnings
import weakref
from collections.abc import Iterator, Mapping
from numbers import Number
from typing import Any

import numpy as np
import torch
from sklearn.utils import assert_all_finite
from sklearn.utils.validation import column_or_1d

from weightclip.errors import WeightclipError
from weightclip.tabular._columns import canonical


class PrivacyCostWarning(UserWarning):
    """Something the caller does costs more privacy than one fit."""


class Progress:
    def __init__(self) -> None:
        self.shown = -1

    def __call__(self, done: int, total: int) -> None:
        if 10 * done // total > self.shown:
            self.shown = 10 * done // total
            print(f"[weightclip] step {done} of {total}", file=sys.stderr)


def labels(y: Any, declared: bool) -> np.ndarray:
    """y as an array of one dimension; a list keeps every value as it is, so that one odd label changes no other.

    Args:
        y: Labels as the caller gave them.
        declared: Whether classes (or the target's range) are public: then no value of y stops the fit.

    Formal guarantees:
        With `declared`, entry i depends on y[i] and on the declared type of y alone.
    """
    if isinstance(y, (list, tuple)):
        single = (v[0] if isinstance(v, (list, tuple)) and len(v) == 1 else v for v in y)
        y = np.fromiter(single, dtype=object, count=len(y))
        y = y if declared else _natural(y)
    y = column_or_1d(y, warn=True)
    if y.dtype.kind == "f" and not declared:
        assert_all_finite(y, input_name="y")
    return y if declared or y.dtype.kind != "O" else _natural(y)


def _natural(values: np.ndarray) -> np.ndarray:
    """Objects of one type, or numbers, as an array of that type."""
    kinds = {Number if isinstance(v, Number) and not isinstance(v, bool) else type(v) for v in values}
    return np.array(values.tolist()) if len(kinds) == 1 else values


def places_of(y: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Place of each label in the list of classes, by type and text; -1 for a label that is not in it.

    Formal guarantees:
        Entry i depends on y[i] and on the list alone.
    """
    places = {canonical(label): i for i, label in enumerate(classes.tolist())}
    places.pop(None, None)
    if not {"true", "false"} & places.keys():  # True and False may stand for 1 and 0, and the other way round
        places |= {word: places[digit] for word, digit in (("true", "1"), ("false", "0")) if digit in places}
    elif not {"0", "1"} & places.keys():
        places |= {digit: places[word] for word, digit in (("true", "1"), ("false", "0")) if word in places}
    if y.dtype.kind == "O":
        return np.array([places.get(canonical(label), -1) for label in y.tolist()], dtype=np.int64)
    values, inverse = np.unique(y, return_inverse=True)  # each value of a type once: the same function of each label
    return np.array([places.get(canonical(label), -1) for label in values.tolist()], dtype=np.int64)[inverse.ravel()]


def bounds_by_name(bounds: Any, names: list[str]) -> dict[str, tuple[float, float]]:
    if bounds is None:
        return {}
    if isinstance(bounds, Mapping):
        unknown = [k for k in bounds if str(k) not in names]
        if unknown:
            raise WeightclipError(f"feature_bounds names {unknown[0]!r}, which is no column of X.")
        return {str(k): (float(low), float(high)) for k, (low, high) in bounds.items()}
    try:
        low, high = (np.broadcast_to(np.asarray(b, dtype=np.float64), (len(names),)) for b in bounds)
    except (TypeError, ValueError) as error:
        raise WeightclipError(
            f"feature_bounds must be (low, high), each a number or one per column ({len(names)}), or a dict by name."
        ) from error
    return {name: (float(a), float(b)) for name, a, b in zip(names, low, high, strict=True)}


_REPEATING = ("model_selection", "calibration", "ensemble", "multiclass", "multioutput", "semi_supervised",
              "feature_selection", "inspection")  # fmt: skip
_TOTALS: weakref.WeakKeyDictionary[Any, tuple[int, float]] = weakref.WeakKeyDictionary()  # fits and epsilon, by caller


def warn_of_repetition(epsilon: float) -> None:
    """Warns, with the total so far, when something of scikit-learn that fits several models makes the call.

    Every fit is a release of its own: calibration, bagging, voting, one model per class or target, self-training,
    cross-validation and searches see the same records again and again.
    """
    frame, caller, name = sys._getframe(2), None, ""
    while frame is not None:
        module = frame.f_globals.get("__name__", "").split(".")
        if module[0] == "sklearn" and len(module) > 1 and module[1] in _REPEATING:
            # the outermost of them, by the object it works for: a meta-estimator, or the estimator it was given
            owner = frame.f_locals.get("self", frame.f_locals.get("estimator"))
            caller = owner if owner is not None else caller
            name = type(owner).__name__ if "self" in frame.f_locals else frame.f_code.co_name
        frame = frame.f_back
    if not name:
        return
    fits, total = 1, float(epsilon)
    with contextlib.suppress(TypeError):  # no weak reference to it: nothing to add to
        before = _TOTALS.get(caller, (0, 0.0))
        fits, total = before[0] + 1, before[1] + total
        _TOTALS[caller] = (fits, total)
    warnings.warn(
        f"{name} fits several private models on overlapping records: this is fit {fits}, and their epsilons add up to "
        f"{total:g} so far (their deltas too). epsilon_ is that of one fit, and choosing by scores is not covered (see "
        "weightclip.accounting.search_cost).",
        PrivacyCostWarning, stacklevel=3,
    )  # fmt: skip


@contextlib.contextmanager
def threads(n_jobs: int | None) -> Iterator[None]:
    if n_jobs is None:
        yield
        return
    from joblib import effective_n_jobs

    before = torch.get_num_threads()
    torch.set_num_threads(max(1, effective_n_jobs(n_jobs)))
    try:
        yield
    finally:
        torch.set_num_threads(before)
