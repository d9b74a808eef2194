"""Feature maps, the driver on tiny sets, the commands and the figures."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

import weightclip as wc
from weightclip.accounting._accounting import Mechanism, epsilon
from weightclip.errors import WeightclipError
from weightclip_studies.cli import _images
from weightclip_studies.figure._pace import COLUMNS as PACE_COLUMNS
from weightclip_studies.images import (
    FeatureMap,
    FeatureSettings,
    HeadSettings,
    HeadTrainer,
    ImageStudy,
    _experiment,
    _search,
)
from weightclip_studies.images._engine import audit_results
from weightclip_studies.images._experiment import COLUMNS, chosen_features, merge_rows
from weightclip_studies.images._noise import NoiseTable
from weightclip_studies.images._plots import PUBLISHED, TITLES, accuracy_figure, runtime_figure
from weightclip_studies.images._product import Features
from weightclip_studies.images._runtime import COLUMNS as RUNTIME_COLUMNS
from weightclip_studies.images._synthetic import dead_leaves

MAPS = {
    "scattering": FeatureSettings(),
    "white": FeatureSettings(whiten=1.0, opponent=True),
    "patches": FeatureSettings(scattering=0.0, patches=8, whiten=0.5, flip=True),
    "both": FeatureSettings(patches=8, root=True, pool=2),
    "grey": FeatureSettings(scattering=0.7, patches=8, whiten=0.5, flip=True, grey=6, power=0.7, smooth=(1, 2, 1)),
}


@pytest.fixture(scope="module", autouse=True)
def few_pictures():
    """Synthetic statistics from few pictures: the tests ask for properties, not for accuracy."""
    from weightclip_studies.images import _features

    whole = _features.dead_leaves
    _features.dead_leaves = lambda count, *args, **kwargs: whole(min(count, 24), *args, **kwargs)
    yield
    _features.dead_leaves = whole


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("shape", [(28, 28), (32, 32, 3)])
def test_features_are_unit_vectors_of_their_own_image(name: str, shape: tuple[int, ...]) -> None:
    images = torch.randint(0, 256, (4, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images[3] = 7  # a constant image must not become NaN
    feature_map = FeatureMap(MAPS[name], shape)
    out = feature_map(images)
    assert torch.isfinite(out).all() and float(out.norm(dim=1).max()) <= 1 + 1e-5
    assert float(out[:3].norm(dim=1).min()) > 0.99
    changed = images.clone()
    changed[0] = 255 - changed[0]
    assert torch.allclose(feature_map(changed)[1:], out[1:], atol=1e-6)  # records are never mixed
    if MAPS[name].flip:
        assert torch.allclose(feature_map(images.flip(2)), out, atol=1e-5)
    data = feature_map.encode(images, torch.zeros(4), chunk=3)
    assert len(data) == 4 and float((data.codes.double().norm(dim=1) * data.scale).max()) <= 1


def test_power_and_smoothing_do_what_they_say() -> None:
    shape = (32, 32, 3)
    images = torch.randint(0, 256, (3, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    plain = FeatureMap(replace(MAPS["grey"], power=1.0, smooth=(0, 0, 0)), shape)
    made = FeatureMap(MAPS["grey"], shape)
    assert torch.equal(plain.white_grey.matrix, made.white_grey.matrix)  # statistics are those of the maps before
    sizes = (243 * 64, 16 * 16, 12 * 16)
    assert made.settings.name == "scattering+patches+grey" and plain(images).shape == (3, sum(sizes))
    blocks = []
    for block, passes, power, side in zip(plain(images).double().split(sizes, 1), (1, 2, 1), (1, 0.7, 0.7), (8, 4, 4),
                                          strict=True):  # fmt: skip
        maps = block.sign() * block.abs() ** power
        maps = maps.unflatten(1, (-1, side, side))
        for _ in range(passes):
            around = torch.nn.functional.pad(maps, (1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 3, 1)
            maps = maps + around.sum((-1, -2)) / 9
        maps = maps.flatten(1)
        blocks.append(maps * (block.norm(dim=1) / maps.norm(dim=1)).unsqueeze(1))  # each block keeps its share
    assert torch.allclose(made(images).double(), torch.cat(blocks, 1), atol=1e-5)


def test_settings_of_features_survive_a_file() -> None:
    again = FeatureSettings(**json.loads(json.dumps(MAPS["grey"].to_dict())))
    assert again == MAPS["grey"] and hash(again) == hash(MAPS["grey"])


def test_runs_on_other_features_have_other_noise(tmp_path: Path, tiny: None) -> None:
    study = ImageStudy("mnist", tmp_path, limit=100, epsilons=(3.0,), say=lambda line: None)
    streams = {study._stream("final", "dp-sgd", 3.0, f) for f in MAPS.values()}
    assert len(streams) == len(MAPS)


def test_no_hidden_units_mean_linear_heads_only(tmp_path: Path, tiny: None) -> None:
    study = ImageStudy("mnist", tmp_path, hidden=0, limit=100, epsilons=(3.0,), say=lambda line: None)
    assert study.cells() == [("lip-weights", 0, 3.0), ("dp-sgd", 0, 3.0), ("non-private", 0, None)]


def test_the_map_is_public() -> None:
    shape = (28, 28)
    one, other = (FeatureMap(MAPS["both"], shape) for _ in range(2))
    images = torch.randint(0, 256, (2, *shape), dtype=torch.uint8)
    assert torch.equal(one(images), other(images))  # made from settings and synthetic pictures alone


def test_dead_leaves_are_pictures() -> None:
    images = dead_leaves(6, 16, 3, seed=1)
    assert images.shape == (6, 3, 16, 16) and float(images.min()) >= 0 and float(images.max()) <= 1
    assert float(images.flatten(1).std(1).min()) > 0.02 and not torch.equal(images[0], images[1])
    assert torch.equal(images, dead_leaves(6, 16, 3, seed=1)) and not torch.equal(images, dead_leaves(6, 16, 3, seed=2))


def test_the_noise_table_keeps_its_promise(tmp_path: Path) -> None:
    table = NoiseTable(tmp_path / "noise.json")
    sigma = table.get(2.0, 1000, 100, 50)
    table.save()
    again = NoiseTable(tmp_path / "noise.json")
    assert again.values == {"2/1000/100/50": sigma} and again.check(2.0, 1000, 100, 50) <= 2.0
    assert epsilon([Mechanism("gaussian", sigma, 0.1, 50)], 1e-5) == pytest.approx(2.0, rel=1e-3)
    again.values["2/1000/100/50"] = sigma * 0.9
    with pytest.raises(ValueError, match="exceeds"):
        again.check(2.0, 1000, 100, 50)
    assert again.get(None, 1000, 100, 50) == 0.0


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def fake_images(name: str, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Ten kinds of pictures that differ in the place of a bright bar, with noise."""
    rng = np.random.default_rng(0 if part == "train" else 1)
    labels = rng.integers(0, 10, 300).astype(np.uint8)
    images = rng.integers(0, 60, (300, 28, 28)).astype(np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[2 * label + 3 : 2 * label + 7] += 180
    return images, labels


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_experiment, "load_images", fake_images)
    monkeypatch.setattr(_search, "STEPS", {1.0: (6,), 2.0: (6,), 3.0: (6, 12), None: (60,)})
    monkeypatch.setattr(_search, "BATCHES", (100,))
    monkeypatch.setattr(_experiment, "_PROBES", {3.0: (6, 0.3, (0.05,))})
    monkeypatch.setitem(_experiment.CANDIDATES, "mnist", (FeatureSettings(), ({"groups": 9},)))


def rows_of(data: Features) -> list[bytes]:
    """Records by what they are, wherever they lie."""
    return [row.numpy().tobytes() for row in data.codes[:-1]]


def follow(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[bytes], list[bytes]]]:
    """(records a head was trained on, records it was asked about) of every question, in order."""
    asked: list[tuple[list[bytes], list[bytes]]] = []

    class Followed(HeadTrainer):
        def accuracy(self, data: Features) -> float:
            asked.append((rows_of(self.data), rows_of(data)))
            return super().accuracy(data)

    monkeypatch.setattr(_experiment, "HeadTrainer", Followed)
    monkeypatch.setattr(ImageStudy, "_feature_score", lambda self, s: -float(s.groups))
    return asked


def check_records(study: ImageStudy, asked: list[tuple[list[bytes], list[bytes]]]) -> None:
    """Every trial is trained and judged on two parts of the training set; every final head is asked of the test set."""
    feature_map = FeatureMap(study.used, tuple(study.images.shape[1:]))
    train = rows_of(feature_map.encode(study.images, study.labels))
    test = rows_of(feature_map.encode(study.test_images, study.test_labels))
    assert len({*train, *test}) == len(train) + len(test)  # or nothing could be told apart
    fit, val = ([train[i] for i in rows.tolist()] for rows in (study.fit_rows, study.val_rows))
    whole = sorted(fit + val) == sorted(train)
    one = [(fit, val)] * study.trials + [(train, test)] * study.seeds
    usual = asked == one * len(study.cells())
    assert whole and usual  # lists as long as these would be compared letter by letter for a message


def test_the_driver_chooses_on_validation_and_tests_once(
    tmp_path: Path, tiny: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = follow(monkeypatch)
    study = ImageStudy(
        "mnist", tmp_path, trials=2, seeds=2, hidden=8, epsilons=(3.0,), limit=200, linear_methods=("lip-weights",),
        say=lambda line: None,
    )  # fmt: skip
    assert not set(study.fit_rows.tolist()) & set(study.val_rows.tolist())
    study.run()
    check_records(study, asked)
    rows = table(tmp_path / "accuracy.csv")
    assert tuple(rows[0]) == COLUMNS and len(rows) == 7 and len(asked) == 7 * (2 + 2)
    assert {r["method"] for r in rows} == set(_search.METHODS) and {r["device"] for r in rows} == {"cpu"}
    entries = json.loads((tmp_path / "mnist.json").read_text())
    for entry in entries:
        assert entry["features"]["groups"] == 9 and len(entry["accuracies"]) == 2
        if entry["epsilon"] == "inf":
            assert entry["sigma"] == 0 and entry["shares"] is None
        else:
            assert entry["spent"] <= 3.0 and max(entry["shares"].values()) <= 1 + 1e-9
            q = min(1.0, entry["settings"]["batch"] / entry["records"])
            spent = epsilon([Mechanism("gaussian", entry["sigma"], q, entry["settings"]["steps"])], 1e-5)
            assert spent == pytest.approx(entry["spent"])
    assert chosen_features(tmp_path, "mnist").groups == 9
    best = max(float(r["median"]) for r in rows if r["method"] == "non-private")
    assert best > 50  # the pictures are easy
    assert accuracy_figure(tmp_path / "accuracy.csv", tmp_path / "a.png").stat().st_size > 10_000


def _nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An honest driver passes."""


def _tune_on_test(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ImageStudy.tune

    def tune(self: ImageStudy, fit: Features, val: Features, *rest: Any) -> HeadSettings:
        feature_map = FeatureMap(self.used, tuple(self.images.shape[1:]))
        return real(self, fit, feature_map.encode(self.test_images, self.test_labels), *rest)

    monkeypatch.setattr(ImageStudy, "tune", tune)


def _tune_on_what_was_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ImageStudy.tune
    monkeypatch.setattr(ImageStudy, "tune", lambda self, fit, val, *rest: real(self, fit, fit, *rest))


def _test_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ImageStudy.final
    monkeypatch.setattr(ImageStudy, "final", lambda self, *rest: max(real(self, *rest), real(self, *rest), key=str))


@pytest.mark.parametrize("mutate", [_nothing, _tune_on_test, _tune_on_what_was_trained, _test_twice])
def test_drivers_that_cheat_are_found(mutate: Any, tmp_path: Path, tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = follow(monkeypatch)
    mutate(monkeypatch)
    study = ImageStudy("mnist", tmp_path, trials=2, seeds=1, hidden=0, epsilons=(3.0,), limit=60, methods=("dp-sgd",),
                       linear_methods=("dp-sgd",), say=lambda line: None)  # fmt: skip
    study.noise.values.update({f"3/{n}/{n}/{steps}": 9.0 for n in (54, 60) for steps in (6, 12)})  # calibrating is slow
    study.run()
    with contextlib.nullcontext() if mutate is _nothing else pytest.raises(AssertionError):
        check_records(study, asked)


def test_features_are_scored_by_private_runs(tmp_path: Path, tiny: None) -> None:
    study = ImageStudy("mnist", tmp_path, limit=100, epsilons=(3.0,), say=lambda line: None)
    assert 0 <= study._feature_score(FeatureSettings()) <= 100
    with pytest.raises(wc.WeightclipError, match="no results"):
        chosen_features(tmp_path, "cifar10")


def test_rows_replace_only_their_own_kind(tmp_path: Path) -> None:
    row = dict.fromkeys(COLUMNS, "1") | {"dataset": "mnist", "model": "m", "method": "caps", "median": "50"}
    merge_rows(tmp_path / "t.csv", [row, row | {"epsilon": "inf"}])
    merge_rows(tmp_path / "t.csv", [row | {"median": "60"}, row | {"dataset": "cifar10"}])
    rows = table(tmp_path / "t.csv")
    assert [(r["dataset"], r["epsilon"], r["median"]) for r in rows] == [
        ("cifar10", "1", "50"), ("mnist", "1", "60"), ("mnist", "inf", "50")
    ]  # fmt: skip


def reproduce() -> typer.Typer:
    app = typer.Typer()
    _images.register(app)
    return app


def test_images_command(tmp_path: Path, tiny: None) -> None:
    options = ["images", "--out", str(tmp_path), "--datasets", "mnist", "--methods", "dp-sgd", "--linear", "dp-sgd",
               "--trials", "1", "--seeds", "1", "--hidden", "4", "--limit", "200", "--device", "cpu"]  # fmt: skip
    assert CliRunner().invoke(reproduce(), [*options, "--methods", "magic"]).exit_code == 2
    (tmp_path / "mnist.json").write_text(json.dumps([{"features": FeatureSettings().to_dict(), **old_entry()}]))
    result = CliRunner().invoke(reproduce(), [*options, "--keep-features", "--json"])
    assert result.exit_code == 0, result.output
    files = json.loads(result.stdout)["files"]
    assert all(Path(f).exists() for f in files)
    rows = table(tmp_path / "accuracy.csv")
    assert len(rows) == 6 and {r["seeds"] for r in rows} == {"1"}


def old_entry() -> dict[str, str]:
    return {"dataset": "mnist", "model": "old", "method": "caps", "epsilon": "1"}


def test_runtime_command(tmp_path: Path) -> None:
    options = ["runtime", "--out", str(tmp_path), "--models", "convnet", "--batches", "4", "--modes",
               "plain,weightclip", "--seconds", "0.01", "--device", "cpu"]  # fmt: skip
    result = CliRunner().invoke(reproduce(), options)
    assert result.exit_code == 0, result.output
    rows = table(tmp_path / "runtime.csv")
    assert tuple(rows[0]) == RUNTIME_COLUMNS and [r["mode"] for r in rows] == ["plain", "weightclip"]
    assert all(float(r["seconds_per_epoch"]) > 0 for r in rows)
    assert runtime_figure(tmp_path / "runtime.csv", tmp_path / "r.png").exists()
    assert CliRunner().invoke(reproduce(), ["runtime", "--batches", "x"]).exit_code == 2


def test_runtime_command_on_real_data(tmp_path: Path) -> None:
    """Rows by views and physical batches; rows of other settings stay; Opacus gets every view as a record."""
    options = ["runtime", "--real", "--out", str(tmp_path), "--models", "convnet", "--limit", "120", "--batches", "16",
               "--modes", "plain,weightclip-cap,opacus", "--physical", "24", "--device", "cpu"]  # fmt: skip
    result = CliRunner().invoke(reproduce(), options)
    assert result.exit_code == 0, result.output
    result = CliRunner().invoke(reproduce(), [*options, "--views", "3"])
    assert result.exit_code == 0, result.output
    rows = table(tmp_path / "runtime_real.csv")
    assert tuple(rows[0]) == PACE_COLUMNS and (tmp_path / "runtime_real.png").exists()
    seconds = {(r["mode"], r["views"]): float(r["seconds_per_epoch"]) for r in rows}
    assert len(rows) == len(seconds) == 6 and {r["physical"] for r in rows} == {"24"}
    assert all(seconds[m, "3"] > 1.3 * seconds[m, "1"] > 0 for m in ("plain", "weightclip-cap", "opacus"))
    wrong = CliRunner().invoke(reproduce(), [*options, "--views", "30"])
    assert isinstance(wrong.exception, WeightclipError) and "30 views" in str(wrong.exception)


def test_published_results_are_those_of_the_page() -> None:
    """What the figure shows of others stands in the page's table, and the other way round."""
    text = (Path(__file__).parents[3] / "docs" / "images.md").read_text()
    for dataset, points in PUBLISHED.items():
        found = set()
        for who, cells in re.findall(rf"^\| {TITLES[dataset]}, [^|]*\(([^|]* 20\d\d)\) \|(.*)\|$", text, re.M):
            levels = zip((1, 2, 3, 8), cells.split("|"), strict=True)
            found |= {(who, level, float(cell)) for level, cell in levels if cell.strip()}
        assert found == set(points) and found


def test_every_result_is_audited(tmp_path: Path) -> None:
    settings = _search.proposals("caps", 8, 1.0, 1)[0].to_dict()
    entry = old_entry() | {"settings": settings, "shares": {"alone": 0.9}, "stage": "final"}
    (tmp_path / "mnist.json").write_text(json.dumps([entry, entry | {"shares": None}]))
    rows = audit_results(tmp_path)
    assert len(rows) == 1 and rows[0]["falsifier"] <= 1 + 1e-6 and rows[0]["one_step"] <= 1 + 1e-6
    assert json.loads((tmp_path / "audit.json").read_text()) == rows
    # a head that was audited keeps its row, one that was trained anew does not; networks' rows stay
    marked = [rows[0] | {"falsifier": 0.123}, {"dataset": "mnist", "bound": "exact"}]
    (tmp_path / "audit.json").write_text(json.dumps(marked))
    assert audit_results(tmp_path) == marked[:1]
    assert json.loads((tmp_path / "audit.json").read_text()) == marked
    (tmp_path / "mnist.json").write_text(json.dumps([entry | {"shares": {"alone": 0.8}}]))
    assert audit_results(tmp_path) == [rows[0] | {"trained_alone": 0.8}]


def test_committed_results_are_private_and_audited() -> None:
    folder = Path(__file__).resolve().parents[3] / "results" / "images"
    rows = table(folder / "accuracy.csv")
    shown = ("exact", "factors", "weights")  # of the caps, the table of methods holds the exact ones
    audits = [r for r in json.loads((folder / "audit.json").read_text()) if r.get("bound", "exact") in shown]
    audited = {tuple(r[k] for k in ("dataset", "model", "method", "epsilon")): r for r in audits}
    heads = [r for r in rows if "cnn" not in r["model"]]
    for row in rows:
        on_a_cpu = row["dataset"] == "mnist" and "learned" in row["model"]  # as docs/images.md says
        assert tuple(row) == COLUMNS and row["device"] == ("cpu" if on_a_cpu else "NVIDIA H200")
        assert int(row["seeds"]) == 5
        if math.isinf(float(row["epsilon"])) or (row not in heads and row["method"] == "dp-sgd"):  # that is Opacus
            continue
        found = audited[tuple(row[k] for k in ("dataset", "model", "method", "epsilon"))]
        assert max(v for k, v in found.items() if isinstance(v, float)) <= 1 + 1e-6, found
    entries = [
        e for name in ("mnist", "fashion_mnist", "cifar10") for e in json.loads((folder / f"{name}.json").read_text())
    ]
    assert len(entries) == len(heads)
    entries += json.loads((folder / "convolutions.json").read_text())
    assert all(e["spent"] <= float(e["epsilon"]) for e in entries if e["spent"] is not None)
    assert all(e["spent"] is not None for e in entries if e["epsilon"] != "inf")
