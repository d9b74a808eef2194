"""scikit-learn's own checks, all of them, on both estimators."""

from __future__ import annotations

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from weightclip.estimators import LipDPClassifier, LipDPRegressor

# Few steps: what is checked is the contract, not the accuracy.
QUICK = {"epochs": 2, "batch_fraction": 0.5, "delta": 1e-5, "accountant": "rdp"}


@pytest.mark.filterwarnings("ignore")  # data sets of ten records: delta, columns and classes are warned about
@parametrize_with_checks([LipDPClassifier(**QUICK), LipDPRegressor(**QUICK)])
def test_scikit_learn(estimator, check):
    check(estimator)
