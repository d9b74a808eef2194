"""Shapes that need a word of their own: sparse tables, and targets of several columns."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.sparse import issparse

from weightclip.errors import WeightclipError

_MOST = 4 << 30  # bytes of a sparse table written out


def dense(X: Any) -> Any:
    """X, written out if it is sparse: every feature takes part in every step, so that nothing would be saved.

    Raises:
        WeightclipError: It would not fit: the shape is public, the values are not looked at.
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


def one_target(y: Any) -> Any:
    """y, unless it has several columns.

    Raises:
        WeightclipError: It has: says what to do instead, and what that costs.
    """
    k = y.shape[1] if len(getattr(y, "shape", ())) == 2 else 1
    if isinstance(y, (list, tuple)) and len(y) > 0 and isinstance(y[0], (list, tuple)):
        k = len(y[0])
    if k > 1:
        raise WeightclipError(
            f"y has {k} columns (multilabel, several outputs): one model predicts one target. Fit {k} models, each "
            f"with epsilon/{k} and delta/{k} and one column of y: together they cost epsilon and delta."
        )
    return y
