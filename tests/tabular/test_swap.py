"""A model folder is replaced in one step, or found again where it was set aside."""

from __future__ import annotations

import contextlib
import os
import sys

import numpy as np
import pytest

from weightclip.errors import WeightclipError
from weightclip.tabular import folder as _folder
from weightclip.tabular._estimators import LipDPClassifier
from weightclip.tabular._plan import PublicScaling

X = np.random.default_rng(0).uniform(-1, 1, (200, 3))


@pytest.fixture(scope="module")
def models():
    quick = {"epochs": 1, "feature_bounds": (-1, 1), "preprocessing": PublicScaling(), "accountant": "rdp"}
    return [LipDPClassifier(**quick, random_state=seed).fit(X, X[:, 0] > 0) for seed in (0, 1)]


class Died(BaseException):
    """As a kill: nothing after it runs but what the system does."""


def dies_at_rename(monkeypatch, number):
    count, real = [0], os.replace

    def replace(a, b):
        count[0] += 1
        if count[0] == number:
            raise Died
        real(a, b)

    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)  # a dead process cleans nothing


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("can_exchange", [True, False])
def test_dying_between_renames_loses_nothing(models, tmp_path, monkeypatch, number, can_exchange):
    old, new = models
    old.save(tmp_path / "m")
    if not can_exchange:
        monkeypatch.setattr(_folder, "exchange", lambda a, b: False)
    with monkeypatch.context() as patch:
        dies_at_rename(patch, number)
        with contextlib.suppress(Died):
            new.save(tmp_path / "m", overwrite=True)
    found = LipDPClassifier.load(tmp_path / "m").predict_proba(X)
    assert np.array_equal(found, old.predict_proba(X)) or np.array_equal(found, new.predict_proba(X))
    new.save(tmp_path / "m", overwrite=True)  # and the next save puts everything right
    assert np.array_equal(LipDPClassifier.load(tmp_path / "m").predict_proba(X), new.predict_proba(X))
    if not can_exchange:
        assert not _folder.aside(tmp_path / "m").exists()


@pytest.mark.skipif(sys.platform not in ("linux", "darwin"), reason="no exchange of names")
def test_names_are_exchanged_in_one_step(models, tmp_path, monkeypatch):
    models[0].save(tmp_path / "m")
    dies_at_rename(monkeypatch, 1)  # no rename happens at all
    models[1].save(tmp_path / "m", overwrite=True)
    assert np.array_equal(LipDPClassifier.load(tmp_path / "m").predict_proba(X), models[1].predict_proba(X))


@pytest.mark.parametrize("target", ["model", "nothing"])
def test_a_link_is_refused_before_anything_is_written(models, tmp_path, target):
    models[0].save(tmp_path / "model")
    (tmp_path / "link").symlink_to(tmp_path / target)
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(WeightclipError, match="symbolic link"):
        models[1].save(tmp_path / "link", overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == before and (tmp_path / "link").is_symlink()


def test_files_of_the_user_are_not_lost(models, tmp_path):
    models[0].save(tmp_path / "m")
    (tmp_path / "m" / "notes.txt").write_text("precious")
    with pytest.raises(WeightclipError, match="'notes.txt' besides a model"):
        models[1].save(tmp_path / "m", overwrite=True)
    assert (tmp_path / "m" / "notes.txt").read_text() == "precious"


def test_the_current_folder_can_be_replaced(models, tmp_path, monkeypatch):
    models[0].save(tmp_path / "m")
    monkeypatch.chdir(tmp_path / "m")
    models[1].save(".", overwrite=True)
    assert np.array_equal(LipDPClassifier.load(tmp_path / "m").predict_proba(X), models[1].predict_proba(X))
    assert _folder.CHECKSUMS in os.listdir(tmp_path / "m")


def test_somebody_who_was_faster_is_not_overwritten(models, tmp_path, monkeypatch):
    """Two processes train into one new folder: the second one says so instead of replacing the first one's model."""
    models[0].save(tmp_path / "m")
    monkeypatch.setattr(_folder, "check_place", lambda *_: None)  # it looked before the first one was there
    with pytest.raises(WeightclipError, match="cannot write the model"):
        models[1].save(tmp_path / "m")
    assert np.array_equal(LipDPClassifier.load(tmp_path / "m").predict_proba(X), models[0].predict_proba(X))
    assert os.listdir(tmp_path) == ["m"]
