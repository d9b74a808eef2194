"""Studies behind the method's choices, on small cases whose answers are known."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
import torch
import typer
from torch import nn
from typer.testing import CliRunner

from weightclip.factors import CapNorm
from weightclip_studies.cli._method import register
from weightclip_studies.method import _caps, _defaults, _exponential, _files, _mechanisms, _networks, _norms
from weightclip_studies.method._files import markdown


def test_k_norm_noise_against_known_numbers():
    rows = list(_mechanisms.compare(1.0, 1e-9, 1.0, 1, (1, 1000)))
    one, many = rows
    e0 = one["epsilon0"]
    assert e0 == pytest.approx(1.0, rel=2e-3)  # one unsampled release: epsilon0 is epsilon
    assert one["knorm_1"] == pytest.approx(math.sqrt(2) / e0)  # the Laplace mechanism
    assert one["knorm_1"] == pytest.approx(one["knorm_2"]) == pytest.approx(one["knorm_inf"])
    assert many["knorm_inf"] * e0 == pytest.approx(578, rel=2e-3)
    assert many["knorm_2"] * e0 == pytest.approx(math.sqrt(1001))


def test_k_norm_wins_only_in_one_dimension_and_few_steps():
    rows = {r["dimension"]: r for r in _mechanisms.compare(2.0, 1e-5, 0.01, 1, (1, 100))}
    assert rows[1]["ratio_2"] < 1 < rows[100]["ratio_2"]


def test_tightness_is_never_below_one_and_hoelder_never_helps():
    torch.manual_seed(0)
    x, y = torch.randn(20, 5), torch.randint(0, 3, (20,))
    x = x / x.norm(dim=1, keepdim=True)
    model = _networks.mlp(5, 3, (6, 4))
    _networks.train(model, x, y, steps=20, limit=1.0)
    for row in _norms.tightness(model, x, y):
        assert min(row["p=1"], row["p=2"], row["p=inf"]) >= 1 - 1e-6
        assert row["hoelder/p=2"] >= 1 - 1e-6


def test_record_norms_are_those_of_single_records():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    x, y = torch.randn(3, 4), torch.tensor([0, 1, 1])
    found = _networks.record_norms(model, x, y)
    nn.functional.cross_entropy(model(x[1:2]), y[1:2]).backward()
    grads = [p.grad for p in model[2].parameters()]
    exact = math.sqrt(sum(float(g.square().sum()) for g in grads if g is not None))
    assert float(found["2"][1]) == pytest.approx(exact, rel=1e-6)


def test_caps_ratios_are_ordered():
    x, y = _networks.digits(12)
    for kinds in _caps.tightness(_networks.convnet(True), x[:6], y[:6]).values():
        assert kinds[CapNorm.FREE][1] >= kinds[CapNorm.CHANNEL][1] >= 1 - 1e-5
        assert kinds[CapNorm.POSITION] == pytest.approx((1.0, 1.0), rel=1e-4)


def test_choices_become_settings():
    choice = _defaults.Choice("in-product", 0.5, "adam-aware", 0.4, "radius")
    settings = choice.settings(0.01, 64, 2, bound=1.0)
    assert settings.input_radius is None and settings.cotangent_radius == (0.2, 0.4)
    assert settings.layer_radius == (math.hypot(0.5, 1), math.sqrt(2))
    rows = [
        {"data": "a", "inputs": v, "radius": 1.0, "allocation": "equal", "cap": "none", "cotangent": "weights",
         "valid": s, "test": s / 2}
        for v, s in (("projection", 0.4), ("projection", 0.8), ("in-product", 0.6))
    ]  # fmt: skip
    found = {(r["factor"], r["value"]): r for r in _defaults.marginals(rows)}
    assert found["inputs", "projection"]["a mean"] == pytest.approx(0.3)
    assert found["inputs", "projection"]["a best"] == pytest.approx(0.4)
    assert markdown(rows).count("\n") == 5


def test_command_writes_its_files(tmp_path):
    app = typer.Typer()
    register(app)
    done = CliRunner().invoke(app, ["--only", "caps", "--quick", "--json", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    with (tmp_path / "caps.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {r["kind"] for r in rows} >= {"free", "exact", "ordinary"}
    wrong = CliRunner().invoke(app, ["--only", "nothing"])
    assert wrong.exit_code != 0 and "unknown 'nothing'" in wrong.output


def test_the_table_of_exponents_is_that_of_the_committed_rows():
    root = Path(__file__).parents[3]
    found = _norms.summary(_files.read_csv(root / "results" / "method" / "norms.csv"))
    page = (root / "docs" / "method.md").read_text(encoding="utf-8")
    for line in found:  # medians of an even number of layers are means of the two in the middle
        assert "| " + " | ".join(line.values()) + " |" in page
    rows = [{"network": "MLP (8,)", "weights": "free", **dict.fromkeys(("p=1", "p=2", "p=inf", "hoelder/p=2"), v)}
            for v in (1.0, 2.0, 4.0, 9.0)]  # fmt: skip
    assert _norms.summary(rows)[0]["p=1"] == "3 (1–9)"


def test_the_exponential_mechanism_trains_at_the_epsilon_of_the_gaussian(tmp_path):
    (path,) = _exponential.exponential_study(
        tmp_path, datasets=("breast_cancer",), hidden=(0,), steps=4, lrs=(0.03, 0.1, 0.3), seeds=2
    )
    rows = _files.read_csv(path)
    assert [r["mechanism"] for r in rows] == list(_exponential.MECHANISMS)
    for row in rows:
        assert float(row["epsilon"]) <= 2.0 + 1e-6 and row["parameters"] == "62" and 0 <= float(row["test"]) <= 1
        assert row["at_edge"] == str(int(row["lr"] != "0.1"))


def test_settings_are_chosen_on_validation_records(tmp_path, monkeypatch):
    asked = []
    real = _exponential._accuracy
    monkeypatch.setattr(_exponential, "_accuracy", lambda m, x, y: (asked.append(len(x)), real(m, x, y))[1])
    monkeypatch.setattr(_exponential, "MECHANISMS", {"gaussian": None})
    _exponential.exponential_study(tmp_path, datasets=("breast_cancer",), hidden=(0,), steps=1, lrs=(0.1, 0.3), seeds=2)
    valid, test = (len(_exponential.parts_of(_networks.prepare("breast_cancer"))[p][0]) for p in ("valid", "test"))
    assert asked == [valid] * 4 + [test] * 2  # the test part once for each seed of what was chosen
