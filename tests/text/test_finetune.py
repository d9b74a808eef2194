"""Encoders that are fine-tuned privately: what is trained and limited, what it costs, and the folders they become."""

from __future__ import annotations

import csv
import hashlib
import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests import text_kit
from tests.cli.test_train import fails, run
from torch.utils.data import DataLoader, TensorDataset

from weightclip import LipDPClassifier, PrivacyEngine, WeightclipError, accounting, losses
from weightclip.noise import Streams
from weightclip.tabular import FitPlan, PublicScaling
from weightclip.tabular import folder as folders
from weightclip.text import ENCODERS, Lora, fit_lora, load_encoder
from weightclip.text import _finetune as finetune_module
from weightclip.text._encoder import Package
from weightclip.text._lora import Classifier, words_and_ends

N = 300
TINY = ["--encoder", "tiny", "--target", "label", "--epsilon", "8", "--seed", "0", "--tokens", "12", "--rank", "2",
        "--accountant", "rdp"]  # fmt: skip
TUNE = ["--text", "review", "--finetune", "lora", *TINY]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        yield text_kit.install(tmp_path_factory.mktemp("encoder"), patch)


@pytest.fixture
def reviews(tmp_path):
    rng, path = random.Random(1), tmp_path / "reviews.csv"
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "review", "label"])
        for i in range(N):
            label = rng.choice(["pos", "neg"])
            words = rng.choices(["film", "plot", "a", "the", "and"], k=4) + [{"pos": "good", "neg": "bad"}[label]] * 3
            said = {7: "", 11: "good " * 3000, 12: "\U0001f3ac \x00 [PAD] '\"", 13: " \t "}.get(i, " ".join(words))
            writer.writerow([i, said, "" if i == 9 else label])
    return path


@pytest.fixture(scope="module")
def tuned(encoder):
    return fitted(encoder, records=90)


def plan(**more) -> FitPlan:
    chosen = {"epochs": 1.0}
    return FitPlan(8.0, 1e-5, PublicScaling(pieces=1), chosen, streams=Streams.seeded(0), **more)


def texts(n: int) -> tuple[list[str], np.ndarray]:
    codes = np.arange(n) % 2
    return [f"the {('bad', 'good')[c]} film {'very ' * (i % 5)}" for i, c in enumerate(codes)], codes


def fitted(encoder, count: int = 60, **more):
    said, codes = texts(count)
    lora = Lora(rank=2, tokens=8)
    rows = replace(encoder, longest=8).padded(said)
    return fit_lora(rows, codes, ("neg", "pos"), "label", "review", encoder, lora, plan(**more))


def test_train_predict_certify_verify(encoder, reviews, tmp_path, capsys):
    model = tmp_path / "model"
    said = run("train", reviews, *TUNE, "--epochs", "6", "--out", model, capsys=capsys).out
    assert "differentially private" in said
    pipeline, report = (json.loads((model / name).read_text()) for name in ("pipeline.json", "privacy.json"))
    known = {"column": "review", "encoder": "tiny", "sha256": encoder.digest}
    assert pipeline["format"] == 1 and pipeline["text"] == {**known, "lora": {"rank": 2, "tokens": 12}}
    assert report["public"]["records"] == N and report["delta"] == 1e-5 and report["epsilon"] <= 8
    assert [m["label"] for m in report["mechanisms"]] == ["noisy gradients"]
    assert report["public"]["steps"] == report["mechanisms"][0]["steps"] == 6 * 15
    assert len(report["layers"]) == 5  # the head, queries and values of two layers
    assert "fine-tuned by updates of rank 2" in (model / "README.md").read_text()
    assert sum(f.stat().st_size for f in model.iterdir()) < 60_000  # updates alone, not the encoder
    predicted = run("predict", model, reviews, capsys=capsys).out.split()[1:]
    with open(reviews, newline="") as file:
        labels = [row["label"] for row in csv.DictReader(file)]
    assert np.mean([p == y for p, y in zip(predicted, labels, strict=True)]) > 0.9
    assert "5, one cap of 1" in run("certify", model, capsys=capsys).out
    assert json.loads(run("certify", model, "--json", capsys=capsys).out)["certificate"] is None
    assert run("verify", model, capsys=capsys).out.endswith("ok\n")
    with pytest.raises(WeightclipError, match="through an encoder of its own: use weightclip predict"):
        LipDPClassifier.load(model)


def test_epsilon_is_the_engines_and_public_numbers_count(tuned):
    public = tuned.report["public"]
    assert public["records"] == 90 and public["expected_batch_size"] == 1.25 * 6 and public["steps"] == 15
    assert public["sample_rate"] == pytest.approx(6 / 90)  # of the number that is declared, not of the 60 there are
    assert tuned.report["epsilon"] == pytest.approx(tuned.epsilon, rel=1e-9) and 7.9 < tuned.epsilon <= 8.0
    (listed,) = tuned.report["mechanisms"]
    again = accounting.Mechanism("gaussian", listed["sigma"], 6 / 90, 15)
    assert accounting.epsilon([again], 1e-5) == pytest.approx(tuned.epsilon, rel=1e-9)
    assert all(1.0 <= layer["sensitivity"] < 1.05 for layer in tuned.report["layers"])  # the cap, and its rounding
    ratios = {layer["noise"] / layer["sensitivity"] for layer in tuned.report["layers"]}
    assert min(ratios) >= listed["sigma"] * (1 - 1e-9) and sum(w["parameters"] for w in tuned.report["layers"]) == 145


def test_a_step_that_nobody_counted_is_found(encoder, monkeypatch):
    """The mutant: training goes on for a step after those that the report lists."""
    real = finetune_module._loop
    monkeypatch.setattr(
        finetune_module, "_loop",
        lambda engine, average, settings, steps, *more: real(engine, average, settings, steps + 1, *more),
    )  # fmt: skip
    with pytest.raises(WeightclipError, match="the engine has spent"):
        fitted(encoder, accountant="rdp")


def test_fits_without_a_seed_differ_and_say_so(encoder, monkeypatch):
    said, codes = texts(30)
    loop, secure = finetune_module._loop, []

    def watched(engine, *rest):
        secure.append(engine.streams.is_secure)  # whatever the initial weights are drawn from
        loop(engine, *rest)

    monkeypatch.setattr(finetune_module, "_loop", watched)
    rows = replace(encoder, longest=8).padded(said)
    found = [
        fit_lora(rows, codes, ("neg", "pos"), "label", "review", encoder, Lora(rank=2, tokens=8),
                 replace(plan(not_covered=("a word of the caller",)), streams=Streams.secure()))
        for _ in range(2)
    ]  # fmt: skip
    one, other = (tuned.model.weights[0][0] for tuned in found)
    assert np.abs(one - other).max() > 1e-3
    assert all(tuned.report["secure_noise"] for tuned in found) and not fitted(encoder).report["secure_noise"]
    assert secure == [True, True, False]
    assert "a word of the caller" in found[0].report["not_covered"]
    assert any(line.startswith("place") for line in found[0].report["not_covered"])


@pytest.mark.parametrize("classes", [("neg", "pos"), ("neg", "odd", "pos")])
def test_texts_without_a_known_label_contribute_nothing(encoder, monkeypatch, classes):
    """The release without noise of texts of which some have no label is that of the others."""
    sums: list[torch.Tensor] = []

    def watched(engine, average, settings, steps, progress, device):
        (x, y), step = next(iter(engine.loader)), engine.fused_step()
        step(x, y)
        sums.append(torch.cat([p.grad.flatten() for p in engine.optimizer.param_groups[0]["params"]]))

    monkeypatch.setattr(finetune_module, "_loop", watched)
    monkeypatch.setattr(finetune_module, "_FRACTION", 1.0)
    monkeypatch.setattr(finetune_module.Budget, "sigma", lambda *a: 1e-9)
    monkeypatch.setattr(finetune_module, "privacy_report", lambda *a, **k: {"epsilon": float("inf")})
    said, codes = texts(6)
    labels = np.array([0.0, np.nan, 1.0, -1.0, 1.0, 7.0]) if len(classes) == 2 else np.array([0, -1, 1, 99, 2, -100])
    known = [0, 2, 4]
    rows = replace(encoder, longest=8).padded(said)
    for keep in (range(6), known):
        keep = list(keep)
        fit_lora(rows[keep], labels[keep], classes, "label", "review", encoder, Lora(rank=2, tokens=8),
                 plan(records=6))  # fmt: skip
    assert sums[1].norm() > 0 and torch.allclose(sums[0], sums[1], atol=1e-6)


def test_earlier_releases_and_weights_are_refused(encoder):
    paid = accounting.Mechanism("gaussian", 0.3, 1.0, 1)
    for more in ({"spent": (paid,)}, {"past": (paid,)}, {"weights": np.ones(60)}):
        with pytest.raises(WeightclipError, match="leave them out"):
            fitted(encoder, **more)


def test_a_network_that_mixes_the_words_of_texts_is_refused(encoder, monkeypatch):
    """The mutant: each text is read with the words of the one before it."""
    real = Classifier.forward

    def mixed(self, rows):
        return real(self, torch.stack([rows[:, 0].roll(1, 0), rows[:, 1]], 1))

    monkeypatch.setattr(Classifier, "forward", mixed)
    with pytest.raises(WeightclipError, match="record"):
        fitted(encoder)


def test_each_text_is_limited_over_head_and_updates_together(encoder):
    """The release without noise is the sum of exact gradients, each cut to norm 1 over everything that is trained."""
    said, codes = texts(5)
    rows = words_and_ends(replace(encoder, longest=8).padded(said))
    y = torch.from_numpy(codes.astype(np.float32))
    network = Classifier(encoder, Lora(rank=2, tokens=8), 1, Streams.seeded(1)).eval().double()
    trained = [p for p in network.parameters() if p.requires_grad]
    with torch.no_grad():
        for p in trained:
            p.normal_()
    assert {id(p) for p in trained} == {id(p) for p in network.trained.parameters()}
    exact = [torch.zeros_like(p) for p in trained]
    norms = []
    for row, label in zip(rows, y.double(), strict=True):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(network(row[None])[0, 0], label)
        found = torch.autograd.grad(loss, trained)
        norms.append(float(sum(g.square().sum() for g in found)) ** 0.5)
        for total, g in zip(exact, found, strict=True):
            total += g / max(1.0, norms[-1])
    assert max(norms) > 1.5  # the cap acts
    engine = PrivacyEngine()
    optimizer = torch.optim.SGD(trained, lr=0.0)
    _, _, loader, loss = engine.make_private(
        module=network, optimizer=optimizer, data_loader=DataLoader(TensorDataset(rows, y.double()), batch_size=5),
        criterion=losses.BCEWithLogits(), noise_multiplier=0.0, sample_rate=1.0,
    )  # fmt: skip
    for x, label in loader:
        loss(network(x), label).backward()
        optimizer.step()
    for p, total in zip(trained, exact, strict=True):
        assert torch.allclose(p.grad * 5, total, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("piece", [256, 4], ids=["whole", "pieces"])
def test_one_more_text_moves_a_release_by_at_most_the_cap(encoder, monkeypatch, piece):
    """Whatever it says and however long it is: two trainings as `fit_lora` runs them, without noise."""
    sums: list[torch.Tensor] = []

    def watched(engine, *rest):
        step = engine.fused_step()
        for x, y in engine.loader:
            step(x, y)
            if engine.steps:
                break
        sums.append(1.25 * 8 * torch.cat([p.grad.flatten() for p in engine.optimizer.param_groups[0]["params"]]))

    monkeypatch.setattr(finetune_module, "_loop", watched)
    monkeypatch.setattr(finetune_module, "_FRACTION", 1.0)
    monkeypatch.setattr(finetune_module, "_PIECE", piece)
    monkeypatch.setattr(finetune_module.Budget, "sigma", lambda *a: 1e-9)
    monkeypatch.setattr(finetune_module, "privacy_report", lambda *a, **k: {"epsilon": float("inf")})
    said, codes = texts(8)
    for more in (None, "good", "", "[PAD] [PAD] very", "bad " * 500, "\x00"):
        rows = replace(encoder, longest=8).padded([*said, *([] if more is None else [more])])
        labels = np.append(codes, 0)[: len(rows)]
        fit_lora(rows, labels, ("neg", "pos"), "label", "review", encoder, Lora(rank=2, tokens=8), plan(records=8))
    moved = [float((total - sums[0]).norm()) for total in sums[1:]]
    assert 0.99 < max(moved) < 1.001, moved


@pytest.mark.parametrize(
    "more, match",
    [
        (["--text", "review", "--finetune", "all"], "--finetune must be lora, got 'all'"),
        (["--finetune", "lora"], "name the column by --text"),
        (["--text", "review", "--rank", "3"], "--rank and --tokens belong to --finetune lora"),
        (["--text", "review", "--finetune", "lora", "--rank", "0"], "--rank must be a whole number from 1 to 256"),
        (
            ["--text", "review", "--finetune", "lora", "--tokens", "999"],
            "--tokens must be a whole number from 3 to 256",
        ),
        (["--text", "review", "--finetune", "lora", "--hidden", "8"], "leave --hidden out"),
        (["--text", "review", "--finetune", "lora", "--ledger", "x"], "leave --ledger and --resume out"),
        (["--text", "review", "--finetune", "lora", "--task", "regression"], "leave it out for --task regression"),
        (["--text", "revew", "--finetune", "lora"], "no column 'revew': did you mean 'review'?"),
        (["--text", "label", "--finetune", "lora"], "cannot be the text and the target"),
        (["--text", "review", "--finetune", "lora", "--target", "lable"], "no column 'lable'"),
    ],
    ids=["value", "no text", "no finetune", "rank", "tokens", "hidden", "ledger", "number", "column", "both", "target"],
)
def test_wrong_options_are_answered_in_one_line(encoder, reviews, tmp_path, capsys, more, match):
    options = ["--encoder", "tiny", "--target", "label", "--epsilon", "8", "--out", tmp_path / "model"]
    fails(capsys, "train", reviews, *options, *more, match=match)
    assert [p.name for p in tmp_path.iterdir()] == ["reviews.csv"]


@pytest.mark.parametrize(
    "rows, match",
    [
        ("review,label\n" + "good film,pos\n" * 30, "holds 1 class"),
        ("review,label\n", "holds a header and no rows"),
        ("review,label\ngood film\n", "row 2 has 1 fields"),
        ("", "is empty"),
    ],
    ids=["one class", "no rows", "short row", "nothing"],
)
def test_wrong_tables_are_answered_in_one_line(encoder, tmp_path, capsys, rows, match):
    (tmp_path / "x.csv").write_text(rows)
    fails(capsys, "train", tmp_path / "x.csv", *TUNE, "--out", tmp_path / "model", match=match)
    assert [p.name for p in tmp_path.iterdir()] == ["x.csv"]


def test_a_missing_encoder_is_named(tmp_path, reviews, monkeypatch, capsys):
    monkeypatch.setitem(ENCODERS, "tiny", Package("no_such_package", "no-such-package"))
    load_encoder.cache_clear()
    fails(capsys, "train", reviews, *TUNE, "--out", tmp_path / "model", match="pip install no-such-package")
    load_encoder.cache_clear()
    assert not (tmp_path / "model").exists()


def test_a_column_of_numbers_is_no_text(encoder, tmp_path, capsys):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"review": [1.0, 2.0], "label": ["a", "b"]}), tmp_path / "x.parquet")
    fails(capsys, "train", tmp_path / "x.parquet", *TUNE, "--out", tmp_path / "model", match="numeric values, not text")


@pytest.mark.parametrize(
    "change, match",
    [
        (lambda t: t.pop("text.encoder.layer.0.attention.self.query.up"), "are not complete"),
        (lambda t: [t.pop(k) for k in list(t) if k.startswith("text.")], "are not complete"),
        (lambda t: t.update({"text.pooler.up": t["layers.0.bias"], "text.pooler.down": t["layers.0.bias"]}), "rank 2"),
        (lambda t: t.update({k.replace("query", "mixer"): t.pop(k) for k in list(t) if "query" in k}), "no layer"),
        (lambda t: t.update({"layers.0.weight": t["layers.0.weight"] * np.float32(np.nan)}), "finite float32"),
        (lambda t: t.update({k: v * np.float32(np.nan) for k, v in t.items() if k.endswith("up")}), "finite float32"),
    ],
    ids=["half an update", "no update", "vectors", "another layer", "no numbers", "an update of no numbers"],
)
def test_a_damaged_update_is_answered_in_one_line(encoder, tmp_path, reviews, tuned, capsys, change, match):
    tensors = {**tuned.model.tensors(), **tuned.update.tensors()}
    change(tensors)
    entry = {"column": "review", "encoder": "tiny", "sha256": encoder.digest, "lora": {"rank": 2, "tokens": 8}}
    folders.save(tmp_path / "model", tensors, {**tuned.model.pipeline(), "text": entry}, tuned.report)
    fails(capsys, "predict", tmp_path / "model", reviews, match=match)


@pytest.mark.parametrize("entry", [{}, {"rank": 2}, {"rank": "2", "tokens": 8}, {"rank": 2, "tokens": 10**9}, 3])
def test_a_damaged_entry_is_answered_in_one_line(encoder, tmp_path, reviews, tuned, capsys, entry):
    whole = {"column": "review", "encoder": "tiny", "sha256": encoder.digest, "lora": {"rank": 2, "tokens": 8}}
    folders.save(tmp_path / "model", tuned.model.tensors(), {**tuned.model.pipeline(), "text": whole}, tuned.report)
    pipeline = json.loads((tmp_path / "model" / "pipeline.json").read_text())
    pipeline["text"]["lora"] = entry
    (tmp_path / "model" / "pipeline.json").write_text(json.dumps(pipeline))
    sums = json.loads((tmp_path / "model" / "checksums.json").read_text())
    sums["pipeline.json"] = hashlib.sha256((tmp_path / "model" / "pipeline.json").read_bytes()).hexdigest()
    (tmp_path / "model" / "checksums.json").write_text(json.dumps(sums))
    fails(capsys, "predict", tmp_path / "model", reviews, match="'text' must be an object")
