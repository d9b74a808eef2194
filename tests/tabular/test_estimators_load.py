"""Saved estimators: columns by name, ignored columns, labels as they were, and settings refused by name."""

from __future__ import annotations

import math

import numpy as np
import pytest

from weightclip.errors import WeightclipError
from weightclip.tabular._estimators import LipDPClassifier, LipDPRegressor
from weightclip.tabular._inputs import class_list
from weightclip.tabular._plan import PrivateScaling, PublicScaling

pd = pytest.importorskip("pandas")

RNG = np.random.default_rng(0)
N = 600
FRAME = pd.DataFrame({"signal": RNG.uniform(-1, 1, N), "noise": RNG.uniform(-1, 1, N), "id": np.arange(N)})
Y = FRAME["signal"].to_numpy() > 0
QUICK = {"accountant": "rdp", "random_state": 0, "epsilon": 8.0, "delta": 1e-5}


def fit(X=FRAME, y=Y, **options):
    return LipDPClassifier(
        **{**QUICK, "epochs": 10, "feature_bounds": {"signal": (-1, 1), "noise": (-1, 1)}, **options}
    ).fit(X, y)


def test_a_loaded_model_finds_its_columns_by_name(tmp_path):
    model = fit(FRAME[["signal", "noise"]])
    model.save(tmp_path / "m")
    again = LipDPClassifier.load(tmp_path / "m")
    assert list(again.feature_names_in_) == ["signal", "noise"]
    expected = model.predict_proba(FRAME[["signal", "noise"]])
    for frame in (FRAME[["noise", "signal"]], FRAME[["id", "noise", "signal"]]):
        assert np.array_equal(again.predict_proba(frame), expected)
    assert again.score(FRAME[["noise", "signal"]], Y) > 0.9
    with pytest.raises(WeightclipError, match="column 'noise' is missing"):
        again.predict(FRAME[["signal"]])


@pytest.mark.parametrize("named", [True, False])
def test_a_loaded_model_predicts_its_own_table_after_ignore(tmp_path, named):
    X = FRAME if named else FRAME.to_numpy()
    ignored = "id" if named else "2"
    model = fit(X, schema={"ignore": [ignored]}, feature_bounds=None)
    model.save(tmp_path / "m")
    again = LipDPClassifier.load(tmp_path / "m")
    assert np.array_equal(again.predict_proba(X), model.predict_proba(X))
    assert again.n_features_in_ == 3


@pytest.mark.parametrize("labels", [
    (False, True), (0, 1), (-1.0, 2.0), ("no", "yes"), (np.int32(3), np.int32(7)),
], ids=str)  # fmt: skip
def test_labels_stay_what_they_were(tmp_path, labels):
    y = np.array(labels)[Y.astype(int)]
    model = fit(y=y, feature_bounds=None, epochs=1)
    model.save(tmp_path / "m")
    again = LipDPClassifier.load(tmp_path / "m")
    assert again.classes_.dtype.kind == y.dtype.kind
    assert np.array_equal(again.predict(FRAME), model.predict(FRAME))
    assert math.isfinite(again.score(FRAME, y))


def test_more_categories_than_hash_buckets_are_saved_and_loaded(tmp_path):
    words = [f"w{i}" for i in range(9000)]
    X = pd.DataFrame({"word": [words[8500 + i % 400] for i in range(N)], "signal": FRAME["signal"]})
    model = fit(X, categories={"word": words}, feature_bounds={"signal": (-1, 1)}, preprocessing=PublicScaling(),
                hidden_layer_sizes=(), epochs=1)  # fmt: skip
    model.save(tmp_path / "m")
    assert np.array_equal(LipDPClassifier.load(tmp_path / "m").predict_proba(X), model.predict_proba(X))


def test_numpy_numbers_are_numbers():
    model = fit(
        epochs=np.int64(2), batch_fraction=np.float64(0.25), learning_rate=np.float32(0.05), n_records=np.int64(N),
        hidden_layer_sizes=np.array([4]), temperature=np.float64(0.5), epsilon=np.float64(4), delta=np.float64(1e-6),
        preprocessing=PrivateScaling(pieces=np.int64(3)), random_state=np.int64(1),  # type: ignore[arg-type]
    )  # fmt: skip
    assert model.n_iter_ == 8
    assert model.privacy_report_["public"]["settings"]["epochs"] == 2


@pytest.mark.parametrize("change, match", [
    ({"batch_fraction": 0}, "batch_fraction must be a number in"), ({"batch_fraction": 1.5}, "batch_fraction"),
    ({"epochs": "3"}, "epochs must be a positive number"), ({"epochs": True}, "epochs"), ({"epochs": -1}, "epochs"),
    ({"hidden_layer_sizes": "16"}, "hidden_layer_sizes"), ({"hidden_layer_sizes": (2.5,)}, "hidden_layer_sizes"),
    ({"classes": 5}, "classes must be a list of labels"), ({"classes": "ab"}, "classes must be a list"),
    ({"classes": [[1, 2], [3, 4]]}, "single labels"), ({"classes": [1, None]}, "single labels"),
    ({"epsilon": 1e-9}, "epsilon must be at least 0.0001"), ({"epsilon": math.nan}, "epsilon"),
    ({"delta": 0.99}, "delta must be from"), ({"delta": 1e-30}, "delta must be from"), ({"joint_cap": 0}, "joint_cap"),
])  # fmt: skip
def test_settings_without_sense_fail_with_one_line(change, match):
    with pytest.raises(WeightclipError, match=match) as caught:
        fit(**change)
    assert "\n" not in str(caught.value)


def test_declared_classes_of_several_types_stay_apart():
    assert class_list([True, "yes", 3]).tolist() == [True, "yes", 3]
    assert class_list(pd.Series(["a", "b"])).tolist() == ["a", "b"]


def test_a_regressor_too(tmp_path):
    model = LipDPRegressor(**QUICK, epochs=2, target_bounds=(-1, 1)).fit(FRAME, FRAME["signal"].to_numpy())
    model.save(tmp_path / "m")
    shuffled = FRAME[["id", "noise", "signal"]]
    assert np.array_equal(LipDPRegressor.load(tmp_path / "m").predict(shuffled), model.predict(FRAME))
