"""From raw columns to the float32 matrix a model takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weightclip.errors import WeightclipError

from ._schema import Feature
from ._statistics import PaidQuery, PublicRanges, Scaling, Statistics, transform
from ._tabular import TabularData


@dataclass(frozen=True, eq=False)
class Encoded:
    """An encoded table.

    Attributes:
        X: Features, float32.  # records x features
        y: Class codes, int64.
        feature_names: Column name, or `column=category` for one place of a one-hot block.
        covered: What an ε of training says, or does not say, about the feature statistics.
        mechanisms: The private queries that were paid for; their ε adds to that of training.
    """

    X: np.ndarray
    y: np.ndarray
    feature_names: tuple[str, ...]
    covered: str
    mechanisms: tuple[PaidQuery, ...]

    @property
    def epsilon(self) -> float:
        """Pure ε of the feature statistics, by basic composition; it adds to that of training."""
        return sum(query.epsilon for query in self.mechanisms)


@dataclass(frozen=True)
class OneHot:
    """Each categorical column becomes one 0/1 feature per public category."""

    def keeps_order(self, column: Feature) -> bool:
        """Whether a column becomes one number instead of a one-hot block."""
        return False


@dataclass(frozen=True)
class Ordinal:
    """Ordered categorical columns become one number in [−1, 1] by public rank; the others are one-hot."""

    def keeps_order(self, column: Feature) -> bool:
        """Whether a column becomes one number instead of a one-hot block."""
        return column.ordered and len(column.categories) > 1


def encode(
    data: TabularData,
    fit_on: Sequence[int] | np.ndarray | None = None,
    statistics: Statistics | None = None,
    categorical: OneHot | Ordinal | None = None,
) -> Encoded:
    """Encode all records of a table.

    A category that the public list does not hold, and a missing value, become zeros: never an error, because whether
    an error occurs would tell of the record.

    Formal guarantees:
        Given the scalings, each row of X depends on its own record only. What the scalings cost, or that they are not
        covered, is said by `covered` and `mechanisms`; `fit_on` are the only records that the statistics read.

    Args:
        data: The table.
        fit_on: Records whose values the statistics may read (the training part). Not needed for public ranges.
        statistics: Where numeric scales come from; `PublicRanges()` if not given.
        categorical: `OneHot()` (default) or `Ordinal()`.

    Raises:
        WeightclipError: If the statistics read the data and no records were named.
    """
    statistics = PublicRanges() if statistics is None else statistics
    categorical = OneHot() if categorical is None else categorical
    if fit_on is None or len(fit_on) == 0:
        if not isinstance(statistics, PublicRanges):
            raise WeightclipError(f"encode: {type(statistics).__name__} reads data, so fit_on= must name its records")
        fit_on = np.zeros(0, dtype=np.int64)
    numeric = [column for column in data.columns if column.kind == "numeric"]
    values = {column.name: transform(column, data.values[column.name]) for column in numeric}
    rows = [values[column.name][np.asarray(fit_on, dtype=np.int64)] for column in numeric]
    fitted, paid = statistics.fit(numeric, np.stack(rows, axis=1) if rows else np.zeros((len(fit_on), 0)))
    scalings = {column.name: scaling for column, scaling in zip(numeric, fitted, strict=True)}

    blocks: list[np.ndarray] = []
    feature_names: list[str] = []
    for column in data.columns:
        if column.kind == "numeric":
            blocks.append(scalings[column.name](values[column.name])[:, None])
            feature_names.append(column.name)
        elif categorical.keeps_order(column):
            blocks.append(_ranks(column, data.values[column.name])[:, None])
            feature_names.append(column.name)
        else:
            blocks.append(data.values[column.name][:, None] == np.array(column.categories)[None, :])
            feature_names.extend(f"{column.name}={category}" for category in column.categories)
    return Encoded(
        X=np.concatenate([block.astype(np.float32) for block in blocks], axis=1),
        y=data.target,
        feature_names=tuple(feature_names),
        covered=statistics.statement(),
        mechanisms=paid,
    )


def _ranks(column: Feature, raw: np.ndarray) -> np.ndarray:
    match = raw[:, None] == np.array(column.categories)[None, :]  # records x categories
    scaling = Scaling.interval(0.0, len(column.categories) - 1.0)
    return np.where(match.any(axis=1), scaling(match.argmax(axis=1).astype(np.float64)), 0.0)
