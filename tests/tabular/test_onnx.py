from __future__ import annotations

import numpy as np
import pytest
import torch

from weightclip.models import MLP
from weightclip.tabular._estimators import LipDPClassifier, LipDPRegressor

onnxruntime = pytest.importorskip("onnxruntime")
pd = pytest.importorskip("pandas")

RNG = np.random.default_rng(0)
N = 300
FRAME = pd.DataFrame({
    "a": RNG.normal(2000, 10, N), "b": np.where(RNG.random(N) < 0.3, np.nan, RNG.lognormal(3, 2, N)),
    "c": RNG.choice(["x", "y", None], N), "d": RNG.choice(["u", "v"], N), "e": RNG.random(N) < 0.5,
})  # fmt: skip
STRANGE = pd.concat([FRAME, pd.DataFrame({"a": [1e30, -np.inf], "b": [np.inf, 0], "c": ["new", "x"], "d": ["u", "w"],
                                          "e": [True, False]})])  # fmt: skip


@pytest.mark.parametrize("hidden", [(), (8,), (6, 5)])
@pytest.mark.parametrize("classes", [2, 4, 0])
def test_predictions_agree(hidden, classes, tmp_path):
    kind = LipDPClassifier if classes else LipDPRegressor
    y = RNG.integers(0, classes, N) if classes else FRAME["a"].to_numpy()
    model = kind(
        epsilon=20, delta=1e-6, epochs=2, hidden_layer_sizes=hidden, categories={"d": ["u", "v"]}, random_state=0,
        accountant="rdp",
    ).fit(FRAME, y)  # fmt: skip
    model.to_onnx(tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    (got,) = session.run(None, {"raw": model.raw(STRANGE)})
    if classes:
        assert np.abs(got - model.predict_proba(STRANGE)).max() < 1e-5
    else:
        assert got[:, 0] == pytest.approx(model.predict(STRANGE), rel=1e-5)

    module = model.to_torch()
    plain = MLP(model.encode(FRAME).shape[1], hidden, max(1, classes if classes > 2 else 1))
    plain.load_state_dict(module.state_dict())  # no key of ours in it
    with torch.no_grad():
        z = plain(torch.from_numpy(model.encode(STRANGE))).numpy()
    assert np.abs(z - model.model_.logits(model.raw(STRANGE))).max() < 1e-5


def test_huge_and_missing_numbers_agree():
    """Beyond the range of float32 a number is still a number."""
    X = RNG.uniform(-1, 1, (N, 2))
    X[::5, 0] = np.nan
    model = LipDPClassifier(epsilon=20, delta=1e-6, epochs=2, random_state=0, accountant="rdp").fit(X, X[:, 1] > 0)
    session = onnxruntime.InferenceSession(model.to_onnx().SerializeToString())
    extreme = [s * m for m in (1e38, 3.5e38, 1e39, 1e100, 1.7e308, np.inf) for s in (1, -1)] + [np.nan, 5e-324]
    rows = np.array([[a, b] for a in extreme for b in extreme])
    (got,) = session.run(None, {"raw": rows})
    assert np.abs(got - model.predict_proba(rows)).max() < 1e-5
