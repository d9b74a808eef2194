"""Bad versions of what guards files and weights: every one of them must be caught by the test that stands for it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from tests.engine.test_checkpoint_strangers import put, resealed, started, stepped

import weightclip as wc
from weightclip.engine import _checkpoint
from weightclip.tabular import _training
from weightclip.tabular import files as _files
from weightclip.tabular import folder as _folder
from weightclip.tabular._columns import Schema
from weightclip.tabular._estimators import LipDPClassifier
from weightclip.tabular._plan import PublicScaling

N = 400
X = np.random.default_rng(0).uniform(-1, 1, (N, 2))
QUICK = {
    "epsilon": 2.0,
    "delta": 1e-5,
    "accountant": "rdp",
    "feature_bounds": (-1, 1),
    "preprocessing": PublicScaling(),
}


# -- sample weights ----------------------------------------------------------------------------------------------------


def influence(weight: float) -> float:
    """How far one record with this weight moves the released model, noise and draws being the same."""

    def fit(w: float) -> np.ndarray:
        weights = np.ones(N)
        weights[0] = w
        model = LipDPClassifier(**QUICK, random_state=0, epochs=5, batch_fraction=1.0, joint_cap=3.0, classes=[0, 1])
        model.fit(X, np.arange(N) % 2, sample_weight=weights)
        return np.concatenate([t.ravel() for t in model.model_.tensors().values()])

    return float(np.abs(fit(weight) - fit(0.0)).max())


def weights_stay_bounded() -> None:
    assert influence(1e6) == influence(1.0) > 0


def test_weights_are_bounded(monkeypatch) -> None:
    weights_stay_bounded()

    right = _training.thinned

    def normalised(labels, weights, rng):  # one record's weight would change everybody's chance
        return right(labels, weights / weights.max(), rng)

    monkeypatch.setattr(_training, "thinned", normalised)
    with pytest.raises(AssertionError):
        weights_stay_bounded()


# -- scratch files -----------------------------------------------------------------------------------------------------


def no_scratch_file_has_a_name(folder: Path) -> None:
    (folder / "scratch").mkdir()
    (folder / "d.csv").write_text("a,y\n" + "1,u\n2,v\n" * 50)
    loaded = _files.load(_files.File(folder / "d.csv"), "y", Schema())
    assert os.listdir(folder / "scratch") == [] and len(loaded.table) == 100


def test_scratch_files_have_no_name(tmp_path, monkeypatch) -> None:
    for case in ("good", "bad"):
        (tmp_path / case).mkdir()
        with monkeypatch.context() as patch:
            patch.setattr(tempfile, "tempdir", str(tmp_path / case / "scratch"))
            if case == "good":
                no_scratch_file_has_a_name(tmp_path / case)
                continue
            patch.setattr(tempfile, "TemporaryFile", functools.partial(tempfile.NamedTemporaryFile, delete=False))
            with pytest.raises(AssertionError):
                no_scratch_file_has_a_name(tmp_path / case)


# -- model folders -----------------------------------------------------------------------------------------------------


class Died(BaseException):
    pass


def a_death_loses_no_model(folder: Path, monkeypatch) -> None:
    model = LipDPClassifier(**QUICK, random_state=0, epochs=1).fit(X, X[:, 0] > 0)
    model.save(folder / "m")
    count, real = [0], os.replace

    def replace(a, b):
        count[0] += 1
        if count[0] == 2:
            raise Died
        real(a, b)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        patch.setattr("shutil.rmtree", lambda *_, **__: None)
        with contextlib.suppress(Died):
            model.save(folder / "m", overwrite=True)
    with contextlib.suppress(wc.WeightclipError):
        _folder.load(folder / "m")
        return
    raise AssertionError("the model is lost")


def test_a_death_between_renames(tmp_path, monkeypatch) -> None:
    for name in ("exchange", "aside", "neither"):
        (tmp_path / name).mkdir()
        with monkeypatch.context() as patch:
            if name != "exchange":
                patch.setattr(_folder, "exchange", lambda a, b: False)
            if name == "neither":
                patch.setattr(_folder, "standing", lambda folder: folder)
                with pytest.raises(AssertionError):
                    a_death_loses_no_model(tmp_path / name, monkeypatch)
            else:
                a_death_loses_no_model(tmp_path / name, monkeypatch)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_made_up_counts(tmp_path, monkeypatch) -> None:
    """Without the check, runs that count nothing load as none: what was released is forgotten."""
    stepped(started()).engine.save(tmp_path / "run")
    folder = resealed(tmp_path / "run", tmp_path / "bad", put("runs", value={"": 0}))
    with pytest.raises(wc.WeightclipError, match="as many steps"):
        started().engine.load(folder)
    monkeypatch.setattr(_checkpoint, "check_ledger", lambda *_: None)
    fresh = started()
    with contextlib.suppress(Warning):
        fresh.engine.load(folder)
    assert fresh.engine.steps == 0 and json.loads((folder / "ledger.json").read_text())["ledger"]["steps"] == 1
