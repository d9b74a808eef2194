"""Settings of an estimator as plain Python values, refused by name where they make no sense."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np

from weightclip.errors import WeightclipError


def plain_settings(estimator: Any, names: Sequence[str]) -> dict[str, Any]:
    """What the user chose among `names` (None: not chosen), NumPy's numbers as Python's.

    Raises:
        WeightclipError: A value is no positive number, or a fraction is none.
    """
    chosen = {name: value for name in names if (value := getattr(estimator, name)) is not None}
    if "hidden_layer_sizes" in chosen:
        chosen["hidden_layer_sizes"] = _widths(chosen["hidden_layer_sizes"])
    for name, value in chosen.items():
        if name == "hidden_layer_sizes":
            continue
        if name == "joint_cap" and isinstance(value, (tuple, list, np.ndarray)):
            chosen[name] = tuple(_positive(name, item) for item in value)
        else:
            chosen[name] = _positive(name, value)
    if chosen.get("batch_fraction", 1.0) > 1:
        raise WeightclipError(f"batch_fraction must lie in (0, 1], got {chosen['batch_fraction']!r}.")
    return chosen


def _positive(name: str, value: Any) -> float:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, Real) or not 0 < float(value) < math.inf:
        wanted = "a number in (0, 1]" if name == "batch_fraction" else "a positive number"
        raise WeightclipError(f"{name} must be {wanted}, got {value!r}.")
    return int(value) if isinstance(value, Integral) else float(value)


def _widths(sizes: Any) -> tuple[int, ...]:
    items: list[Any] = [sizes] if isinstance(sizes, Integral) else list(sizes) if _is_list(sizes) else [None]
    if not all(isinstance(w, Integral) and not isinstance(w, bool) and 1 <= int(w) <= 1 << 16 for w in items):
        raise WeightclipError(f"hidden_layer_sizes must be widths like (32, 16), or (); got {sizes!r}.")
    return tuple(int(w) for w in items)


def class_list(classes: Any) -> np.ndarray:
    """Declared class labels as an array that keeps their types.

    Raises:
        WeightclipError: They are no list of single values, or one of them is missing.
    """
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
    array = np.empty(len(labels), dtype=object)
    array[:] = labels
    return array


def _is_list(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, dict)) and np.ndim(value) > 0  # type: ignore[arg-type]
