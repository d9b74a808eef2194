"""Scores against their definitions, and the signed-rank test against exact cases."""

from __future__ import annotations

import numpy as np
import pytest

from weightclip_studies.tables._metrics import area_under_curve, expected_calibration_error, holm, metrics, wilcoxon_p


def test_binary_scores():
    p = np.array([[0.9, 0.1], [0.4, 0.6], [0.2, 0.8], [0.7, 0.3]])
    y = np.array([0, 1, 1, 1])
    found = metrics(p, y)
    assert found["accuracy"] == 0.75
    assert found["auc"] == 1.0  # every positive ranks above the negative
    assert found["log_loss"] == pytest.approx(-np.log([0.9, 0.6, 0.8, 0.3]).mean())


def test_several_classes_leave_out_absent_ones():
    p = np.array([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.6, 0.3, 0.1]])
    assert metrics(p, np.array([0, 1, 0]))["auc"] == 1.0


def test_not_a_number_is_judged_not_raised():
    assert metrics(np.full((4, 2), np.nan), np.array([0, 0, 1, 1]))["accuracy"] == 0.5


def test_calibration_error():
    p = np.array([[0.3, 0.7]] * 10)
    y = np.array([1] * 7 + [0] * 3)
    assert expected_calibration_error(p, y) == pytest.approx(0.0, abs=1e-12)
    assert expected_calibration_error(p, np.ones(10, dtype=int)) == pytest.approx(0.3)


def test_signed_rank():
    a = np.arange(10) / 100
    assert wilcoxon_p(a, a) == 1.0
    assert wilcoxon_p(a + 0.5 + a, a) == pytest.approx(2 / 2**10)  # all ten pairs point one way: exact
    assert wilcoxon_p(0.1 + 0.2 * np.ones(10), 0.3 * np.ones(10)) == 1.0  # rounding is not a difference


def test_holm():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])  # 3 x .01, 2 x .03, and never less than before
    assert holm([]) == [] and holm([0.2]) == [0.2] and holm([0.9, 0.6]) == [1.0, 1.0]


def test_area_under_curve_agrees_with_scikit_learn():
    from sklearn.metrics import roc_auc_score

    rng = np.random.default_rng(0)
    y = rng.uniform(size=200) < 0.3
    score = np.round(rng.normal(size=200) + y, 1)  # with ties
    assert area_under_curve(score, y) == pytest.approx(roc_auc_score(y, score))
    assert area_under_curve(score, np.zeros(200, dtype=bool)) == 0.5
