"""Heads on learned features in small: chosen on validation, tested once, resumed; the plan, and pieces of data."""

from __future__ import annotations

import csv
import json
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from weightclip.accounting import Mechanism, epsilon
from weightclip.errors import WeightclipError
from weightclip_studies.cli import _extractor
from weightclip_studies.images import FeatureSettings, ImageStudy, _climb, _experiment, _features, _learned, _plan
from weightclip_studies.images._learned import FIXED, HeadStudy, feature_settings
from weightclip_studies.images.extractor import (
    PLACES,
    ContrastiveTraining,
    LearnedSettings,
    Processes,
    Recipe,
    ResNet9,
    contact_sheet,
    describe_extractor,
    pictures,
    save_extractor,
)

TINY = Recipe(width=2, images=24, steps=2, pairs=8, processes=Processes(size=32, leaves=4))


def fake_images(name: str, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Ten kinds of pictures that differ in the place of a bright bar, with noise."""
    rng = np.random.default_rng(0 if part == "train" else 1)
    labels = rng.integers(0, 10, 200).astype(np.uint8)
    images = rng.integers(0, 60, (200, 28, 28)).astype(np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[2 * label + 3 : 2 * label + 7] += 180
    return images, labels


@pytest.fixture
def weights(tmp_path, monkeypatch) -> Path:
    torch.manual_seed(0)
    folder = tmp_path / "extractor"
    monkeypatch.setenv(PLACES, str(folder))
    monkeypatch.setattr(_experiment, "load_images", fake_images)
    monkeypatch.setattr(_learned, "CHUNK", 50)
    whole = _features.dead_leaves
    monkeypatch.setattr(_features, "dead_leaves", lambda count, *a, **k: whole(min(count, 24), *a, **k))
    monkeypatch.setitem(_learned.FIXED, "mnist", FeatureSettings())
    few = {"learning_rate": (0.02, 0.05, 0.1), "cap": (0.3, 0.5, 0.9), "steps": (8,), "batch": (200,),
           "bias_scale": (0.2,), "average": (0.9,)}  # fmt: skip
    monkeypatch.setattr(_learned, "climb", lambda *a: _climb.climb(*a, lists=few))
    settings = LearnedSettings.__init__
    monkeypatch.setattr(LearnedSettings, "__init__", lambda self, *a, **k: settings(self, *a, **{"pictures": 24, **k}))
    save_extractor(folder, "resnet9-2-seed0", ResNet9(2), TINY)
    contact_sheet(pictures(16, TINY.processes, 0), folder / "resnet9-2-seed0.png")
    return folder


def heads(out: Path, weights: Path, kind: str = "learned", **options) -> HeadStudy:
    study = ImageStudy("mnist", out, seeds=2, epsilons=(3.0,), limit=150, say=lambda line: None)
    features = feature_settings("mnist", kind, weights, ["resnet9-2-seed0"])
    return HeadStudy(study, features, **{"trials": 3, **options})


def entries(out: Path, stage: str) -> list[dict]:
    lines = [json.loads(line) for line in (out / "mnist.jsonl").read_text().splitlines()]
    return [line for line in lines if line["stage"] == stage]


def test_heads_are_chosen_on_validation_and_tested_once(tmp_path, weights, monkeypatch) -> None:
    seen, real = [], _learned.HeadStudy._scorer
    monkeypatch.setattr(HeadStudy, "_scorer", lambda self, fit, val, *a: (
        seen.append((len(fit), len(val))), real(self, fit, val, *a))[1])  # fmt: skip
    rows_there: list[int] = []
    count = lambda: rows_there.append(len((tmp_path / "accuracy.csv").read_text().splitlines()) - 1)  # noqa: E731
    assert heads(tmp_path, weights, after_row=count).run() and rows_there == [1, 2]
    assert seen == [(135, 15)] * 2  # nine tenths and one tenth of the training part
    with (tmp_path / "accuracy.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(r["model"], r["method"], r["epsilon"], r["seeds"]) for r in rows] == [
        ("learned+linear", "lip-weights", "3", "2"), ("learned+linear", "non-private", "inf", "2")
    ]  # fmt: skip
    private, plain = (next(e for e in entries(tmp_path, "final") if e["epsilon"] == level) for level in ("3", "inf"))
    assert private["spent"] <= 3.0 and plain["sigma"] == 0 and private["features"]["learned"]["digests"]
    q = min(1.0, private["settings"]["batch"] / private["records"])
    spent = epsilon([Mechanism("gaussian", private["sigma"], q, private["settings"]["steps"])], 1e-5)
    assert spent == pytest.approx(private["spent"]) and max(private["shares"].values()) <= 1 + 1e-9
    for method, level in (("lip-weights", "3"), ("non-private", "inf")):
        trials = [e for e in entries(tmp_path, "trial") if (e["method"], e["epsilon"]) == (method, level)]
        (chosen,) = [e for e in entries(tmp_path, "final") if (e["method"], e["epsilon"]) == (method, level)]
        best = max(trials, key=lambda e: e["accuracy"])
        assert len(trials) == 3 and chosen["settings"] == best["settings"]  # the same number for all, the best of them


def look_at_the_test_part(self: HeadStudy, fit, val, method: str, level: float | None):
    """Mutant: the search scores heads on the test part."""
    study = self.study
    feature_map = _features.FeatureMap(self.features, (28, 28))
    test = feature_map.encode(study.test_images, study.test_labels, 50)
    return lambda settings: study.trial(fit, test, settings, level)


def test_the_test_part_has_no_say(tmp_path, weights, monkeypatch) -> None:
    def turned(name: str, part: str) -> tuple[np.ndarray, np.ndarray]:
        images, labels = fake_images(name, part)
        return images, 9 - labels if part == "test" else labels

    def chosen(out: Path, load) -> list:
        monkeypatch.setattr(_experiment, "load_images", load)
        assert heads(out, weights, methods=("non-private",)).run()
        return [e["settings"] for e in entries(out, "final")]

    assert chosen(tmp_path / "a", fake_images) == chosen(tmp_path / "b", turned)
    accuracies = [[e["accuracies"] for e in entries(tmp_path / out, "final")] for out in "ab"]
    assert accuracies[0] != accuracies[1]  # which the final rows are about
    monkeypatch.setattr(HeadStudy, "_scorer", look_at_the_test_part)
    assert chosen(tmp_path / "c", fake_images) != chosen(tmp_path / "d", turned)


def test_what_is_finished_is_not_made_again(tmp_path, weights, monkeypatch) -> None:
    study = heads(tmp_path, weights)
    made, real = [], study.study.trial

    def some(*args, **kwargs):
        made.append(1)
        study.until = 0.0 if len(made) == 2 else study.until
        return real(*args, **kwargs)

    monkeypatch.setattr(study.study, "trial", some)
    assert not study.run() and len(entries(tmp_path, "trial")) == 2 and entries(tmp_path, "final") == []
    with (tmp_path / "mnist.jsonl").open("a") as file:
        file.write('{"stage": "tri\n')  # cut off by a kill
    again = heads(tmp_path, weights)
    assert len(again._trials) == 2 and len(again.cells()) == 2 and again.run()
    kept = [
        line for line in (tmp_path / "mnist.jsonl").read_text().splitlines() if line.startswith("{") and line[-1] == "}"
    ]
    assert sum(json.loads(line)["stage"] == "trial" for line in kept) == 6  # two rows of three
    assert heads(tmp_path, weights).cells() == [] and heads(tmp_path, weights).run()
    assert len(heads(tmp_path, weights, "joined").cells()) == 2  # other features are other rows
    straight = tmp_path / "straight"
    assert heads(straight, weights).run()
    finals = [[(e["settings"], e["accuracies"]) for e in map(json.loads, kept) if e["stage"] == "final"],
              [(e["settings"], e["accuracies"]) for e in entries(straight, "final")]]  # fmt: skip
    assert finals[0] == finals[1]


def test_no_time_means_nothing_begins(tmp_path, weights) -> None:
    assert not heads(tmp_path, weights, until=time.time() - 1).run() and not (tmp_path / "mnist.jsonl").exists()


def test_passes_of_a_given_size_are_untried_and_said_to_be(tmp_path, weights, monkeypatch) -> None:
    passes, alone = [], _features.FeatureMap.chunk_alone
    encode = _learned.StoredCodes.features
    monkeypatch.setattr(_features.FeatureMap, "chunk_alone", lambda self, *a: passes.append("tried") or alone(self, *a))
    monkeypatch.setattr(_learned.StoredCodes, "features", lambda self, part, images, labels, chunk, *a: (
        passes.append(chunk), encode(self, part, images, labels, chunk, *a))[1])  # fmt: skip
    told: list[str] = []
    study = heads(tmp_path, weights, methods=("non-private",), trials=1, chunk=30)
    study.study.say = told.append
    assert study.run() and passes == [30, 30]  # training and test part, nothing tried
    (entry,) = entries(tmp_path, "encoded")
    assert entry["chunk"] == 30 and entry["alone"] is False and any("not tried" in line for line in told)
    passes.clear()
    assert heads(tmp_path / "tried", weights, methods=("non-private",), trials=1).run()
    (entry,) = entries(tmp_path / "tried", "encoded")
    assert passes == ["tried", entry["chunk"], entry["chunk"]] and entry["alone"] is True


def test_edges_are_warned_of(tmp_path, weights) -> None:
    told: list[str] = []
    study = heads(tmp_path, weights)
    study.study.say = told.append
    study._tell("lip-weights", 3.0, _climb.Chosen(_climb.head("dp-sgd", _climb.start(3.0)), 50.0, ("cap",), (50.0,)))
    assert "warning: cap" in told[-1]


def test_kinds_of_features(weights) -> None:
    for name, fixed in FIXED.items():
        joined = feature_settings(name, "joined", weights, ["resnet9-2-seed0"], share=0.6)
        assert joined.learned is not None and joined.learned.share == 0.6 and joined.patches == fixed.patches
        alone = feature_settings(name, "learned", weights, ["resnet9-2-seed0"])
        assert alone.name == "learned" and alone.learned is not None and alone.learned.flip == (name == "cifar10")
    with pytest.raises(WeightclipError, match="magic"):
        feature_settings("mnist", "magic", weights, [])


def plan(tmp_path: Path, **options) -> _plan.ExtractorPlan:
    given = {"recipes": (TINY,), "minutes": None, "order": (("mnist", "learned"),), "trials": 1, "seeds": 1,
             "limit": 100, "say": lambda line: None, **options}  # fmt: skip
    return _plan.ExtractorPlan(tmp_path / "work", tmp_path / "out", "cpu", **given)


def test_a_plan_goes_on_on_another_machine(tmp_path, weights, monkeypatch) -> None:
    monkeypatch.setitem(_experiment.EPSILONS, "mnist", (3.0,))
    assert plan(tmp_path, within=-1.0).run() == ["train", "mnist learned"]
    assert plan(tmp_path).run() == []
    assert {p.name for p in (tmp_path / "out").iterdir() if not p.name.startswith(".")} == {
        "resnet9-2-seed0.safetensors", "resnet9-2-seed0.json", "resnet9-2-seed0.png", "results.tar.gz"
    }  # fmt: skip
    with tarfile.open(tmp_path / "out" / "results.tar.gz") as tar:
        assert {"mnist.jsonl", "mnist.json", "accuracy.csv"} <= set(tar.getnames())
    for made in ("trial", "final"):  # what is finished is taken over, not made again
        monkeypatch.setattr(ImageStudy, made, None)
    monkeypatch.setattr(ContrastiveTraining, "run", None)
    assert plan(tmp_path / "other", earlier=tmp_path / "out").run() == []


def test_a_set_that_fails_stops_no_other(tmp_path, weights, monkeypatch) -> None:
    def some(name: str, part: str) -> tuple[np.ndarray, np.ndarray]:
        if name == "cifar10":
            raise WeightclipError("cifar10 not found")
        return fake_images(name, part)

    monkeypatch.setattr(_experiment, "load_images", some)
    monkeypatch.setitem(_experiment.EPSILONS, "mnist", (3.0,))
    told: list[str] = []
    both = (("cifar10", "learned"), ("mnist", "learned"))
    assert plan(tmp_path, order=both, methods=("non-private",), say=told.append).run() == ["cifar10 learned"]
    assert any("cifar10 learned failed: WeightclipError: cifar10 not found" in line for line in told)
    assert len(entries(tmp_path / "work" / "results", "final")) == 1


def test_a_plan_trains_for_steps_or_minutes(tmp_path, monkeypatch) -> None:
    made: list[_plan.ExtractorPlan] = []
    monkeypatch.setattr(_plan.ExtractorPlan, "run", lambda self: made.append(self) or [])
    options = ["plan", "--work", str(tmp_path), "--device", "cpu", "--nets", "2", "--width", "2"]
    for more in ([], ["--steps", "7", "--chunk", "25"], ["--minutes", "2.5"]):
        done = CliRunner().invoke(_extractor.app, [*options, *more])
        assert done.exit_code == 0, done.output
    by_default, counted, timed = made
    assert by_default.minutes == 4.0 and timed.minutes == 2.5 and by_default.chunk is timed.chunk is None
    assert counted.minutes is None and counted.chunk == 25
    assert [(r.seed, r.steps, r.width) for r in counted.recipes] == [(0, 7, 2), (1, 7, 2)]
    assert [r.steps for r in timed.recipes] == [Recipe().steps] * 2
    assert CliRunner().invoke(_extractor.app, [*options, "--steps", "0"]).exit_code == 2


def test_a_plan_of_steps_takes_as_many(tmp_path, weights, monkeypatch) -> None:
    monkeypatch.setitem(_experiment.EPSILONS, "mnist", (3.0,))
    recipe = replace(TINY, steps=3, seed=5)
    assert plan(tmp_path, recipes=(recipe,), chunk=20, methods=("non-private",)).run() == []
    assert describe_extractor(tmp_path / "work" / "extractor", "resnet9-2-seed5").recipe == recipe
    (entry,) = entries(tmp_path / "work" / "results", "encoded")
    assert entry["chunk"] == 20 and entry["alone"] is False


def test_rows_and_weights_of_a_plan_are_put_beside_earlier_ones(tmp_path, weights, monkeypatch) -> None:
    monkeypatch.setitem(_experiment.EPSILONS, "mnist", (3.0,))
    assert plan(tmp_path).run() == []
    out, old = tmp_path / "results", {"dataset": "mnist", "model": "old", "method": "caps", "epsilon": "1"}
    out.mkdir()
    (out / "mnist.json").write_text(json.dumps([old]))
    for _ in range(2):  # the second time changes nothing
        done = CliRunner().invoke(
            _extractor.app, ["adopt", str(tmp_path / "out"), "--out", str(out), "--weights", str(tmp_path / "kept")]
        )
        assert done.exit_code == 0, done.output
        assert [e["model"] for e in json.loads((out / "mnist.json").read_text())] == ["old"] + ["learned+linear"] * 2
        assert (out / "mnist.jsonl").read_text() == (tmp_path / "work" / "results" / "mnist.jsonl").read_text()
        assert len((out / "accuracy.csv").read_text().splitlines()) == 3 and (out / "accuracy.png").exists()
        assert (tmp_path / "kept" / "resnet9-2-seed0.safetensors").exists()
    assert CliRunner().invoke(_extractor.app, ["adopt", str(tmp_path)]).exit_code == 1


def test_a_machine_that_lacks_something_is_told_at_once(monkeypatch) -> None:
    monkeypatch.setattr(_plan, "_NEEDED", ("torch", "no_such_package"))
    with pytest.raises(WeightclipError, match="no_such_package"):
        _plan.check_machine("cpu")
    monkeypatch.setattr(_plan, "_NEEDED", ("torch",))
    if not torch.cuda.is_available():
        with pytest.raises(WeightclipError, match="no GPU"):
            _plan.check_machine("cuda")


def test_commands(tmp_path, weights, monkeypatch) -> None:
    monkeypatch.setitem(_experiment.EPSILONS, "mnist", (3.0,))
    run = CliRunner().invoke
    shown = run(_extractor.app, ["show", "--weights", str(weights)])
    assert shown.exit_code == 0 and "resnet9-2-seed0: 2 steps" in shown.output
    options = ["--width", "2", "--images", "16", "--pairs", "4", "--out", str(tmp_path / "w"), "--work", str(tmp_path)]
    made = run(_extractor.app, ["train", *options, "--steps", "1", "--device", "cpu"])
    assert made.exit_code == 0 and "resnet9-2-seed0.safetensors" in made.output, made.output
    assert run(_extractor.app, ["train", "--steps", "1", "--minutes", "1"]).exit_code == 1
    options = ["--weights", str(weights), "--datasets", "mnist", "--methods", "dp-sgd", "--trials", "1"]
    options += ["--seeds", "1", "--limit", "200", "--chunk", "40", "--out", str(tmp_path / "r"), "--device", "cpu"]
    done = run(_extractor.app, ["heads", "--features", "learned", *options])
    assert done.exit_code == 0, done.output
    assert [e["method"] for e in entries(tmp_path / "r", "final")] == ["dp-sgd"]
    assert [(e["chunk"], e["alone"]) for e in entries(tmp_path / "r", "encoded")] == [(40, False)]
    assert run(_extractor.app, ["heads", "--weights", str(tmp_path / "none")]).exit_code == 1
