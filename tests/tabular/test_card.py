"""The model card of a table's model: head, columns, and names that cannot break out of their line."""

from __future__ import annotations

import numpy as np
import pytest

from weightclip.tabular import LipDPClassifier, LipDPRegressor, model_card
from weightclip.tabular import folder as _folder

yaml = pytest.importorskip("yaml")
X = np.random.default_rng(0).uniform(-1, 1, (200, 3))
QUICK = {"epochs": 1, "feature_bounds": (-1, 1), "accountant": "rdp"}


def head(card: str) -> dict:
    return yaml.safe_load(card.split("---\n", 2)[1])


@pytest.mark.parametrize(
    "made, target, tag",
    [(LipDPClassifier, X[:, 0] > 0, "tabular-classification"), (LipDPRegressor, X[:, 0], "tabular-regression")],
    ids=["classifier", "regressor"],
)
def test_a_saved_folder_has_a_card_that_the_hub_reads(made, target, tag, tmp_path) -> None:
    bounds = {"target_bounds": (-1, 1)} if made is LipDPRegressor else {}
    model = made(**QUICK, **bounds).fit(X, target)
    card = (model.save(tmp_path / "m") / "README.md").read_text()
    found = head(card)
    assert found["pipeline_tag"] == tag and {"differential-privacy", "dp-sgd"} <= set(found["tags"])
    privacy = found["differential_privacy"]
    assert privacy["epsilon"] == model.privacy_report_["epsilon"] and privacy["delta"] == model.delta_
    assert privacy["accountant"] == "rdp" and privacy["secret_noise"] is True
    assert model.privacy_report_["statement"] in card and all(
        f"- {s}" in card for s in model.privacy_report_["not_covered"]
    )


def test_names_of_columns_and_encoders_stay_on_their_line(tmp_path) -> None:
    model = LipDPClassifier(**QUICK).fit(X, X[:, 0] > 0)
    _, pipeline, report = _folder.load(model.save(tmp_path / "m"))
    pipeline["columns"][0]["name"] = "a\n---\ntags: | `x`"
    pipeline["target"] = "b\n# c"
    pipeline["text"] = {"column": "words\n# d", "encoder": "minilm", "sha256": "0"}
    card = model_card(pipeline, report)
    assert "| a --- tags: \\| 'x' | numeric |" in card and "model for `b # c`\n" in card
    assert "text of column words # d, read through the encoder minilm" in card and head(card)["tags"]
