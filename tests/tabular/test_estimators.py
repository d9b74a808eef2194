from __future__ import annotations

import json
import math
import pickle
import warnings

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

from weightclip.errors import WeightclipError
from weightclip.tabular._columns import Schema
from weightclip.tabular._estimators import LipDPClassifier, LipDPRegressor
from weightclip.tabular._inputs import PrivacyCostWarning
from weightclip.tabular._plan import NonPrivateScaling, PrivateScaling, PublicScaling
from weightclip.tabular._report import recompute

RNG = np.random.default_rng(0)
X = RNG.uniform(-1, 1, (1500, 3))
Y = np.where(X[:, 0] + X[:, 1] > 0, "yes", "no")
QUICK = {"epochs": 3, "delta": 1e-5, "random_state": 0, "accountant": "rdp"}


def independent(report) -> float:
    """ε from the fields of a report with dp-accounting's own accountant, nothing of ours."""
    accountant = PLDAccountant(value_discretization_interval=1e-4)
    for m in report["mechanisms"]:
        assert m["kind"] == "gaussian"
        event = dp_accounting.GaussianDpEvent(m["sigma"])
        event = event if m["q"] == 1 else dp_accounting.PoissonSampledDpEvent(m["q"], event)
        accountant.compose(dp_accounting.SelfComposedDpEvent(event, m["steps"]))
    return accountant.get_epsilon(report["delta"])


@pytest.mark.parametrize("bounds", [None, (-1, 1)])
@pytest.mark.parametrize("epsilon", [0.5, 3.0])
def test_epsilon_is_true(bounds, epsilon):
    model = LipDPClassifier(epsilon, feature_bounds=bounds, epochs=5, random_state=0).fit(X, Y)
    report = model.privacy_report_
    assert json.loads(json.dumps(report)) == report
    assert model.epsilon_ == report["epsilon"] <= epsilon
    assert model.epsilon_ > 0.98 * epsilon  # the budget is used
    assert independent(report) == pytest.approx(model.epsilon_, rel=2e-3)
    assert recompute(report) == pytest.approx(model.epsilon_, rel=1e-9)
    assert len(report["mechanisms"]) == (4 if bounds is None else 3)
    for m in report["mechanisms"]:
        assert 0 < m["epsilon"] <= model.epsilon_
    for layer in report["layers"]:  # the noise is never less than claimed, nor much more
        assert 1 - 1e-9 <= layer["noise"] / layer["sensitivity"] / report["mechanisms"][-1]["sigma"] <= 1 + 1e-5


def test_learns_and_predicts():
    model = LipDPClassifier(2.0, feature_bounds=(-1, 1), random_state=0).fit(X, Y)
    assert model.score(X, Y) > 0.9
    p = model.predict_proba(X)
    assert p.shape == (1500, 2) and p.sum(axis=1) == pytest.approx(np.ones(1500))
    assert list(model.classes_) == ["no", "yes"]
    assert np.array_equal(model.predict(X) == "yes", model.decision_function(X) > 0)
    y = np.digitize(X[:, 0], [-0.3, 0.3])
    several = LipDPClassifier(3.0, feature_bounds=(-1, 1), random_state=0).fit(X, y)
    assert several.score(X, y) > 0.8 and several.decision_function(X).shape == (1500, 3)


@pytest.mark.parametrize("loss", ["huber", "l1"])
@pytest.mark.parametrize("span", [(-2, 2), None])
def test_regressor(loss, span):
    y = X[:, 0] + X[:, 1]
    model = LipDPRegressor(4.0, loss=loss, target_bounds=span, feature_bounds=(-1, 1), random_state=0).fit(X, y)
    assert model.score(X, y) > 0.6
    low, high = model.model_.target_range
    assert np.all((model.predict(X * 100) >= low) & (model.predict(X * 100) <= high))
    labels = [m["label"] for m in model.privacy_report_["mechanisms"]]
    assert ("range of the target" in labels) == (span is None) and "quantiles of the target" in labels


def test_default_delta_is_public_arithmetic():
    model = LipDPClassifier(epochs=1, random_state=0, accountant="rdp").fit(X, Y)
    assert model.delta_ == pytest.approx(4e-7)  # 1/1500^2 = 4.4e-7
    assert any("delta was set from the number of records" in s for s in model.privacy_report_["not_covered"])
    with pytest.warns(UserWarning, match="above 1/n"):
        LipDPClassifier(epochs=1, delta=0.1, random_state=0, accountant="rdp").fit(X, Y)


def test_scalers_on_raw_rows_are_loud():
    with pytest.warns(UserWarning, match="not differentially private"):
        model = LipDPClassifier(**QUICK, preprocessing=NonPrivateScaling()).fit(X, Y)
    assert model.epsilon_ == math.inf and model.privacy_report_["epsilon"] == "inf"
    assert any(s.startswith("NOT PRIVATE") for s in model.privacy_report_["preprocessing"])


def test_public_scaling_costs_nothing_and_needs_public_ranges():
    model = LipDPClassifier(**QUICK, preprocessing=PublicScaling(), feature_bounds=(-1, 1)).fit(X, Y)
    assert len(model.privacy_report_["mechanisms"]) == 1
    with pytest.raises(WeightclipError, match="no public range"):
        LipDPClassifier(**QUICK, preprocessing=PublicScaling()).fit(X, Y)
    with pytest.raises(WeightclipError, match="target_bounds"):
        LipDPRegressor(**QUICK, preprocessing=PublicScaling(), feature_bounds=(-1, 1)).fit(X, X[:, 0])


def test_share_of_preprocessing_is_as_stated():
    small, large = (
        LipDPClassifier(**QUICK, preprocessing=PrivateScaling(share=s)).fit(X, Y).privacy_report_["mechanisms"]
        for s in (0.05, 0.4)
    )
    assert large[0]["sigma"] == pytest.approx(small[0]["sigma"] * math.sqrt(0.05 / 0.4))
    assert large[-1]["sigma"] > small[-1]["sigma"]
    nearly_all = LipDPClassifier(1.0, delta=1e-5, epochs=3, preprocessing=PrivateScaling(share=0.98)).fit(X, Y)
    assert nearly_all.epsilon_ <= 1.0


def test_classes_in_y_count_as_public_unless_declared():
    taken = LipDPClassifier(**QUICK).fit(X, Y).privacy_report_["not_covered"]
    assert "the list of classes was taken from y" in taken
    declared = LipDPClassifier(**QUICK, classes=["no", "yes", "maybe"]).fit(X, Y)
    assert "the list of classes was taken from y" not in declared.privacy_report_["not_covered"]
    assert declared.predict_proba(X).shape == (1500, 3)
    # labels outside the declared list contribute nothing instead of failing
    assert LipDPClassifier(**QUICK, classes=["no", "never"]).fit(X, Y).predict(X).shape == (1500,)


def test_noise_is_fresh_unless_seeded():
    quick = {**QUICK, "random_state": None}
    a, b = (LipDPClassifier(**quick, feature_bounds=(-1, 1)).fit(X, Y) for _ in range(2))
    assert not np.array_equal(a.predict_proba(X), b.predict_proba(X))
    assert a.privacy_report_["secure_noise"]
    c, d = (LipDPClassifier(**{**quick, "random_state": 5}).fit(X, Y) for _ in range(2))
    assert np.array_equal(c.predict_proba(X), d.predict_proba(X))
    assert "guess random_state" in c.privacy_report_["not_covered"][0]
    for state in (np.random.RandomState(0), np.random.default_rng(0)):
        LipDPClassifier(**{**quick, "random_state": state}).fit(X, Y)
    with pytest.raises(WeightclipError, match="random_state"):
        LipDPClassifier(**{**quick, "random_state": "x"}).fit(X, Y)


def frame(n=800):
    pd = pytest.importorskip("pandas")
    rng = np.random.default_rng(1)
    return pd.DataFrame({
        "age": rng.integers(18, 90, n), "job": rng.choice(["a", "b", "c"], n), "happy": rng.random(n) < 0.5,
        "income": np.where(rng.random(n) < 0.2, np.nan, rng.lognormal(10, 1, n)), "empty": np.full(n, np.nan),
        "constant": 3.0, "id": [f"u{i}" for i in range(n)],
    })  # fmt: skip


def test_frames_with_categories_and_missing_values():
    pl = pytest.importorskip("polars")
    data = frame()
    y = (data["job"] == "a").to_numpy()
    schema = {"columns": [{"name": "age", "type": "numeric", "low": 0, "high": 120}], "ignore": ["id"]}
    model = LipDPClassifier(4.0, delta=1e-5, schema=schema, random_state=0).fit(data, y)
    assert model.score(data, y) > 0.95
    assert "id" not in [c.name for c in model.model_.encoder.columns]
    assert list(model.feature_names_in_) == list(data.columns)
    same = model.predict_proba(pl.from_pandas(data))
    assert same == pytest.approx(model.predict_proba(data))
    strange = data.assign(job="never seen", happy=None, income=np.inf, age=-5)
    assert np.all(np.isfinite(model.predict_proba(strange)))
    labels = [m["label"] for m in model.privacy_report_["mechanisms"]]
    assert labels[:3] == ["ranges of 3 columns", "categories of 1 columns", "quantiles of 4 columns"]


def test_declared_categories_and_bounds_are_free():
    data = frame()[["age", "job", "happy"]]
    y = (data["job"] == "a").to_numpy()
    model = LipDPClassifier(**QUICK, categories={"job": ["a", "b", "c"]}, feature_bounds={"age": (0, 120)}).fit(data, y)
    assert [m["label"] for m in model.privacy_report_["mechanisms"]] == [
        "quantiles of 1 columns", "means of 10 features", "noisy gradients"
    ]  # fmt: skip
    # flags need no quantiles; whole numbers are no flags, because one missing value makes them floats
    flags = RNG.integers(0, 2, (500, 4))
    one = LipDPClassifier(**QUICK).fit(flags.astype(bool), flags[:, 0])
    assert [m["label"] for m in one.privacy_report_["mechanisms"]] == ["means of 4 features", "noisy gradients"]
    for array in (flags, flags * 1.0):
        model = LipDPClassifier(**QUICK, feature_bounds=(0, 1)).fit(array, flags[:, 0])
        assert model.privacy_report_["mechanisms"][0]["label"] == "quantiles of 4 columns"


@pytest.mark.parametrize("change, match", [
    ({"epsilon": 0}, "epsilon"), ({"epsilon": math.inf}, "epsilon"), ({"delta": 1.0}, "delta"), ({"delta": 0}, "delta"),
    ({"preprocessing": "standard"}, "preprocessing"), ({"feature_bounds": (1,)}, "feature_bounds"),
    ({"feature_bounds": ([0, 1], [1, 2])}, "feature_bounds"), ({"feature_bounds": (1, -1)}, "low <= high"),
    ({"feature_bounds": {"z": (0, 1)}}, "'z'"), ({"categories": {"z": ["a"]}}, "'z'"),
    ({"schema": {"ignore": ["0", "1", "2"]}}, "no columns are left"), ({"classes": ["a", "a"]}, "twice"),
    ({"accountant": "moments"}, "accountant"), ({"hidden_layer_sizes": (0,)}, "hidden"),
    ({"learning_rate": -1}, "learning_rate"),
])  # fmt: skip
def test_bad_parameters_fail_with_one_line(change, match):
    with pytest.raises(WeightclipError, match=match) as caught:
        LipDPClassifier(**{**QUICK, **change}).fit(X, Y)
    assert "\n" not in str(caught.value)


def test_bad_pieces():
    with pytest.raises(WeightclipError, match="pieces"):
        PrivateScaling(pieces=0)
    with pytest.raises(WeightclipError, match="share"):
        PrivateScaling(share=1.0)


def test_ten_rows_and_a_thousand_classes():
    tiny = LipDPClassifier(random_state=0, accountant="rdp").fit(X[:10], Y[:10])
    assert tiny.predict(X).shape == (1500,) and tiny.epsilon_ <= 1.0
    y = RNG.integers(0, 1000, 3000)
    with pytest.warns(UserWarning, match="classes share one budget"):
        model = LipDPClassifier(**QUICK, feature_bounds=(-1, 1)).fit(RNG.uniform(-1, 1, (3000, 2)), y)
    assert model.predict_proba(X[:5, :2]).shape == (5, len(np.unique(y)))
    with pytest.raises(ValueError, match="one class"):
        LipDPClassifier(**QUICK).fit(X, np.zeros(1500))


@pytest.mark.parametrize("kind", [LipDPClassifier, LipDPRegressor])
def test_a_table_that_holds_nothing(kind):
    data = pytest.importorskip("pandas").DataFrame({"empty": np.array([None] * 40, dtype=object)})
    model = kind(5.0, epochs=2, random_state=1, accountant="rdp").fit(data, np.arange(40) % 2)
    assert np.isfinite(model.predict(data)).all()


def test_works_with_scikit_learn_tools():
    model = LipDPClassifier(**QUICK, feature_bounds=(-1, 1))
    assert clone(model).get_params() == model.get_params()
    piped = make_pipeline(FunctionTransformer(), clone(model)).fit(X, Y)
    again = pickle.loads(pickle.dumps(piped))
    assert np.array_equal(again.predict_proba(X), piped.predict_proba(X))
    with pytest.raises(NotFittedError):
        model.predict(X)


def test_cross_validation_says_what_it_costs():
    model = LipDPClassifier(**QUICK, feature_bounds=(-1, 1))
    with pytest.warns(PrivacyCostWarning, match="add up"):
        cross_val_score(model, X, Y, cv=2)
    with pytest.warns(PrivacyCostWarning):
        search = GridSearchCV(model, {"learning_rate": [0.01, 0.1]}, cv=2).fit(X, Y)
    assert search.best_params_["learning_rate"] in (0.01, 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(X, Y)


def test_verbose_and_threads(capfd):
    import torch

    before = torch.get_num_threads()
    LipDPClassifier(**QUICK, verbose=1, n_jobs=1).fit(X, Y)
    assert "step" in capfd.readouterr().err and torch.get_num_threads() == before


def test_schema_objects_and_files(tmp_path):
    described = {"columns": [{"name": str(j), "type": "numeric", "low": -1, "high": 1} for j in range(3)]}
    (tmp_path / "s.json").write_text(json.dumps(described))
    for schema in (described, Schema.from_json(described), tmp_path / "s.json"):
        model = LipDPClassifier(**QUICK, schema=schema).fit(X, Y)
        assert [m["label"] for m in model.privacy_report_["mechanisms"]][0] == "quantiles of 3 columns"


def test_large_tables_are_encoded_once_in_half_precision(monkeypatch, tmp_path):
    import os
    import tempfile

    import weightclip.tabular._fit as fit

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen = []
    real = fit.train

    def watched(records, *rest, **settings):
        seen.append((records.features.clone(), os.listdir(tmp_path)))
        return real(records, *rest, **settings)

    monkeypatch.setattr(fit, "train", watched)
    LipDPClassifier(**QUICK).fit(X, Y)
    monkeypatch.setattr(fit, "_IN_MEMORY", 0)
    half = LipDPClassifier(**QUICK).fit(X, Y)
    monkeypatch.setattr(fit, "_MAPPED", 0)  # larger still: in a file that has no name
    mapped = LipDPClassifier(**QUICK).fit(X, Y)
    assert [str(x.dtype) for x, _ in seen] == ["torch.float32", "torch.float16", "torch.float16"]
    assert seen[1][0].float().numpy() == pytest.approx(seen[0][0].numpy(), abs=1e-3)
    assert half.score(X, Y) > 0.8 and np.array_equal(mapped.predict_proba(X), half.predict_proba(X))
    assert all(files == [] for _, files in seen)
