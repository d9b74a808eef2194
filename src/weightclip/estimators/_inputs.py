"""Small helpers of the estimators: labels, bounds by name, threads, warnings."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from sklearn.utils import assert_all_finite

from weightclip._tabular._table import is_frame
from weightclip.errors import WeightclipError


class PrivacyCostWarning(UserWarning):
    """Something the caller does costs more privacy than one fit."""


class Progress:
    def __init__(self) -> None:
        self.shown = -1

    def __call__(self, done: int, total: int) -> None:
        if 10 * done // total > self.shown:
            self.shown = 10 * done // total
            print(f"[weightclip] step {done} of {total}", file=sys.stderr)


def labels(y: np.ndarray) -> np.ndarray:
    if y.dtype.kind == "f":
        assert_all_finite(y, input_name="y")
    if y.dtype.kind == "O":
        y = np.array(y.tolist()) if len(set(map(type, y.tolist()))) == 1 else y
    return y


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


def is_integer(X: Any, name: str) -> bool:
    """Whether a column's type holds whole numbers only (its values are not looked at)."""
    kind = getattr(X, "dtypes", None) if is_frame(X) else getattr(X, "dtype", None)
    with contextlib.suppress(Exception):
        kind = X[name].dtype if is_frame(X) else kind
    return "int" in str(kind).lower() or "bool" in str(kind).lower()


def warn_of_repetition() -> None:
    """Warns when scikit-learn's model selection makes the call: every fit is a release of its own."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("sklearn.model_selection"):
            warnings.warn(
                "cross-validation fits several private models on overlapping records: their epsilons add up, and "
                "choosing by their scores is not covered by epsilon_ (see weightclip.accounting.search_cost).",
                PrivacyCostWarning, stacklevel=3,
            )  # fmt: skip
            return
        frame = frame.f_back


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
