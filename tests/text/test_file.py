"""Tables whose text column is read through an encoder, and the commands that use them."""

from __future__ import annotations

import csv
import hashlib
import json
import random

import numpy as np
import pytest
from tests import text_kit
from tests.cli.test_train import fails, run

from weightclip import WeightclipError
from weightclip.tabular import Schema
from weightclip.tabular.files import File, load
from weightclip.text import TextFile

OPTIONS = ["--encoder", "tiny", "--target", "label", "--epsilon", "8", "--epochs", "4", "--seed", "0"]
N = 400


@pytest.fixture
def encoder(tmp_path, monkeypatch):
    return text_kit.install(tmp_path, monkeypatch)


@pytest.fixture
def reviews(tmp_path):
    rng = random.Random(1)
    path = tmp_path / "reviews.csv"
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "review", "label"])
        for i in range(N):
            label = rng.choice(["pos", "neg"])
            words = rng.choices(["film", "plot", "a", "the", "and"], k=4) + [{"pos": "good", "neg": "bad"}[label]] * 3
            writer.writerow([i, "" if i == 7 else " ".join(words), label])
    return path


def column(path, name: str) -> list[str]:
    with open(path, newline="") as file:
        return [row[name] for row in csv.DictReader(file)]


def test_a_file_seen_through_an_encoder(encoder, reviews):
    source = TextFile(File(reviews), "review", encoder)
    known = source.schema(Schema(), "label")
    loaded = load(source, "label", known)
    assert loaded.classes == ("neg", "pos") and loaded.inferred == ()
    assert loaded.table.values.shape == (N, encoder.width)
    texts = column(reviews, "review")
    assert np.array_equal(loaded.table.values, encoder.features(texts).astype(float))
    assert not loaded.table.values[7].any()


def test_train_predict_certify_verify(encoder, reviews, tmp_path, capsys):
    model = tmp_path / "model"
    run("train", reviews, "--text", "review", *OPTIONS, "--out", model, capsys=capsys)
    pipeline = json.loads((model / "pipeline.json").read_text())
    assert pipeline["text"] == {"column": "review", "encoder": "tiny", "sha256": encoder.digest}
    report = json.loads((model / "privacy.json").read_text())
    assert [m["label"] for m in report["mechanisms"]] == ["noisy gradients"]  # a public scale costs nothing
    assert any("encoder 'tiny' counts as public" in s for s in report["not_covered"])
    predicted = run("predict", model, reviews, capsys=capsys).out.split()[1:]
    labels = column(reviews, "label")
    assert np.mean([p == y for p, y in zip(predicted, labels, strict=True)]) > 0.95
    for command in ("certify", "verify"):
        run(command, model, capsys=capsys)


def test_another_encoder_is_refused(encoder, reviews, tmp_path, monkeypatch, capsys):
    model = tmp_path / "model"
    run("train", reviews, "--text", "review", *OPTIONS, "--out", model, capsys=capsys)
    text_kit.install(tmp_path, monkeypatch, seed=1)
    fails(capsys, "predict", model, reviews, match="other weights than the one this model was trained on")


@pytest.mark.parametrize(
    "more, match",
    [
        (["--text", "revew"], "no column 'revew': did you mean 'review'?"),
        (["--text", "label"], "cannot be the text and the target"),
        (["--text", "review", "--public-scaling"], "leave scaling options"),
        (["--text", "review", "--categorical", "id"], "leave scaling options and --categorical out"),
        (["--text", "review", "--encoder", "other"], "no encoder 'other'"),
    ],
    ids=["no such column", "the target", "scaling", "categorical", "encoder"],
)
def test_wrong_options_are_answered_in_one_line(encoder, reviews, tmp_path, capsys, more, match):
    fails(capsys, "train", reviews, *OPTIONS, *more, "--out", tmp_path / "model", match=match)
    assert not (tmp_path / "model").exists()


def test_one_class_is_answered_in_one_line(encoder, tmp_path, capsys):
    path = tmp_path / "one.csv"
    path.write_text("review,label\n" + "good film,pos\n" * 30)
    fails(capsys, "train", path, "--text", "review", *OPTIONS, "--out", tmp_path / "model", match="holds 1 class")


def test_numbers_are_no_text(encoder, tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"review": [1.0, 2.0], "label": ["a", "b"]}), tmp_path / "numbers.parquet")
    with pytest.raises(WeightclipError, match="'review' holds numeric values, not text"):
        TextFile(File(tmp_path / "numbers.parquet"), "review", encoder).header()


def test_a_described_column_is_refused(encoder, reviews):
    known = Schema.from_json({"columns": [{"name": "id", "type": "numeric"}]})
    with pytest.raises(WeightclipError, match="'id' is described, but --text reads one column alone"):
        TextFile(File(reviews), "review", encoder).schema(known, "label")


def test_a_tampered_entry_is_refused(encoder, reviews, tmp_path, capsys):
    model = tmp_path / "model"
    run("train", reviews, "--text", "review", *OPTIONS, "--out", model, capsys=capsys)
    pipeline = json.loads((model / "pipeline.json").read_text())
    pipeline["text"] = {"column": 3}
    (model / "pipeline.json").write_text(json.dumps(pipeline))
    sums = json.loads((model / "checksums.json").read_text())
    sums["pipeline.json"] = hashlib.sha256((model / "pipeline.json").read_bytes()).hexdigest()
    (model / "checksums.json").write_text(json.dumps(sums))
    fails(capsys, "predict", model, reviews, match="'text' must be an object with column, encoder")
