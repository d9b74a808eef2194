"""What both estimators share: parameters, tables, randomness, reports, saving."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.validation import check_array, check_consistent_length, check_is_fitted, validate_data

from weightclip.errors import WeightclipError
from weightclip.noise import Streams
from weightclip.tabular import defaults as _defaults
from weightclip.tabular import folder as _folder
from weightclip.tabular._checks import check_budget
from weightclip.tabular._columns import Column, Schema, canonical
from weightclip.tabular._explain import shares
from weightclip.tabular._fit import find_kinds
from weightclip.tabular._inputs import Progress, bounds_by_name, dense, label_array, plain_settings
from weightclip.tabular._model import Model, to_onnx
from weightclip.tabular._plan import FitPlan, Preprocessing, PrivateScaling
from weightclip.tabular._table import Table, array_columns, array_kinds, frame_columns, frame_kinds, is_frame, to_values

_CHOICES = ("hidden_layer_sizes", "epochs", "batch_fraction", "learning_rate", "gradient_cap", "joint_cap",
            "temperature", "bias_scale", "weight_norm")  # fmt: skip
_TYPES = ("types of columns that no schema describes are those of X: declare them if they may have been chosen by the "
          "values (one text makes objects of numbers or booleans)")  # fmt: skip


Fit = TypeVar("Fit", bound=Callable[..., Any])


def all_or_nothing(fit: Fit) -> Fit:
    """A fit that fails leaves its estimator as it was: no class or column of the new data beside the old model."""

    @functools.wraps(fit)
    def whole(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = dict(vars(self))
        try:
            return fit(self, *args, **kwargs)
        except BaseException:
            vars(self).clear()
            vars(self).update(before)
            raise

    return whole  # type: ignore[return-value]


@dataclass(eq=False, repr=False)
class LipDP(BaseEstimator):
    """Base of both estimators: the parameters they share, which `LipDPClassifier` describes.

    A dataclass, so that each parameter is written once and scikit-learn still finds all of them in ``__init__``.
    """

    epsilon: float = 1.0
    delta: float | None = None
    _: KW_ONLY
    feature_bounds: Any = None
    categories: Mapping[Any, Sequence[Any]] | None = None
    schema: Any = None
    preprocessing: Any = None
    hidden_layer_sizes: Sequence[int] | None = None
    epochs: float | None = None
    batch_fraction: float | None = None
    learning_rate: float | None = None
    gradient_cap: float | None = None
    joint_cap: float | None = None
    temperature: float | None = None
    bias_scale: float | None = None
    weight_norm: float | None = None
    accountant: str = "pld"
    random_state: Any = None
    n_records: int | None = None
    ledger: Any = None
    verbose: int = 0
    n_jobs: int | None = None
    # what a fit finds
    classes_: np.ndarray = field(init=False)
    n_features_in_: int = field(init=False)
    feature_names_in_: np.ndarray = field(init=False)  # of tables whose columns have names

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.input_tags.allow_nan = True  # a missing value is a value
        tags.input_tags.categorical = True
        tags.input_tags.string = True
        return tags

    # -- before a record is read -----------------------------------------------------------------------------------

    def _plan(self, found: int, not_covered: Sequence[str]) -> FitPlan:
        if self.n_records is not None and not (isinstance(self.n_records, Integral) and self.n_records >= 1):
            raise WeightclipError(f"n_records must be a whole number, at least 1, got {self.n_records!r}.")
        n = found if self.n_records is None else int(self.n_records)
        delta = _defaults.delta(n) if self.delta is None else self.delta
        check_budget(self.epsilon, delta)
        if float(delta) > 1 / n:
            warnings.warn(f"delta = {float(delta):g} is above 1/n = {1 / n:g}: choose it far smaller.", stacklevel=4)
        how = PrivateScaling() if self.preprocessing is None else self.preprocessing
        if not isinstance(how, Preprocessing):
            raise WeightclipError(
                f"preprocessing must be PrivateScaling(), PublicScaling() or NonPrivateScaling(), got {how!r}."
            )
        chosen = plain_settings(self, _CHOICES)
        if self.delta is None:
            not_covered = [*not_covered, "delta was set from the number of records, which counts as public"]
        return FitPlan(
            float(self.epsilon), float(delta), how, chosen, self.accountant, self._streams(),
            loss=getattr(self, "loss", "huber"), progress=Progress() if self.verbose else None,
            not_covered=tuple(not_covered), records=None if self.n_records is None else n,
            ledger=None if self.ledger is None else Path(self.ledger),
        ).counted()  # fmt: skip

    def _streams(self) -> Streams:
        state = self.random_state
        if state is None:
            return Streams.secure()
        if isinstance(state, (np.random.RandomState, np.random.Generator)):
            draw = state.randint if isinstance(state, np.random.RandomState) else state.integers
            return Streams.seeded(int(draw(0, 2**31 - 1)))
        if isinstance(state, Integral):
            return Streams.seeded(int(state))
        raise WeightclipError(f"random_state must be None, an integer or a NumPy generator, got {state!r}.")

    def _schema(self) -> Schema:
        if self.schema is None or isinstance(self.schema, Schema):
            return self.schema or Schema()
        return Schema.from_json(self.schema) if isinstance(self.schema, Mapping) else Schema.read(self.schema)

    # -- tables ----------------------------------------------------------------------------------------------------

    def _arrays(self, X: Any, reset: bool) -> tuple[dict[str, np.ndarray], dict[str, str | None]]:
        """Columns of X and their declared kinds by name, after scikit-learn's checks; at prediction under fit's names.

        Kinds come from types, never from values: None where there is no type (objects and lists).
        """
        X = dense(X)
        if is_frame(X):
            arrays = frame_columns(X)
            if len(arrays) != len(X.columns if hasattr(X, "columns") else X.column_names):
                raise ValueError("two columns of X have the same name.")
            if not reset and self._by_name:  # a loaded estimator finds its columns in any order, beside any others
                return arrays, {}
            kinds = frame_kinds(X)
            if not arrays:
                raise ValueError("0 feature(s) (shape=(n, 0)) while a minimum of 1 is required.")
            validate_data(self, X, reset=reset, skip_check_array=True)  # type: ignore[arg-type]
            check_array(np.empty((len(next(iter(arrays.values()))), 1)), ensure_min_samples=1, ensure_all_finite=False)
        else:
            # numpy would turn a list with one text in it into text altogether
            X = np.asarray(X, dtype=object if isinstance(X, (list, tuple)) else None)
            if X.ndim != 2:
                raise ValueError(f"Expected 2D array, got {X.ndim}D array instead. Reshape your data.")
            # scikit-learn looks at zeros of X's shape and type: none of its messages can repeat a value of X
            zeros = np.broadcast_to(np.zeros((), dtype=X.dtype), X.shape)
            validate_data(self, zeros, reset=reset, dtype=None, ensure_all_finite=False)  # type: ignore[arg-type]
            arrays, kinds = array_columns(X), array_kinds(X.dtype, X.shape[1])
        if reset:
            self._names, self._by_name = list(arrays), False
            return arrays, kinds
        return dict(zip(self._names, arrays.values(), strict=True)), kinds

    def _describe(
        self, arrays: dict[str, np.ndarray], kinds: dict[str, str | None]
    ) -> tuple[tuple[Column, ...], tuple[str, ...]]:
        """Public descriptions of the columns, and the names of those for which nobody declared a kind.

        Descriptions come from the schema, `feature_bounds` and `categories`, then from declared types.
        """
        schema = self._schema()
        bounds = bounds_by_name(self.feature_bounds, list(arrays))
        listed = {str(k): tuple(canonical(c) or "" for c in v) for k, v in (self.categories or {}).items()}
        for name in [*listed, *(c.name for c in schema.columns)]:
            if name not in arrays:
                raise WeightclipError(f"column {name!r} is described, but X has no such column.")
        columns, untyped = [], []
        for name in arrays:
            if name in schema.ignore:
                continue
            column = schema.column(name)
            if name in listed:
                column = Column(name, "categorical", categories=listed[name])
            else:
                named = isinstance(self.feature_bounds, Mapping) and name in bounds  # a range by name says: a number
                untyped += [name] if column is None and kinds[name] is None and not named else []
                column = column or Column(name, kinds[name] or "numeric")
                if name in bounds and column.kind == "numeric":
                    column = Column(name, "numeric", *bounds[name])
            columns.append(column)
        if not columns:
            raise WeightclipError("no columns are left: the schema ignores all of them.")
        return tuple(columns), tuple(untyped)

    def _table(self, X: Any, rows: int, not_covered: Sequence[str]) -> tuple[Table, FitPlan]:
        """X as a table of numbers, with the plan of the fit (which has paid for kinds that nobody declared)."""
        arrays, kinds = self._arrays(X, reset=True)
        check_consistent_length(next(iter(arrays.values())), range(rows))
        columns, untyped = self._describe(arrays, kinds)
        described = {*(c.name for c in self._schema().columns), *map(str, self.categories or ())}
        if any(c.name not in described and c.name not in untyped for c in columns):
            not_covered = [*not_covered, _TYPES]
        columns, plan = find_kinds(columns, untyped, arrays, self._plan(rows, not_covered))
        numbers = isinstance(X, np.ndarray) and X.dtype == np.float64 and [c.name for c in columns] == list(arrays)
        if numbers and not any(c.kind == "categorical" for c in columns):
            return Table(columns, X), plan  # as they are: no copy
        return Table(columns, to_values(columns, arrays)), plan

    # -- after the fit ---------------------------------------------------------------------------------------------

    def _finish(self, model: Model, report: dict[str, Any]) -> None:
        self.model_, self.privacy_report_ = model, report
        self.epsilon_, self.delta_ = float(report["epsilon"]), float(report["delta"])
        self.n_iter_ = report["public"]["steps"]

    @property
    def feature_importances_(self) -> np.ndarray:
        """Share of each column in what the model does, from the released model alone: costs nothing."""
        check_is_fitted(self)
        return shares(self.model_, self._names)

    def to_torch(self):
        """The network as a plain ``torch.nn.Module`` on encoded features (see `encode`)."""
        check_is_fitted(self)
        return self.model_.to_torch()

    def encode(self, X: Any) -> np.ndarray:
        """Features of X, as the network takes them.  # records x features, float32"""
        return self.model_.encoder.transform(self.raw(X))

    def raw(self, X: Any) -> np.ndarray:
        """X as numbers, categories as codes: the input of the ONNX model.  # records x columns, float64"""
        check_is_fitted(self)
        return to_values(self.model_.encoder.columns, self._arrays(X, reset=False)[0])

    def to_onnx(self, path: str | Path | None = None) -> Any:
        """The whole model, encoder included, as ONNX (extra ``onnx``); its input is `raw(X)`."""
        check_is_fitted(self)
        return to_onnx(self.model_, path)

    def save(self, folder: str | Path, overwrite: bool = False) -> Path:
        """Write a model folder: safetensors, JSON and a model card, with checksums and without pickle."""
        check_is_fitted(self)
        # names of the columns that `fit` saw, ignored ones too, and whether the table named them
        inputs = {"inputs": list(self._names), "named": hasattr(self, "feature_names_in_")}
        pipeline = {**self.model_.pipeline(), **inputs}
        return _folder.save(folder, self.model_.tensors(), pipeline, self.privacy_report_, overwrite=overwrite)

    @classmethod
    def load(cls, folder: str | Path):
        """Read what `save` wrote, after checking every file; runs no code from it."""
        tensors, pipeline, report = _folder.load(folder)
        if "lora" in pipeline.get("text", ()):
            raise WeightclipError(f"model {folder} reads text through an encoder of its own: use weightclip predict.")
        model = Model.load(tensors, pipeline)
        wanted = "classification" if issubclass(cls, ClassifierMixin) else "regression"
        if model.task != wanted:
            raise WeightclipError(f"model {folder} is for {model.task}, not {wanted}.")
        estimator = cls(epsilon=report["target_epsilon"], delta=report["delta"])
        estimator._finish(model, report)
        estimator._names = pipeline.get("inputs") or [c.name for c in model.encoder.columns]
        estimator.n_features_in_ = len(estimator._names)
        estimator._by_name = pipeline.get("named", True)  # `weightclip train` reads files, which name their columns
        if estimator._by_name:
            estimator.feature_names_in_ = np.array(estimator._names, dtype=object)
        if wanted == "classification":
            estimator.classes_ = label_array(model.classes)
        return estimator
