"""Effect of τ, X_0 and C: cells become settings, C holds layer by layer, bounds hold, the test part comes last."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from weightclip.errors import WeightclipError
from weightclip_studies.fast_mlp import Logistic, Settings, logits, train_many
from weightclip_studies.method import _effects, _files
from weightclip_studies.tables._runs import prepare
from weightclip_studies.tables._store import Store

TINY = {"datasets": ("breast_cancer",), "seeds": 2, "search_seeds": 1, "rates": (1.0, 3.0), "values": (0.5, 2.0),
        "layers": ((0.5, 2.0),), "only": ("table",)}  # fmt: skip


def trained(C, seeds=(0, 1)):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(300, 4))
    s = Settings(hidden=(5,), batch=100, epochs=8, lr=0.3, input_radius=2.0, weight_norm=C)
    return X, X[:, 0] > 0, train_many(X, X[:, 0] > 0, [s], seeds, objective=Logistic(), noise=1.0)[0]


def test_every_layer_keeps_to_its_own_norm():
    for C in ((0.3, 2.0), (2.0, 0.3)):
        for run in trained(C)[2]:
            norms = [float(torch.linalg.matrix_norm(w.double(), 2)) for w, _ in run.weights]
            assert all(n <= c * (1 + 1e-6) for n, c in zip(norms, C, strict=True)) and max(norms) > 0.31
    same = [trained(C)[2][0].weights[0][0] for C in (0.7, (0.7, 0.7))]
    assert torch.equal(*same)
    with pytest.raises(WeightclipError, match="weight_norm has 3 values"):
        trained((1.0, 1.0, 1.0))
    with pytest.raises(WeightclipError, match="weight_norm"):
        Settings(weight_norm=(1.0, -1.0))


def test_the_bound_is_never_below_the_largest_gradient():
    X, y, runs = trained((0.5, 3.0))
    objective = _effects.Divided(Logistic(), 1.0, 1)
    for run in runs:
        for largest, mean in _effects.slack(run, objective, X, y):
            assert 1 <= largest <= mean
    assert logits(runs, X).shape == (2, 300, 1)


def test_dividing_the_loss_changes_nothing_but_its_bound():
    cells = {(c.factor, c.value): c.config for c in _effects.cells("breast_cancer", only=("table",))}
    prepared = prepare("breast_cancer")
    base, divided = (_effects.settings_for(cells[k], prepared) for k in (("none", ""), ("loss / tau", "4")))
    assert divided.cap == pytest.approx((base.cap or 0) / 4)
    keys = [{"dataset": "breast_cancer", "part": "valid", "seeds": [0, 1], "config": cells[k]}
            for k in (("none", ""), ("loss / tau", "4"))]  # fmt: skip
    one, other = _effects.compute(keys)
    assert one["sigma"] == other["sigma"] and one["accuracy"] == pytest.approx(other["accuracy"], abs=0.02)


def test_rows_resume_and_the_test_part_comes_last(tmp_path: Path, monkeypatch):
    asked = []
    real = _effects.compute
    monkeypatch.setattr(_effects, "compute", lambda keys: (asked.extend(keys), real(keys))[1])
    table, picture = _effects.effects_study(tmp_path, tmp_path / "s.sqlite", **TINY)
    rows, count = _files.read_csv(table), len(asked)
    assert [r["factor"] for r in rows[:4]] == ["none", "tau", "X0", "C"] and len(rows) == 10
    assert picture.stat().st_size > 1000 and float(rows[0]["moved"]) == 0
    parts = [k["part"] for k in asked]
    assert parts == sorted(parts, reverse=True)  # "valid", then "test"
    assert parts.count("test") <= len(rows) < parts.count("valid")  # one learning rate of each cell
    assert not {s for k in asked if k["part"] == "valid" for s in k["seeds"]} & {0, 1}
    for row in rows:
        assert float(row["epsilon"]) <= 1.672 + 1e-6 and float(row["first_bound/largest"]) >= 1
    _effects.effects_study(tmp_path, tmp_path / "s.sqlite", **TINY)
    assert len(asked) == count


def test_the_learning_rate_is_chosen_on_validation_records(tmp_path: Path, monkeypatch):
    """Validation prefers the smaller rate, the test part the larger one."""

    def fake(keys):
        return [{"sigma": 1.0, "epsilon": 1.0, "slack": [[(1.0, 2.0)] * 2] * len(k["seeds"]),
                 "accuracy": [0.5 - k["config"]["lr"] * (1 if k["part"] == "valid" else -1)] * len(k["seeds"])}
                for k in keys]  # fmt: skip

    monkeypatch.setattr(_effects, "compute", fake)
    cells = list(_effects.cells("breast_cancer", (1.0,), (), ("table",)))
    rows = _effects.measure(Store(tmp_path / "s.sqlite"), "breast_cancer", cells, seeds=2, search_seeds=1)
    assert all(r["lr"] == pytest.approx(cells[0].config["lr"] / 9) and r["at_edge"] for r in rows)
