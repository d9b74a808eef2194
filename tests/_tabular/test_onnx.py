from __future__ import annotations

import numpy as np
import pytest
import torch

from weightclip.estimators import LipDPClassifier, LipDPRegressor
from weightclip.models import MLP

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
