"""Deliberate leaks around the mechanism of a fit: the estimators' audit must find every one of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tests.cli import test_train_private
from tests.tabular import test_search, test_target

import weightclip.tabular._base as base
import weightclip.tabular._estimators as classifier
import weightclip.tabular._fit as fit
import weightclip.tabular._table as table
import weightclip.tabular._target as target
from weightclip.audit._estimators import canaries, estimator_check
from weightclip.tabular import files
from weightclip.tabular._columns import Column
from weightclip.tabular._private import Door


def codes_by_equality(patch):
    real = table.Coder.__call__

    def call(self, values):
        seen: dict = {}
        return np.array([seen.setdefault(v, real(self, [v])[0]) for v in values])

    patch.setattr(table.Coder, "__call__", call)


def labels_of_one_type(patch):
    def places_of(y, classes):
        places = {label: i for i, label in enumerate(classes.tolist())}
        return np.array([places.get(label, -1) for label in y.tolist()])

    patch.setattr(classifier, "labels", lambda y, declared: np.asarray(y))
    patch.setattr(classifier, "places_of", places_of)


def whole_numbers_are_flags(patch):
    real = base.array_kinds
    patch.setattr(base, "array_kinds", lambda dtype, n: real(np.dtype(bool) if dtype.kind in "iu" else dtype, n))


def kinds_read_from_values(patch):
    def kinds(columns, sigma, streams, label):
        return ["categorical" if any(isinstance(v, str) for v in c) else "numeric" for c in columns]

    patch.setattr(fit, "column_kinds", kinds)


def lists_become_arrays(patch):
    real = base.LipDP._arrays
    patch.setattr(base.LipDP, "_arrays", lambda self, X, reset: real(self, np.asarray(X), reset))


def ranges_read_from_values(patch):
    def ranges(chunks, columns, sigma, streams, label):
        blocks = [block[:, columns] for block in chunks()]
        highest = np.nanmax(np.concatenate(blocks), axis=0)
        return [(0.0, float(min(h, 1e12))) for h in highest]

    patch.setattr(target, "ranges", ranges)


MUTANTS = [
    (codes_by_equality, "True among ones"), (codes_by_equality, "1.00 among 1.0"),
    (labels_of_one_type, "text in a list of labels"), (whole_numbers_are_flags, "missing value among whole numbers"),
    (kinds_read_from_values, "text among booleans"), (lists_become_arrays, "text in a list of lists"),
    (ranges_read_from_values, "a target far away"),
]  # fmt: skip


@pytest.mark.parametrize("leak, canary", MUTANTS, ids=[f"{m.__name__}, {c}" for m, c in MUTANTS])
def test_the_audit_finds_the_leak(leak, canary, monkeypatch):
    leak(monkeypatch)
    found = estimator_check(
        next(c for c in canaries() if c.name == canary), runs=160 if leak is labels_of_one_type else 80
    )
    assert found.violation and found.measured > found.allowed and not math.isnan(found.measured)


def test_noise_of_a_score_that_is_keyed_by_the_run_alone_is_found(monkeypatch):
    """The noise then meets two sums, and a seeded search on neighbouring tables shows their difference."""
    patched = lambda self, values, sigma, label: self.streams.numpy(label).standard_normal(values.shape)  # noqa: E731
    monkeypatch.setattr(Door, "noise", patched)
    with pytest.raises(AssertionError):
        test_search.test_noise_of_a_score_belongs_to_the_score_it_is_added_to(monkeypatch)


def test_a_last_look_that_believes_all_predictions_is_found(monkeypatch):
    monkeypatch.setattr(fit, "agreement", lambda *_: (1.0, 0.0))
    with pytest.raises(AssertionError):
        test_target.test_no_fit_is_worse_than_the_mean_by_more_than_the_means_own_error()


def test_a_last_look_that_does_not_cut_is_found(monkeypatch):
    monkeypatch.setattr(target, "_cut", lambda x, center, unit: np.nan_to_num((x - center) / unit))
    with pytest.raises(AssertionError):
        test_target.test_one_record_moves_the_sums_by_no_more_than_the_noise_assumes((9.0, 9.0), None, monkeypatch)


def test_kinds_of_parquet_columns_that_are_read_from_values_are_found(tmp_path, capsys, monkeypatch):
    def kinds(self):
        first = {name: values[:1000] for name, values in next(iter(self.blocks())).items()}
        flags = {name: any(isinstance(v, (bool, np.bool_)) for v in values) for name, values in first.items()}
        return {name: Column(name, "flag" if flag else "numeric") for name, flag in flags.items()}

    pytest.importorskip("pyarrow")
    monkeypatch.setattr(files.File, "kinds", kinds)
    with pytest.raises(AssertionError):
        test_train_private.test_kinds_of_parquet_columns_come_from_its_schema(tmp_path, capsys)
