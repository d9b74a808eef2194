"""What callers hand to the estimators, checked and made plain: labels, bounds, settings, shapes, sample weights."""

from __future__ import annotations

import contextlib
import math
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from scipy.sparse import issparse
from sklearn.utils import assert_all_finite
from sklearn.utils.validation import column_or_1d

from weightclip.errors import WeightclipError
from weightclip.tabular._columns import canonical
from weightclip.tabular._plan import FitPlan
from weightclip.tabular._table import to_numbers


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

    Where classes (or the target's range) are `declared` in public, no value of y stops the fit.

    Formal guarantees:
        With `declared`, entry i depends on y[i] and on the declared type of y alone.
    """
    if isinstance(y, (list, tuple)):
        single = (v[0] if isinstance(v, (list, tuple)) and len(v) == 1 else v for v in y)
        y = np.fromiter(single, dtype=object, count=len(y))
        y = y if declared else _natural(y)
    elif declared:
        y = _boxed(y)
    y = column_or_1d(y, warn=True)
    if y.dtype.kind == "f" and not declared:
        assert_all_finite(y, input_name="y")
    return y if declared or y.dtype.kind != "O" else _natural(y)


def _boxed(y: Any) -> Any:
    """Columns that can hold nulls beside integers, value by value: made numbers, one null would round all others."""
    if isinstance(getattr(y, "dtype", None), np.dtype) or getattr(y, "ndim", 1) != 1:
        return y
    listed = next((getattr(y, name) for name in ("to_pylist", "to_list", "tolist") if hasattr(y, name)), None)
    if listed is None:
        return y
    values = listed()
    return np.fromiter(values, dtype=object, count=len(values))


def _natural(values: np.ndarray) -> np.ndarray:
    """Objects of one type, or real numbers, as an array of that type."""
    kinds = {Real if isinstance(v, Real) and not isinstance(v, bool) else type(v) for v in values}
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


def plain_settings(estimator: Any, names: Sequence[str]) -> dict[str, Any]:
    """What the user chose among `names` (None: not chosen), checked, and NumPy's numbers as Python's."""
    chosen = {name: value for name in names if (value := getattr(estimator, name)) is not None}
    for name, value in chosen.items():
        if name == "hidden_layer_sizes":
            chosen[name] = _widths(value)
        elif name == "joint_cap" and isinstance(value, (tuple, list, np.ndarray)):
            chosen[name] = tuple(_positive(name, item) for item in value)
        else:
            chosen[name] = _positive(name, value)
    return chosen


def _positive(name: str, value: Any) -> float:
    number = isinstance(value, Real) and not isinstance(value, (bool, np.bool_)) and 0 < float(value) < math.inf
    if name == "batch_fraction" and not (number and value <= 1):
        raise WeightclipError(f"batch_fraction must be a number in (0, 1], got {value!r}.")
    if not number:
        raise WeightclipError(f"{name} must be a positive number, got {value!r}.")
    return int(value) if isinstance(value, Integral) else float(value)


def _widths(sizes: Any) -> tuple[int, ...]:
    items: list[Any] = [sizes] if isinstance(sizes, Integral) else list(sizes) if _is_list(sizes) else [None]
    if not all(isinstance(w, Integral) and not isinstance(w, bool) and 1 <= int(w) <= 1 << 16 for w in items):
        raise WeightclipError(f"hidden_layer_sizes must be widths like (32, 16), or (); got {sizes!r}.")
    return tuple(int(w) for w in items)


def class_list(classes: Any) -> np.ndarray:
    """Declared class labels, a list of single values without a missing one, as an array that keeps their types."""
    if not _is_list(classes) or getattr(classes, "ndim", 1) != 1:
        raise WeightclipError(f"classes must be a list of labels like ['no', 'yes'], got {classes!r}.")
    items = classes.tolist() if hasattr(classes, "tolist") else list(classes)
    if any(v is None or v != v or isinstance(v, (list, tuple, set, dict)) for v in items):
        raise WeightclipError("classes must be a list of single labels, none of them missing.")
    return label_array(items)


def label_array(labels: Sequence[Any]) -> np.ndarray:
    """Labels as an array; those of several types stay what they are instead of all becoming text."""
    if len({type(v) for v in labels}) <= 1:
        return np.array(labels)
    return np.fromiter(labels, dtype=object, count=len(labels))


def _is_list(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, dict)) and np.ndim(value) > 0  # type: ignore[arg-type]


_MOST = 4 << 30  # bytes of a sparse table written out


def dense(X: Any) -> Any:
    """X, written out if it is sparse: every feature takes part in every step, so that nothing would be saved.

    Where that would not fit it is refused, by its shape, which is public: the values are not looked at.
    """
    if not issparse(X):
        return X
    rows, columns = X.shape
    if rows * columns * 8 > _MOST:
        raise WeightclipError(
            f"sparse X of {rows} x {columns} takes {rows * columns * 8 / 2**30:.0f} GiB written out: choose or hash "
            "columns first (private accuracy falls with their number)."
        )
    if X.dtype.kind == "c":
        raise ValueError("Complex data not supported")
    return np.asarray(X.toarray())


def one_target(y: Any) -> None:
    """Refuse several columns, saying what to do instead and what that costs."""
    k = y.shape[1] if len(getattr(y, "shape", ())) == 2 else 1
    if isinstance(y, (list, tuple)) and len(y) > 0 and isinstance(y[0], (list, tuple)):
        k = len(y[0])
    if k > 1:
        raise WeightclipError(
            f"y has {k} columns (multilabel, several outputs): one model predicts one target. Fit {k} models, each "
            f"with epsilon/{k} and delta/{k} and one column of y: together they cost epsilon and delta."
        )


NOTE = (
    "sample weights count as part of each record, cut to [0, 1]; feature statistics (ranges, quantiles, categories, "
    "means) are those of the unweighted records"
)


def weigh(plan: FitPlan, sample_weight: Any, rows: int) -> FitPlan:
    """The plan of a weighted fit; as it is without weights.

    Only their shape, one number for each record, is insisted on. Their values never stop a fit: it would tell.
    """
    if sample_weight is None:
        return plan
    if isinstance(sample_weight, (list, tuple)) and not all(isinstance(w, (list, tuple)) for w in sample_weight):
        weights = to_numbers(sample_weight)  # one by one: an array would give all of them one type
    else:
        weights = np.asarray(sample_weight)
    if weights.dtype.kind not in "iufb":
        weights = to_numbers(weights.ravel().tolist()).reshape(weights.shape)
    if weights.shape != (rows,):
        raise WeightclipError(
            f"sample_weight.shape == {weights.shape}, expected ({rows},): one number from 0 to 1 for each record."
        )
    return replace(plan, not_covered=(*plan.not_covered, NOTE), weights=np.asarray(weights, dtype=np.float64))
