from __future__ import annotations

import json
import os
import pickle

import numpy as np
import pytest

from weightclip.errors import WeightclipError
from weightclip.tabular import folder as _folder
from weightclip.tabular._estimators import LipDPClassifier, LipDPRegressor
from weightclip.tabular._model import Model
from weightclip.tabular._plan import PublicScaling

RNG = np.random.default_rng(0)
X = RNG.uniform(-1, 1, (200, 3))


@pytest.fixture(scope="module")
def fitted():
    quick = {"epochs": 2, "feature_bounds": (-1, 1), "preprocessing": PublicScaling(), "accountant": "rdp"}
    return LipDPClassifier(**quick, random_state=0).fit(X, X[:, 0] > 0), LipDPRegressor(
        **quick, random_state=0, target_bounds=(-1, 1)
    ).fit(X, X[:, 0])


def test_round_trip(fitted, tmp_path):
    classifier, regressor = fitted
    classifier.save(tmp_path / "c")
    again = LipDPClassifier.load(tmp_path / "c")
    assert np.array_equal(again.predict_proba(X), classifier.predict_proba(X))
    assert again.epsilon_ == classifier.epsilon_ and again.privacy_report_ == classifier.privacy_report_
    regressor.save(tmp_path / "r")
    assert np.array_equal(LipDPRegressor.load(tmp_path / "r").predict(X), regressor.predict(X))
    with pytest.raises(WeightclipError, match="is for regression"):
        LipDPClassifier.load(tmp_path / "r")


def test_folder_holds_what_it_should_and_nothing_that_runs(fitted, tmp_path):
    folder = fitted[0].save(tmp_path / "m")
    names = {"weights.safetensors", "pipeline.json", "privacy.json", "README.md", "checksums.json"}
    assert {p.name for p in folder.iterdir()} == names
    assert fitted[0].privacy_report_["statement"] in (folder / "README.md").read_text()
    for path in folder.iterdir():
        with pytest.raises(Exception):  # noqa: B017 - none of them is a pickle
            pickle.loads(path.read_bytes())


def test_folders_of_version_01_are_read_and_replaced(fitted, tmp_path):
    """Their card had another name, their report no format."""
    folder = fitted[0].save(tmp_path / "m")
    report = json.loads((folder / "privacy.json").read_text())
    report.pop("format")
    (folder / "privacy.json").write_text(json.dumps(report))
    (folder / "README.md").rename(folder / "MODEL_CARD.md")
    sums = json.loads((folder / "checksums.json").read_text())
    sums["MODEL_CARD.md"] = sums.pop("README.md")
    (folder / "checksums.json").write_text(json.dumps(sums))
    again = LipDPClassifier.load(resealed(folder))
    assert np.array_equal(again.predict_proba(X), fitted[0].predict_proba(X))
    (folder / "MODEL_CARD.md").write_text("better than it was")
    with pytest.raises(WeightclipError, match="MODEL_CARD.md was changed"):
        LipDPClassifier.load(folder)
    fitted[0].save(folder, overwrite=True)
    assert not (folder / "MODEL_CARD.md").exists() and (folder / "README.md").exists()


def test_exists_and_overwrite(fitted, tmp_path):
    fitted[0].save(tmp_path / "m")
    with pytest.raises(WeightclipError, match="exists already"):
        fitted[0].save(tmp_path / "m")
    fitted[0].save(tmp_path / "m", overwrite=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").touch()
    with pytest.raises(WeightclipError, match="no model folder"):
        fitted[0].save(tmp_path / "mine", overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "mine"]


@pytest.mark.parametrize(
    "name", ["weights.safetensors", "pipeline.json", "privacy.json", "README.md", "checksums.json"]
)
def test_missing_or_changed_files_are_found(fitted, tmp_path, name):
    folder = fitted[0].save(tmp_path / "m")
    original = (folder / name).read_bytes()
    (folder / name).write_bytes(original.replace(b"1", b"2", 1))
    with pytest.raises(WeightclipError, match=r"changed|JSON"):
        _folder.load(folder)
    (folder / name).unlink()
    with pytest.raises(WeightclipError, match=f"cannot read {name}"):
        _folder.load(folder)


def resealed(folder, **changes):
    """A stranger's folder: changed on purpose, with checksums to match."""
    import hashlib

    for name, change in changes.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    sums = json.loads((folder / "checksums.json").read_text())
    sums = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in sums}
    (folder / "checksums.json").write_text(json.dumps(sums))
    return folder


@pytest.mark.parametrize("change, match", [
    ({"format": 99}, "format"), ({"hidden": [3]}, "layer"), ({"columns": []}, "layer"), ({"outputs": "x"}, "complete"),
    ({"columns": [{"name": "a", "type": "numeric", "edges": ["__import__('os')", 1], "missing": False}]}, "complete"),
])  # fmt: skip
def test_a_strangers_pipeline_is_checked(fitted, tmp_path, change, match):
    folder = resealed(fitted[0].save(tmp_path / "m"), pipeline=change)
    with pytest.raises(WeightclipError, match=match):
        Model.load(*_folder.load(folder)[:2])


def test_a_pickle_in_place_of_weights_is_refused(fitted, tmp_path):
    folder = fitted[0].save(tmp_path / "m")
    (folder / "weights.safetensors").write_bytes(pickle.dumps({"layers.0.weight": np.zeros(3)}))
    with pytest.raises(WeightclipError, match="not a safetensors file"):
        _folder.load(resealed(folder))


def test_nothing_half_written_when_the_disk_is_full(fitted, tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WeightclipError, match="No space left"):
        fitted[0].save(tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_no_permission(fitted, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    with pytest.raises(WeightclipError, match="Permission denied"):
        fitted[0].save(tmp_path / "m")
    assert list(tmp_path.iterdir()) == []
