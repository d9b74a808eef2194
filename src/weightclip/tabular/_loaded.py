"""What a model folder says of the table it was fitted on, and how a loaded estimator finds its columns again."""

from __future__ import annotations

from typing import Any

import numpy as np

from weightclip.tabular._model import Model
from weightclip.tabular._settings import label_array
from weightclip.tabular._table import frame_columns, is_frame


def inputs_json(estimator: Any) -> dict[str, Any]:
    """Names of the columns `fit` saw, ignored ones too, and whether the table named them."""
    return {"inputs": list(estimator._names), "named": hasattr(estimator, "feature_names_in_")}


def restore(estimator: Any, model: Model, pipeline: dict[str, Any], report: dict[str, Any]) -> None:
    """Everything a fitted estimator holds, from a model folder."""
    estimator.model_, estimator.privacy_report_ = model, report
    estimator.epsilon_, estimator.delta_ = float(report["epsilon"]), float(report["delta"])
    estimator.n_iter_ = report["public"]["steps"]
    estimator._names = pipeline.get("inputs") or [c.name for c in model.encoder.columns]
    estimator.n_features_in_ = len(estimator._names)
    estimator._by_name = pipeline.get("named", True)  # `weightclip train` reads files, which name their columns
    if estimator._by_name:
        estimator.feature_names_in_ = np.array(estimator._names, dtype=object)
    if model.task == "classification":
        estimator.classes_ = label_array(model.classes)


def named_columns(estimator: Any, X: Any) -> dict[str, np.ndarray] | None:
    """Columns of a table for a loaded estimator: by name, in any order, beside any others; None for unnamed ones."""
    if not (getattr(estimator, "_by_name", False) and is_frame(X)):
        return None
    arrays = frame_columns(X)
    if len(arrays) != len(X.columns if hasattr(X, "columns") else X.column_names):
        raise ValueError("two columns of X have the same name.")
    return arrays
