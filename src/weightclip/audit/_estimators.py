"""Audit of the estimators: canary rows through ``fit``, two worlds told apart by the released model alone.

The mechanism inside a fit is audited elsewhere. Here a canary attacks what lies around it: how values become codes,
labels places and columns kinds. One odd row must not change what becomes of the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from typing import Any

import numpy as np

from weightclip.accounting import gdp_delta
from weightclip.audit._checks import Check
from weightclip.audit._statistics import compare

ESTIMATORS = "estimators, two worlds"
RECORDS = 240
_CATEGORICAL = {"columns": [{"name": "0", "type": "categorical"}]}


@dataclass(frozen=True)
class Canary:
    """A pair of neighbouring tables, and what an outsider looks at in the fitted model."""

    name: str  #: what is attacked
    table: Callable[[bool], tuple[Any, Any]]  #: (X, y) without and with the canary row
    score: Callable[[Any], float]  #: a number from the released model; larger: the canary took part
    settings: dict[str, Any] = field(default_factory=dict)  #: parameters of the estimator
    regression: bool = False  #: whether it is the regressor that is attacked


def _objects(rows: list[list[Any]]) -> np.ndarray:
    return np.array(rows, dtype=object)


def _sides() -> tuple[np.ndarray, np.ndarray]:
    """Records of two classes that one column tells apart."""
    y = np.arange(RECORDS) % 2
    return np.column_stack([2.0 * y - 1, np.linspace(-1, 1, RECORDS)]), y


def _spelled(common: Any, odd: Any) -> Callable[[bool], tuple[Any, Any]]:
    def table(canary: bool) -> tuple[Any, Any]:
        first = [[odd]] if canary else []
        y = [0] * len(first) + [i % 2 for i in range(RECORDS)]
        return _objects(first + [[common if i % 2 else "other"] for i in range(RECORDS)]), y

    return table


def _has_no_code(common: Any) -> Callable[[Any], float]:
    """Whether the common value lost its feature."""
    return lambda model: -float(np.abs(np.diff(model.encode(_objects([[common], ["never seen"]])), axis=0)).max())


def _label(canary: bool) -> tuple[Any, Any]:
    X, y = _sides()
    labels: list[Any] = y.tolist()
    return (np.vstack([X, X[:1]]), [*labels, "x"]) if canary else (X, labels)


def _separation(model: Any) -> float:
    """How little the two sides differ."""
    p = model.predict_proba(np.array([[-1.0, 0.0], [1.0, 0.0]]))[:, 1]
    return float(p[0] - p[1])


def _missing(canary: bool) -> tuple[Any, Any]:
    X = (_sides()[0] > 0).astype(int)
    return (np.vstack([X, [np.nan, 1]]), [*X[:, 0], 1]) if canary else (X, X[:, 0].tolist())


def _text_in(values: list[Any], as_list: bool) -> Callable[[bool], tuple[Any, Any]]:
    def table(canary: bool) -> tuple[Any, Any]:
        rows = [[values[i % 2]] for i in range(RECORDS)] + ([["x"]] if canary else [])
        return rows if as_list else _objects(rows), [i % 2 for i in range(len(rows))]

    return table


def _shape(model: Any) -> float:
    """What the model is made of: features and mechanisms."""
    return float(10 * len(model.privacy_report_["mechanisms"]) + model.model_.encoder.width)


def _far(canary: bool) -> tuple[Any, Any]:
    X, y = _sides()
    return (np.vstack([X, [[1e30, -1e30]]]), np.append(y, 0)) if canary else (X, y)


def _far_target(canary: bool) -> tuple[Any, Any]:
    X, y = _sides()
    return (np.vstack([X, X[:1]]), np.append(y, 1e9)) if canary else (X, y * 1.0)


def canaries() -> list[Canary]:
    """Every canary, by what it attacks."""
    bounds = {"feature_bounds": (-1, 1)}
    return [
        Canary("True among ones", _spelled(1, True), _has_no_code(1), {"schema": _CATEGORICAL}),
        Canary("1.00 among 1.0", _spelled(Decimal("1.0"), Decimal("1.00")), _has_no_code(Decimal("1.0")),
               {"schema": _CATEGORICAL}),
        Canary("text in a list of labels", _label, _separation, {"classes": [0, 1], **bounds}),
        Canary("missing value among whole numbers", _missing, _shape, {"feature_bounds": (0, 1)}),
        Canary("text among booleans", _text_in([False, True], False), lambda m: -_shape(m)),
        Canary("text in a list of lists", _text_in([0.0, 1.0], True), lambda m: -_shape(m)),
        Canary("a row far away", _far, _separation, {}),
        Canary("a target far away", _far_target, lambda model: model.model_.target_range[1], bounds, True),
    ]  # fmt: skip


def estimator_check(
    canary: Canary, *, epsilon: float = 1.0, delta: float = 1e-5, runs: int = 80, seed: int = 0
) -> Check:
    """Fit ``runs`` times in each world and compare what was released with the claim.

    Every draw takes all records (q = 1): the whole fit is a composition of Gaussian mechanisms, whose exact curve
    is the claim that is tested. Both worlds have the same public number of records.
    """
    from weightclip.tabular import LipDPClassifier, LipDPRegressor

    kind = LipDPRegressor if canary.regression else LipDPClassifier
    scores: list[list[float]] = [[], []]
    mu = 0.0
    for world in (0, 1):
        X, y = canary.table(bool(world))
        for run in range(runs):
            model = kind(epsilon, delta, batch_fraction=1.0, epochs=4, learning_rate=0.5, hidden_layer_sizes=(),
                         n_records=RECORDS, accountant="rdp", random_state=seed * 2 * runs + world * runs + run,
                         **canary.settings).fit(X, y)  # fmt: skip
            scores[world].append(canary.score(model))
        mu = max(mu, math.sqrt(sum(m["steps"] / m["sigma"] ** 2 for m in model.privacy_report_["mechanisms"])))
    found = compare(np.array(scores[0]), np.array(scores[1]), delta, lambda e: gdp_delta(mu, e))
    note = f"{runs} fits per world, lower bound {found.epsilon_lower:.3g}"
    return Check(ESTIMATORS, canary.name, found.epsilon_lower, epsilon, found.violation, note, asdict(found))
