"""scikit-learn's own checks on both estimators: all but three, which bounded influence rules out."""

from __future__ import annotations

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from weightclip.tabular._estimators import LipDPClassifier, LipDPRegressor

# Few steps: what is checked is the contract, not the accuracy.
QUICK = {"epochs": 2, "batch_fraction": 0.5, "delta": 1e-5, "accountant": "rdp"}

# What bounded influence rules out: a weight is the chance to take part, at most one, and no value of it stops a fit.
BOUNDED = {
    "check_sample_weight_equivalence_on_dense_data": "a weight of two would be twice the influence of one record",
    "check_sample_weight_equivalence_on_sparse_data": "a weight of two would be twice the influence of one record",
    "check_all_zero_sample_weights_error": "an error that depends on private weights would tell them",
}


@pytest.mark.filterwarnings("ignore")  # data sets of ten records: delta, columns and classes are warned about
@parametrize_with_checks([LipDPClassifier(**QUICK), LipDPRegressor(**QUICK)], expected_failed_checks=lambda _: BOUNDED)
def test_scikit_learn(estimator, check):
    check(estimator)
