"""What a model looks at, from the model alone and on public records, and probabilities that mean what they say."""

from __future__ import annotations

import json

import numpy as np
import pytest
from sklearn.feature_selection import RFE, SelectFromModel
from sklearn.metrics import log_loss

from weightclip.errors import WeightclipError
from weightclip.tabular._estimators import LipDPClassifier, LipDPRegressor
from weightclip.tabular._explain import calibrate, model_importances, public_importances

pd = pytest.importorskip("pandas")

RNG = np.random.default_rng(0)
N = 3000
FRAME = pd.DataFrame({"id": np.arange(N), "strong": RNG.uniform(-1, 1, N), "weak": RNG.uniform(-1, 1, N),
                      "nothing": RNG.uniform(-1, 1, N), "kind": RNG.choice(["a", "b"], N)})  # fmt: skip
SCORE = FRAME["strong"] + 0.3 * FRAME["weak"]
OPTIONS = {"epsilon": 4.0, "delta": 1e-6, "accountant": "rdp", "random_state": 0, "schema": {"ignore": ["id"]}}


@pytest.fixture(scope="module")
def models():
    classifier = LipDPClassifier(**OPTIONS).fit(FRAME[:2000], (SCORE > 0)[:2000])
    return classifier, LipDPRegressor(**OPTIONS, target_bounds=(-1.3, 1.3)).fit(FRAME[:2000], SCORE[:2000])


@pytest.mark.parametrize("which", [0, 1])
def test_importances_from_the_model_alone(models, which) -> None:
    shares = dict(zip(FRAME.columns, models[which].feature_importances_, strict=True))
    assert sum(shares.values()) == pytest.approx(1) and shares["id"] == 0
    assert shares["strong"] > 2 * max(share for name, share in shares.items() if name != "strong")
    assert np.array_equal(models[which].feature_importances_, models[which].feature_importances_)


@pytest.mark.parametrize("which", [0, 1])
def test_importances_on_public_records(models, which) -> None:
    y = (SCORE > 0)[2000:] if which == 0 else SCORE[2000:]
    found = public_importances(models[which], FRAME[2000:], y, repeats=3)
    fall = dict(zip(found.names, found.mean, strict=True))
    assert max(fall, key=fall.get) == "strong" and fall["strong"] > 0.2  # type: ignore[arg-type]
    assert abs(fall["nothing"]) < 0.05 and "public records" in str(found)
    assert json.loads(json.dumps(found.to_json()))["columns"][0]["column"] == "strong"


def test_an_unfit_question() -> None:
    model = LipDPClassifier(**OPTIONS, epochs=1).fit(FRAME, SCORE > 0)
    with pytest.raises(WeightclipError, match="repeats"):
        public_importances(model, FRAME, SCORE > 0, repeats=0)
    with pytest.raises(WeightclipError, match="at least two records"):
        public_importances(model, FRAME, SCORE[:5] > 0)


@pytest.mark.filterwarnings("ignore")  # each fit of RFE is a release of its own, which is warned about
def test_selectors_of_scikit_learn_find_importances(models) -> None:
    numbers = FRAME[["strong", "nothing"]].to_numpy()
    options = {**OPTIONS, "schema": None, "feature_bounds": (-1, 1)}
    chosen = RFE(LipDPClassifier(**options), n_features_to_select=1).fit(numbers, SCORE > 0)
    assert chosen.support_.tolist() == [True, False]
    kept = SelectFromModel(models[0], prefit=True).transform(FRAME.to_numpy())
    assert kept.shape[1] < FRAME.shape[1]


def test_calibration_on_public_records(models) -> None:
    model, _ = models
    labels = RNG.random(1000) < np.where(SCORE[2000:] > 0, 0.7, 0.3)  # public records with far more doubt
    cooler = calibrate(model, FRAME[2000:], labels)
    assert log_loss(labels, cooler.predict_proba(FRAME[2000:])) < log_loss(labels, model.predict_proba(FRAME[2000:]))
    assert np.array_equal(cooler.predict(FRAME), model.predict(FRAME))
    assert cooler.model_ is not model.model_ and cooler.epsilon_ == model.epsilon_
    with pytest.raises(WeightclipError, match="classifier"):
        calibrate(models[1], FRAME, SCORE)
    with pytest.raises(WeightclipError, match="known class"):
        calibrate(model, FRAME, ["x"] * N)


def test_calibration_of_several_classes() -> None:
    y = np.digitize(SCORE, [-0.4, 0.4])
    model = LipDPClassifier(**OPTIONS).fit(FRAME[:2000], y[:2000])
    better = calibrate(model, FRAME[2000:], y[2000:])
    assert log_loss(y[2000:], better.predict_proba(FRAME[2000:])) <= log_loss(
        y[2000:], model.predict_proba(FRAME[2000:])
    )


def test_a_model_without_categories_can_be_explained() -> None:
    frame = pd.DataFrame({"word": [f"w{i}" for i in range(50)] * 4})
    model = LipDPClassifier(epochs=1, delta=1e-5, random_state=0, accountant="rdp").fit(frame, np.arange(200) % 2)
    assert model_importances(model.model_).names == ("word",) and model.feature_importances_.shape == (1,)
