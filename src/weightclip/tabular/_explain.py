"""What a fitted model looks at, and probabilities that mean what they say: from the model alone or public records."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import minimize_scalar
from sklearn.metrics import r2_score
from sklearn.utils.validation import check_is_fitted

from weightclip.errors import WeightclipError
from weightclip.tabular._inputs import places_of
from weightclip.tabular._model import Model
from weightclip.tabular._target import pretended


@dataclass(frozen=True)
class Importances:
    """How much a model relies on each column.

    Attributes:
        names: Columns.
        mean: Importance of each, in the unit of `measure`.
        spread: Standard deviation over repeats, 0 where there is one.
        measure: What was measured.
    """

    names: tuple[str, ...]
    mean: tuple[float, ...]
    spread: tuple[float, ...]
    measure: str

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary, most important column first."""
        rows = [{"column": n, "importance": m, "spread": s} for n, m, s in self._sorted()]
        return {"measure": self.measure, "columns": rows}

    def __str__(self) -> str:
        width = max(len(n) for n in self.names)
        lines = [f"{n:{width}s}  {m:9.4f} ± {s:.4f}" for n, m, s in self._sorted()]
        return "\n".join([f"{self.measure}:", *lines])

    def _sorted(self) -> list[tuple[str, float, float]]:
        rows = zip(self.names, self.mean, self.spread, strict=True)
        return sorted(rows, key=lambda row: -row[1])


def model_importances(model: Model) -> Importances:
    """Mean change of the prediction when one column of a made-up record is drawn anew.

    Columns of the made-up records are independent; numbers are spread over the intervals of the encoder (about the
    quantiles it was fitted on), categories evenly over those it knows.

    Formal guarantees:
        A function of the released model alone: it costs no privacy.
    """
    rng = np.random.default_rng(0)
    rows, fresh = (pretended(model.encoder, rng) for _ in range(2))
    before = _prediction(model, rows)
    effects = []
    for j in range(rows.shape[1]):
        changed = rows.copy()
        changed[:, j] = fresh[:, j]
        effects.append(float(np.abs(_prediction(model, changed) - before).mean()))
    what = "probabilities" if model.task == "classification" else "prediction"
    names = tuple(c.name for c in model.encoder.columns)
    return Importances(names, tuple(effects), (0.0,) * len(names), f"mean change of the {what} by a column")


def public_importances(estimator: Any, X: Any, y: Any, repeats: int = 5, random_state: int = 0) -> Importances:
    """Permutation importances on PUBLIC records: how far the score falls when a column is shuffled.

    Args:
        estimator: A fitted `LipDPClassifier` or `LipDPRegressor`.
        X: Public records. Scores of private ones are a release that nobody has paid for.
        y: Their labels.
        repeats: Shuffles of each column.
        random_state: Seed of the shuffles.

    Example:
        >>> import numpy as np
        >>> from weightclip.tabular import LipDPClassifier
        >>> X = np.random.default_rng(0).uniform(-1, 1, size=(3000, 2))
        >>> model = LipDPClassifier(feature_bounds=(-1, 1), random_state=0).fit(X[:2000], X[:2000, 0] > 0)
        >>> found = public_importances(model, X[2000:], X[2000:, 0] > 0)
        >>> bool(found.mean[0] > 0.2 > found.mean[1])
        True
    """
    check_is_fitted(estimator)
    values, y = estimator.raw(X), np.asarray(y)
    if estimator.model_.task == "classification":
        y = places_of(y, estimator.classes_)
    return permuted(estimator.model_, values, y, repeats, random_state)


def permuted(model: Model, values: np.ndarray, y: np.ndarray, repeats: int, seed: int) -> Importances:
    """`public_importances` of raw values; labels are places in the list of classes (-1: none of them) or numbers."""
    if not (isinstance(repeats, (int, np.integer)) and repeats >= 1):
        raise WeightclipError(f"repeats must be a whole number, at least 1, got {repeats!r}.")
    if len(values) != len(y) or len(y) < 2:
        raise WeightclipError(f"importances need at least two records with labels, got {len(values)} and {len(y)}.")
    rng = np.random.default_rng(seed)

    def score(rows: np.ndarray) -> float:
        found = _prediction(model, rows)
        return float(r2_score(y, found) if model.task == "regression" else np.mean(found.argmax(1) == y))

    whole, falls = score(values), []
    for j in range(values.shape[1]):
        changed = values.copy()
        column = []
        for _ in range(int(repeats)):
            changed[:, j] = rng.permutation(values[:, j])
            column.append(whole - score(changed))
        falls.append(column)
    names = tuple(c.name for c in model.encoder.columns)
    what = "R2" if model.task == "regression" else "accuracy"
    measure = f"fall of the {what} ({whole:.4f} on {len(y)} public records) when a column is shuffled"
    return Importances(names, tuple(map(float, np.mean(falls, 1))), tuple(map(float, np.std(falls, 1))), measure)


def shares(model: Model, inputs: Sequence[str]) -> np.ndarray:
    """`model_importances` as shares of one, for every column that `fit` saw: 0 for those it ignored."""
    found = model_importances(model)
    by_name = dict(zip(found.names, found.mean, strict=True))
    effects = np.array([by_name.get(name, 0.0) for name in inputs])
    return effects / effects.sum() if effects.sum() > 0 else effects


def _prediction(model: Model, rows: np.ndarray) -> np.ndarray:
    return model.probabilities(rows) if model.task == "classification" else model.regress(rows)


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
    codes = places_of(np.asarray(y), estimator.classes_)
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
