"""From a table to a private model: preprocessing within the budget, training with the rest, and a report."""

from __future__ import annotations

import functools
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from weightclip import losses
from weightclip.accounting import Mechanism
from weightclip.errors import WeightclipError
from weightclip.tabular import defaults as _defaults
from weightclip.tabular._columns import Column
from weightclip.tabular._encoder import (
    Encoder,
    Fitted,
    center,
    center_error,
    expected_width,
    fit_private,
    fit_public,
    fit_unprotected,
    lack_of_precision,
)
from weightclip.tabular._model import Model, fold
from weightclip.tabular._plan import FitPlan, NonPrivateScaling, PrivateScaling, PublicScaling, mu_left
from weightclip.tabular._private import Door, column_kinds
from weightclip.tabular._report import privacy_report, settings_json
from weightclip.tabular._resume import Stage
from weightclip.tabular._table import BLOCK, Table
from weightclip.tabular._target import Target, agreement, fit_target, pretended
from weightclip.tabular._training import UNKNOWN, Records, Settings, Trained, train

_IN_MEMORY = 1 << 28  # bytes of features in full precision; those of larger tables are kept in half precision
_MAPPED = 1 << 31  # bytes of features in half precision beyond which they are kept in a mapped file


def find_kinds(
    columns: Sequence[Column], untyped: Sequence[str], arrays: Mapping[str, np.ndarray], plan: FitPlan
) -> tuple[tuple[Column, ...], FitPlan]:
    """Kinds of the columns named in `untyped`, by a private vote; the plan that is returned has paid for it.

    Formal guarantees:
        One Gaussian mechanism (`column_kinds`), listed in the plan's `spent`. Its multiplier and the columns that take
        part follow from declared types and public numbers.
    """
    plan = replace(plan, columns=tuple(columns))
    if not untyped:
        return tuple(columns), plan
    how = plan.preprocessing
    if isinstance(how, PublicScaling):
        raise WeightclipError(f"column {untyped[0]!r} has no declared type: PublicScaling needs one, give a schema.")
    sigma = 0.0
    if isinstance(how, PrivateScaling):
        share = min(_defaults.KINDS_SHARE, (1 - (how.share or 0.0)) / 4)
        sigma = 1 / (mu_left(plan) * math.sqrt(share))
        paid = Mechanism("gaussian", sigma, 1.0, 1, label=f"kinds of {len(untyped)} columns")
        plan = replace(plan, spent=(*plan.spent, paid))
    kinds = column_kinds([arrays[c].tolist() for c in untyped], sigma, plan.door, "table/kinds")
    found = dict(zip(untyped, kinds, strict=True))
    settled = (c if found.get(c.name, c.kind) == c.kind else Column(c.name, found[c.name]) for c in columns)
    return tuple(settled), plan


def fit_classifier(table: Table, codes: np.ndarray, classes: tuple[Any, ...], target: str, plan: FitPlan):
    """A private classifier: (model, report, run).

    Codes are places of labels in the public list of `classes`; anything else contributes nothing. `target` is its name,
    for people.

    Formal guarantees:
        Model and report are (report epsilon, delta)-DP under adding or removing one record, given n, the columns' names
        and types, the classes and the plan.
    """
    n = plan.records or len(table)
    stage = _kept(plan, lambda: Stage(_center(_preprocess(table, plan, n), table, plan, n)))
    fitted = stage.fitted
    run = _train(table, fitted, codes, len(classes), plan, n)
    model = Model(fitted.encoder, fold(run.weights, run.settings.temperature), "classification", classes, target=target)
    public = {"classes": len(classes), "settings": settings_json(run.settings)}
    return model, privacy_report(fitted, run, plan, n, public), run


def fit_regressor(table: Table, y: np.ndarray, span: tuple[float, float] | None, target: str, plan: FitPlan):
    """A private regressor: (model, report, run). As `fit_classifier`; `span` is the target's public range, if known.

    Formal guarantees:
        Those of `fit_classifier`. The target adds up to two releases before training (`fit_target`) and one after it
        (`agreement`), whose multipliers are fixed beforehand and listed in the report.
    """
    n = plan.records or len(table)
    stage = _kept(plan, lambda: _before_regression(table, y, span, plan, n))
    fitted, scale, check = stage.fitted, stage.target, stage.check
    assert scale is not None
    low, high = scale.low, scale.high
    # A record whose target is not finite takes part with zero gradient; the others are cut to the range.
    scaled = (np.clip(y, low, high) - scale.middle) / scale.unit
    scaled[~np.isfinite(y)] = math.nan
    run = _train(table, fitted, scaled, 0, plan, n, stage.look)
    # Outputs of a model are in units of its range.
    range_ = Target.public(low, high)
    factor, shift = scale.unit / range_.unit, (scale.middle - range_.middle) / range_.unit
    *inner, (w, b) = fold(run.weights, run.settings.temperature)
    raw = Model(fitted.encoder, (*inner, (w, b)), "regression")
    reference = raw.logits(pretended(fitted.encoder))[:, 0]
    swing, mean = 1.0, 0.0
    if not isinstance(plan.preprocessing, PublicScaling):
        rows = functools.partial(_predictions, raw, table, scaled, plan.weights)
        door = Door(plan.streams)  # which charges nothing itself
        look = functools.partial(
            _last_look, plan, stage, run.steps, rows, reference, fitted.encoder.width, n, check, door
        )  # fmt: skip
        swing, mean = look() if plan.checkpoint is None else plan.checkpoint.once(look, default=_NO_LOOK)
    w, b = w * np.float32(swing), b * np.float32(swing) + np.float32((1 - swing) * mean)
    last = (w * np.float32(factor), b * np.float32(factor) + np.float32(shift))
    model = Model(fitted.encoder, (*inner, last), "regression", (), (low, high), target)
    public = {"target_range": [low, high], "settings": settings_json(run.settings)}
    return model, privacy_report(fitted, run, plan, n, public), run


_NO_LOOK = (1.0, 0.0)


def _last_look(plan: FitPlan, stage: Stage, steps: int, *args: Any) -> tuple[float, float]:
    """How far predictions are to be trusted, once: nothing is released where a copy of this fit has looked already.

    Formal guarantees:
        With a ledger the look is charged before it is made, and only if nothing else was charged since the training.
    """
    begin = plan.checkpoint.begin if plan.checkpoint is not None else lambda ledger: None
    if stage.look is not None and not plan.door.charge_next(stage.look, stage.charged + steps, begin):
        return _NO_LOOK
    return agreement(*args)


def _before_regression(
    table: Table, y: np.ndarray, span: tuple[float, float] | None, plan: FitPlan, n: int
) -> Stage:  # fmt: skip
    """Target and features; what the last look will cost is set aside."""
    sigma = _sigma(table, plan, n)
    if isinstance(plan.preprocessing, PublicScaling):
        if span is None:
            raise WeightclipError("PublicScaling needs the public range of the target.")
        scale = Target.public(*span)
    else:
        part = _defaults.target_part(span is not None)
        scale, released = fit_target(y, span, sigma / math.sqrt(part), plan.door, n)
        plan = replace(plan, spent=(*plan.spent, *released))
        sigma /= math.sqrt(1 - part)
    fitted = _center(_preprocess(table, plan, n, sigma), table, plan, n)
    if not isinstance(plan.preprocessing, PrivateScaling):
        return Stage(fitted, scale)
    left = 1 - (plan.preprocessing.share or 0.2)
    mu = mu_left(plan)
    check = 1 / (mu * math.sqrt(min(_defaults.agreement_share(n, mu), left / 4)))
    paid = Mechanism("gaussian", check, 1.0, 1, label="agreement of predictions and targets")
    return Stage(replace(fitted, mechanisms=(*fitted.mechanisms, paid)), scale, check)


def _kept(plan: FitPlan, make: Callable[[], Stage]) -> Stage:
    return make() if plan.checkpoint is None else plan.checkpoint.stage(make, plan.ledger)


def _predictions(
    model: Model, table: Table, y: np.ndarray, weights: np.ndarray | None
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray | None]]:
    """Predictions, targets and sample weights, some rows at a time."""
    for start in range(0, len(table), BLOCK):
        part = slice(start, start + BLOCK)
        w = None if weights is None else weights[part]
        yield model.logits(np.asarray(table.values[part]))[:, 0], y[part], w


def _sigma(table: Table, plan: FitPlan, n: int) -> float:
    """Noise multiplier of all feature statistics together, from public numbers; 0 where they are not paid for."""
    how = plan.preprocessing
    if not isinstance(how, PrivateScaling):
        return 0.0
    mu = mu_left(plan)  # of the one Gaussian mechanism that spends the whole budget
    share = how.share
    if share is None:
        share = _defaults.share(lack_of_precision(plan.columns or table.columns, 1 / (mu * math.sqrt(0.1)), n))
    return 1 / (mu * math.sqrt(share))


def _preprocess(table: Table, plan: FitPlan, n: int, sigma: float | None = None) -> Fitted:
    fitted = _statistics(table, plan, n, _sigma(table, plan, n) if sigma is None else sigma)
    notes = [f"{m.label}: released privately and paid for" for m in plan.spent]
    if plan.past:
        notes.append(f"{sum(m.steps for m in plan.past)} earlier releases in the ledger count in epsilon")
    before = (*plan.past, *plan.spent)
    return replace(fitted, mechanisms=(*before, *fitted.mechanisms), statements=(*notes, *fitted.statements))


def _statistics(table: Table, plan: FitPlan, n: int, sigma: float) -> Fitted:
    how = plan.preprocessing
    pieces = how.pieces or _defaults.PIECES
    if isinstance(how, NonPrivateScaling):
        warnings.warn(
            "NonPrivateScaling reads feature statistics from private rows and does not pay for them: the model is not "
            "differentially private (epsilon = inf).", UserWarning, stacklevel=6,
        )  # fmt: skip
        return fit_unprotected(table, pieces)
    if isinstance(how, PublicScaling):
        return fit_public(table, pieces)
    return fit_private(table, sigma, pieces, plan.door, n)


def _center(fitted: Fitted, table: Table, plan: FitPlan, n: int) -> Fitted:
    """Center the features where that is paid for or free, and where the noise leaves something of the mean.

    How much is spent, and whether at all, follows from the declared columns: a multiplier that were chosen by released
    features would not be covered by the accountant, which composes mechanisms fixed beforehand.
    """
    if isinstance(plan.preprocessing, NonPrivateScaling):
        return center(fitted, table, 0.0, plan.door, n)
    if isinstance(plan.preprocessing, PublicScaling):
        return fitted
    pieces = plan.preprocessing.pieces or _defaults.PIECES
    mu, width = mu_left(plan), expected_width(plan.columns or table.columns, pieces)
    left = 1 - (plan.preprocessing.share or 0.2)  # no share that is not asked for exceeds 0.2
    share = min(left / 2, _defaults.center_share(center_error(width, 1 / (mu * math.sqrt(0.02)), n)))
    sigma = 1 / (mu * math.sqrt(share))
    return fitted if center_error(width, sigma, n) > 1 else center(fitted, table, sigma, plan.door, n)


def _train(
    table: Table, fitted: Fitted, labels: np.ndarray, classes: int, plan: FitPlan, n: int, look: Mechanism | None = None
) -> Trained:  # fmt: skip
    """The network: for so many classes, or for a number (0)."""
    encoder, chosen = fitted.encoder, dict(plan.chosen)
    if classes == 0:
        chosen["temperature"] = 1.0
        chosen["gradient_cap"] = chosen.get("gradient_cap", 0.3) if plan.loss == "huber" else None
    outputs = classes if classes > 2 else 1
    settings = _defaults.settings(n, plan.epsilon, encoder.width, outputs, chosen)
    small = n * encoder.width * 4 <= _IN_MEMORY  # by public numbers: one record must not decide how others are rounded
    features = torch.from_numpy(encoder.transform(table.values)) if small else _half(table, encoder)
    weights = None if plan.weights is None else torch.from_numpy(np.asarray(plan.weights, dtype=np.float64))
    if classes > 2:
        y = torch.from_numpy(np.where((labels >= 0) & (labels < classes), labels, UNKNOWN).astype(np.int64))
    else:  # a label beyond [0, 1], or one that is no number, contributes nothing
        y = torch.from_numpy(np.asarray(labels, dtype=np.float32))
    records, loss = Records(features, y, weights), _loss(classes, settings)
    return train(records, outputs, loss, settings, plan, fitted.mechanisms, n, look)


def _loss(classes: int, settings: Settings) -> losses.Loss:
    if classes == 0:
        return losses.L1() if settings.cap is None else losses.Huber(delta=settings.cap)
    kind = losses.BCEWithLogits if classes == 2 else losses.CrossEntropy
    return kind(temperature=settings.temperature, scale_by_temperature=True, cap=settings.cap)


def _half(table: Table, encoder: Encoder) -> torch.Tensor:
    """Features of a large table, encoded once and kept in half precision: in memory, or in a file without a name.

    Formal guarantees:
        A row depends on its own record and the released encoder alone; its norm is taken from the rounded numbers.
    """
    shape = (len(table), encoder.width)
    if 2 * shape[0] * shape[1] <= _MAPPED:
        kept = torch.empty(shape, dtype=torch.float16)
    else:  # nobody else can open it, and no kill leaves it behind
        with tempfile.TemporaryFile(prefix="weightclip-") as file:
            kept = torch.from_numpy(np.memmap(file, dtype=np.float16, mode="w+", shape=shape))
    for start in range(0, len(table), BLOCK):
        part = encoder.transform(np.asarray(table.values[start : start + BLOCK]))
        kept[start : start + BLOCK] = torch.from_numpy(part)
    return kept
