"""Convolutional networks of the image study, on tiny sets."""

from __future__ import annotations

import csv
import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from torch import nn
from typer.testing import CliRunner

import weightclip as wc
from weightclip_studies.cli import _images
from weightclip_studies.images import _audit, _convolutions, _design, _features, _nets
from weightclip_studies.images._audit import audit_network, audit_networks
from weightclip_studies.images._augment import augment
from weightclip_studies.images._convolutions import Cell, ConvStudy, collect, proposals, read_finals
from weightclip_studies.images._design import (
    allocation_accuracy,
    allocation_rows,
    design_study,
    recipe_accuracy,
    tightness,
)
from weightclip_studies.images._nets import Pictures, build, late_layers, layer_norms
from weightclip_studies.images._plots import caps_figure
from weightclip_studies.images._training import BOUNDS, ConvSettings, accuracy, bounds_for, run_seed, train

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),  # torch.func on the falsifier's unfolds
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),  # Opacus on images, which need no gradient
]


@pytest.fixture(autouse=True)
def few_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Synthetic statistics from few pictures."""
    for module in (_features, _nets):
        whole = module.dead_leaves
        monkeypatch.setattr(module, "dead_leaves", lambda n, *a, w=whole, **k: w(min(n, 12), *a, **k))


def fake_images(name: str, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Classes that differ by where the picture is bright."""
    rng = np.random.default_rng(len(split))
    labels = rng.integers(0, 10, 240).astype(np.uint8)
    images = rng.integers(0, 60, (240, 28, 28)).astype(np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[2 * label : 2 * label + 8, :14] += 150
    return images, labels


def pictures(network: str = "small-cnn", count: int = 240) -> Pictures:
    images, labels = (torch.from_numpy(a[:count]) for a in fake_images("mnist", "train"))
    return Pictures.load(images, labels, network)


# -- augmentation ---------------------------------------------------------------------------------------------------


def test_views_are_crops_and_mirror_images_of_their_own_record() -> None:
    x = torch.randint(1, 255, (5, 3, 8, 8), dtype=torch.uint8)
    views = augment(x, 3, padding=2, seed=1)
    assert views.shape == (15, 3, 8, 8) and views.dtype == torch.uint8
    padded = nn.functional.pad(x, (2, 2, 2, 2))
    found = set()
    for i, view in enumerate(views):
        crops = [(a, b, f, padded[i // 3, :, a : a + 8, b : b + 8]) for a in range(5) for b in range(5) for f in (0, 1)]
        match = [(a, b, f) for a, b, f, crop in crops if torch.equal(view, crop.flip(2) if f else crop)]
        assert match
        found.update(match)
    assert len({m[2] for m in found}) == 2 and len({m[:2] for m in found}) > 5
    assert torch.equal(augment(x, 3, padding=2, seed=1), views) and not torch.equal(augment(x, 3, 2, seed=2), views)
    assert torch.equal(augment(x, 1, padding=0, flip=False), x)
    changed = x.clone()
    changed[0] = 7
    assert torch.equal(augment(changed, 3, padding=2, seed=1)[3:], views[3:])  # records are never mixed


# -- networks -------------------------------------------------------------------------------------------------------


def test_records_are_kept_small_and_read_by_public_constants() -> None:
    pixels, maps = pictures(), pictures("scattering+cnn", 20)
    assert pixels.x.dtype == torch.uint8 and pixels.x.shape[1:] == (1, 28, 28)
    assert maps.x.dtype == torch.float16 and maps.x.shape[1:] == (81, 7, 7)
    assert float(pixels.inputs(pixels.x).abs().max()) <= 2
    assert maps.inputs(maps.x).square().mean((1, 2, 3)).sqrt().allclose(torch.ones(20), atol=1e-2)
    for data, network in ((pixels, "small-cnn"), (maps, "scattering+cnn")):
        assert build(network, data.planes, 0)(data.inputs(data.x[:3])).shape == (3, 10)
        assert data.synthetic().shape[1:] == data.x.shape[1:]
    with pytest.raises(wc.WeightclipError, match="unknown network"):
        build("resnet-9000", 1, 0)


def test_late_layers_have_the_smallest_maps() -> None:
    assert late_layers(build("small-cnn", 1, 0), torch.zeros(2, 1, 28, 28)) == ["features.3"]
    late = late_layers(build("wrn-10-1", 3, 0), torch.zeros(2, 3, 32, 32))
    assert len(late) == 3  # both convolutions and the shortcut of the last group


def test_norms_of_every_layer_are_those_of_autograd() -> None:
    model, loss, data = build("small-cnn", 1, 0), wc.losses.CrossEntropy(cap=0.5), pictures(count=4)
    x, y = data.inputs(data.x), data.y
    norms = layer_norms(model, loss, x, y, beta=1.0)
    for i in range(len(x)):
        model.zero_grad()
        logits = model(x[i : i + 1])
        logits.backward(loss.gradient(logits.detach(), y[i : i + 1]))
        for path, found in norms.items():
            layer = model.get_submodule(path)
            exact = torch.cat([p.grad.flatten() for p in layer.parameters() if p.grad is not None]).norm()
            assert float(found["exact"][i]) == pytest.approx(float(exact), rel=1e-4)
            assert exact <= found["channel"][i] * (1 + 1e-5) and found["channel"][i] <= found["free"][i] * (1 + 1e-5)
            assert float(found["input"][i] * found["cotangent"][i]) == pytest.approx(float(found["free"][i]), rel=1e-4)


# -- training -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", BOUNDS)
def test_every_way_of_bounding_learns_without_noise(bound: str) -> None:
    if bound == "opacus":
        pytest.importorskip("opacus")
    data = pictures()
    clip = 3.0 if bound == "weights" else 1.0
    settings = ConvSettings("small-cnn", bound, 100, 12, 0.02, average=0.5, clip=clip, quantile=0.9)
    done = train(data, settings, 0.0, stream=bound, watch=2)
    assert accuracy(done.model, data) > (15 if bound in ("weights", "free", "factors") else 30)
    assert type(done.model.get_submodule("features.0")) is nn.Conv2d and done.seconds > 0 and done.step_ms > 0
    if bound in ("opacus", "plain"):
        assert not done.rows
        return
    assert {r["step"] for r in done.rows} == {0, 11} and len(done.rows) == 8
    for row in done.rows:
        assert row["exact"] <= row["largest"] and row["exact"] <= row["free"] * (1 + 1e-6)
        if bound == "weights":
            assert row["largest"] <= row["sensitivity"]


@pytest.mark.parametrize("network,bound", [("scattering+cnn", "late"), ("wrn-10-1", "free"), ("wrn-10-1", "factors")])
def test_tiny_versions_of_every_network_train(network: str, bound: str) -> None:
    data = pictures(network, 12)
    done = train(data, ConvSettings(network, bound, 10, 1), 0.05)
    before = build(network, 1, 0).state_dict()
    after = done.model.state_dict()
    assert all(torch.isfinite(v).all() and not torch.equal(v, before[k]) for k, v in after.items())
    assert 0 <= accuracy(done.model, data) <= 100


def test_runs_repeat_and_share_no_noise() -> None:
    data = pictures()
    settings = ConvSettings("small-cnn", "free", 60, 2)
    weights = [train(data, settings, 2.0, seed, stream).model.state_dict()["classifier.2.weight"]
               for seed, stream in ((0, "a"), (0, "a"), (0, "b"))]  # fmt: skip
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    seeds = {run_seed(s, sigma, k, t) for s in (settings, ConvSettings()) for sigma in (1.0, 2.0) for k in (0, 1)
             for t in ("a", "b")}  # fmt: skip
    assert len(seeds) == 16


@pytest.mark.parametrize("bf16,views", [(True, 0), (False, 2)])
def test_recipes_run(bf16: bool, views: int) -> None:
    data = pictures(count=80)
    settings = ConvSettings("small-cnn", "exact", 60, 2, bf16=bf16, views=views)
    done = train(data, settings, 2.0, budget=(1e9, 1e-5))
    assert torch.isfinite(done.model(data.inputs(data.x[:2]))).all() and 0 < done.report["epsilon"] < 100


def test_a_run_that_spends_too_much_is_refused() -> None:
    with pytest.raises(wc.WeightclipError, match="spent epsilon"):
        train(pictures(count=80), ConvSettings("small-cnn", "free", 60, 2), 2.0, budget=(0.1, 1e-5))
    with pytest.raises(TimeoutError, match="gave up after 1 of 2"):
        train(pictures(count=80), ConvSettings("small-cnn", "free", 60, 2), 2.0, deadline=0.0)


def test_settings_are_checked() -> None:
    with pytest.raises(wc.WeightclipError, match="bound"):
        ConvSettings(bound="magic")
    with pytest.raises(wc.WeightclipError, match="views"):
        ConvSettings(bound="opacus", views=2)


def test_late_caps_are_exact_on_late_layers_only() -> None:
    data = pictures(count=20)
    bounds = bounds_for(ConvSettings("small-cnn", "late"), build("small-cnn", 1, 0), data.synthetic())
    assert bounds.caps_of("features.3") == wc.CapNorm.CHEAPEST and bounds.caps_of("features.0") == wc.CapNorm.FREE
    assert bounds.adaptive is not None


# -- the study ------------------------------------------------------------------------------------------------------


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_way_gets_the_same_number_of_trials() -> None:
    for bound in BOUNDS:
        tried = proposals(Cell("small-cnn", bound, None if bound == "plain" else 3.0, trials=4))
        assert len({json.dumps(s.to_dict()) for s in tried}) == 4 and {s.bound for s in tried} == {bound}
    changed = proposals(Cell("small-cnn", "free", 3.0, 2, 1, (("bf16", True),)))
    assert [s.bf16 for s in changed] == [True, True]


def test_a_cell_is_chosen_on_validation_and_tested_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_convolutions, "load_images", fake_images)
    study = ConvStudy("mnist", tmp_path, changes={"steps": 2, "batch": 100}, say=lambda line: None)
    study.noise.values.update({f"8/{n}/100/2": 3.0 for n in (216, 240)})  # more than enough, and checked
    monkeypatch.setattr(_convolutions, "MIN_SEEDS", 2)
    sizes = []
    real = _convolutions.train
    monkeypatch.setattr(_convolutions, "train", lambda data, *a, **k: (sizes.append(len(data)), real(data, *a, **k))[1])
    entry = study.run(Cell("small-cnn", "exact", 8.0, trials=2, seeds=2), watch=2)
    assert sizes == [216, 216, 240, 240] and entry["spent"] <= 8.0 and entry["runs"][0]["epsilon"] <= 8.0 * (1 + 1e-6)
    study.run(Cell("small-cnn", "exact", 8.0, trials=2, seeds=2))
    assert len(sizes) == 6  # trials are not made twice
    study.run(Cell("small-cnn", "plain", None, trials=1, seeds=1))
    collect(read_finals(tmp_path), tmp_path)
    caps, public = table(tmp_path / "caps.csv"), table(tmp_path / "accuracy.csv")
    assert [r["bound"] for r in caps] == ["exact", "plain"] and caps[0]["seeds"] == "2"
    assert [(r["method"], r["epsilon"]) for r in public] == [("caps", "8")]  # nothing was chosen for the other one
    study.run(Cell("small-cnn", "free", 8.0, trials=1, seeds=1), watch=2)
    collect(read_finals(tmp_path), tmp_path)
    tight = table(tmp_path / "conv_tightness.csv")
    assert {r["step"] for r in tight} == {"0", "1"} and {r["layer"] for r in tight} >= {"features.0", "classifier.2"}
    picture = caps_figure(tmp_path / "caps.csv", tmp_path / "conv_tightness.csv", tmp_path / "caps.png")
    assert picture.stat().st_size > 10_000
    assert len(table(tmp_path / "caps.csv")) == 3
    monkeypatch.setattr(_audit, "audit_network", functools.partial(_audit.audit_network, restarts=2, steps=2))
    rows = audit_networks(tmp_path)
    assert [r["bound"] for r in rows] == ["exact", "free"]
    assert all(0.5 < r["falsifier"] <= 1 + 1e-6 and r["one_step"] <= 1 + 1e-6 for r in rows)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_convolutions, "load_images", fake_images)
    app = typer.Typer()
    _images.register(app)
    options = ["convolutions", "--out", str(tmp_path / "out"), "--logs", str(tmp_path / "logs"), "--dataset", "mnist",
               "--bounds", "free", "--epsilons", "8", "--trials", "1", "--seeds", "1", "--device", "cpu", "--change",
               "steps=2", "--change", "batch=100"]  # fmt: skip
    result = CliRunner().invoke(app, [*options, "--json"])
    assert result.exit_code == 0, result.output
    rows = table(tmp_path / "out" / "caps.csv")
    assert [(r["bound"], r["steps"], r["batch"]) for r in rows] == [("free", "2", "100")]
    result = CliRunner().invoke(app, [*options[:-4], "--cost", "50"])
    assert result.exit_code == 0, result.output
    costs = table(tmp_path / "out" / "conv_cost.csv")
    assert [r["bound"] for r in costs] == ["plain", "free"] and float(costs[0]["ratio"]) == 1
    assert table(tmp_path / "out" / "caps.csv")[0]["cost"] == costs[1]["ratio"]  # accuracy beside cost, at once
    assert CliRunner().invoke(app, [*options, "--change", "colour=red"]).exit_code == 2
    assert CliRunner().invoke(app, [*options, "--bounds", "magic"]).exit_code == 2


@pytest.mark.parametrize("network,bound", [("scattering+cnn", "exact"), ("scattering+cnn", "joint")])
def test_the_audit_of_a_network(network: str, bound: str) -> None:
    found = audit_network(ConvSettings(network, bound), restarts=2, steps=4)
    assert 0.5 < found["falsifier"] <= 1 + 1e-6 and found["one_step"] <= 1 + 1e-6


# -- design ---------------------------------------------------------------------------------------------------------


def test_bounds_of_every_design_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_design, "load_images", fake_images)
    names = [("base", "4 convolutions 3x3, tanh, average pooling"), ("pooling", "max 2x2, stride 2"), ("depth", "6")]
    monkeypatch.setattr(_design, "VARIANTS", {n: _design.VARIANTS[n] for n in names})
    rows = design_study(tmp_path, records=6, say=lambda line: None)
    assert [r["layers"] for r in rows] == [4, 4, 6] and len(table(tmp_path / "allocation.csv")) == 20
    for row in rows:
        numbers = {k: float(v) for k, v in row.items() if "_" in k}
        for place in ("first", "last"):
            assert 1 <= numbers[f"channel_{place}"] <= numbers[f"free_{place}"] <= numbers[f"weights_{place}"]
    assert float(rows[2]["weights_first"]) > float(rows[0]["weights_first"])  # gains multiply
    x = torch.randn(4, 1, 28, 28)
    model = _design.network(2)
    model(x)
    half, whole = (tightness(model, x, torch.arange(4), radius=r) for r in (0.5, 1.0))
    assert half != whole


def test_allocations_share_one_budget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = allocation_rows(torch.randn(4, 1, 28, 28), torch.arange(4))
    total = {}
    for r in rows:  # sum over layers of (threshold/s)^2 = 1/sigma^2 = 1
        share = float(r["parameters"]) / float(r["noise_over_threshold"]) ** 2
        total[r["allocation"]] = total.get(r["allocation"], 0.0) + share
    assert total == pytest.approx(dict.fromkeys(total, 1.0), rel=1e-3) and len(total) == 4
    monkeypatch.setattr(_design, "load_images", fake_images)
    short = {"records": 80, "batch": 60, "steps": 1, "seeds": 1, "say": lambda line: None}
    found = allocation_accuracy(tmp_path, **short)
    assert len(found) == 3 and len(table(tmp_path / "allocation_accuracy.csv")) == 3
    monkeypatch.setattr(torch, "compile", lambda model, dynamic: model)  # the compiler has tests of its own
    assert [r["variant"] for r in recipe_accuracy(tmp_path, **short)] == ["float32", "bf16", "compiled", "two views"]
