"""The committed comparison holds what the documentation says of it."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

TABLE = Path(__file__).parents[2] / "results/estimators/compare.csv"
SEVEN = {"adult", "android", "breast_cancer", "default_credit", "dropout", "german_credit", "nursery"}
HELD_OUT = {"spambase", "sqf", "law", "islp_default"}


@pytest.fixture(scope="module")
def rows():
    with TABLE.open(encoding="utf-8") as file:
        return {(r["dataset"], r["estimator"], r["epsilon"]): r for r in csv.DictReader(file)}


def test_every_model_ran_on_every_set_with_ten_seeds(rows):
    models = {"LipDPClassifier", "LipDPClassifier tuned", "DP-SGD tuned", "diffprivlib GaussianNB"}
    for dataset in SEVEN | HELD_OUT:
        assert all((dataset, model, "1") in rows for model in models)
        assert (dataset, "gradient boosting (not private)", "inf") in rows
        assert (dataset, "DP-EBM", "1") in rows or dataset == "nursery"  # it has no multi-class model
    assert all(row["seeds"] == "10" for row in rows.values())


@pytest.mark.parametrize("metric", ["accuracy", "auc"])
def test_default_is_at_or_above_dp_ebm(rows, metric):
    pairs = [(rows[d, "LipDPClassifier", e], row) for (d, name, e), row in rows.items() if name == "DP-EBM"]
    assert len(pairs) == 16
    behind = {("islp_default", "1"): 0.005} if metric == "auc" else {}  # the one number that docs/estimators.md names
    for ours, theirs in pairs:
        room = behind.get((ours["dataset"], ours["epsilon"]), 0.0)
        assert float(ours[metric]) >= float(theirs[metric]) - room, (ours, theirs)
        assert ours["delta"] == theirs["delta"]


def test_default_is_within_two_points_of_the_tuned_one(rows):
    for dataset in SEVEN | HELD_OUT:
        default, tuned = (float(rows[dataset, f"LipDPClassifier{s}", "1"]["accuracy"]) for s in ("", " tuned"))
        assert default >= tuned - 0.02, dataset
