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
from weightclip.text import TextEncoder, TextFile

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


@pytest.mark.parametrize(
    "rows, match",
    [
        (["1.5,pos", "2,neg"], "column 'review' holds numeric values, not text; name a column of words by --text"),
        ([",pos", '"  ",neg', "NA,pos"], "holds no text: all rows are blank"),
        (["good,pos", "bad,"], "'label' holds 1 class: at least two are needed, or another --target"),
        (["good,", "bad,"], "'label' holds no class"),
        (["good, but long,pos"], "row 2 has 3 fields, the header has 2: put values that hold the delimiter in quotes"),
        (["good,pos", '"bad,neg', "poor,neg"], "row 3 has 1 fields"),
        (None, "cannot read it (No such file"),
    ],
    ids=["numbers", "blank", "one class", "no label", "commas", "open quote", "no file"],
)
@pytest.mark.parametrize("tuned", [[], ["--finetune", "lora"]], ids=["frozen", "tuned"])
def test_tables_without_texts_or_classes_are_answered_before_any_text_is_encoded(
    encoder, tmp_path, capsys, monkeypatch, rows, match, tuned
):
    monkeypatch.setattr(TextEncoder, "tokens", None)
    path, before = tmp_path / "x.csv", set(tmp_path.iterdir())
    if rows is not None:
        path.write_text("\n".join(["review,label", *rows]) + "\n")
    fails(capsys, "train", path, "--text", "review", *OPTIONS, *tuned, "--out", tmp_path / "model", match=match)
    assert set(tmp_path.iterdir()) - before <= {path}


def test_one_strange_text_stops_nothing(encoder, tmp_path, capsys):
    """However long, blank or numeric it is; and where classes are declared, they need not be there."""
    said = ["good film", "", "3", "bad " * 50_000, "\x00 [PAD] \ufeff", "x" * 300_000, "nan", " \t"]
    path = tmp_path / "x.csv"
    path.write_text("review,label\n" + "".join(f"{t},{'pos' if i % 2 else 'neg'}\n" for i, t in enumerate(said * 4)))
    model = tmp_path / "model"
    run("train", path, "--text", "review", *OPTIONS, "--out", model, capsys=capsys)
    assert len(run("predict", model, path, capsys=capsys).out.split()) == 1 + 4 * len(said)
    path.write_text("review,label\n" + "good film,pos\n" * 9)
    options = ["--text", "review", *OPTIONS, "--classes", "neg,pos", "--out", tmp_path / "other"]
    assert "next to nothing" in run("train", path, *options, capsys=capsys).err


def test_a_text_far_behind_is_found(encoder, tmp_path):
    """Tables are looked through to the first text and the second class, block by block."""
    rows = 45_000
    lines = [f"{i},pos\n" for i in range(rows)]
    (tmp_path / "x.csv").write_text("review,label\n" + "".join(lines))
    source = TextFile(File(tmp_path / "x.csv"), "review", encoder)
    with pytest.raises(WeightclipError, match="numeric values, not text"):
        source.check(None)
    lines[rows - 2] = "good,pos\n"
    (tmp_path / "x.csv").write_text("review,label\n" + "".join(lines))
    source.check(None)
    source.check("no such column")  # is told of by `load`
    with pytest.raises(WeightclipError, match="1 class"):
        source.check("label")
    lines[rows - 1] = "good,neg\n"
    (tmp_path / "x.csv").write_text("review,label\n" + "".join(lines))
    source.check("label")


@pytest.mark.parametrize(
    "kind, held",
    [("timestamp", "timestamp"), ("list", "list<"), ("binary", "binary"), ("null", "null"), ("bool", "flag")],
)
def test_columns_of_other_types_are_no_text(encoder, tmp_path, capsys, kind, held):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    values = {
        "timestamp": pa.array([1, 2], pa.timestamp("s")), "list": pa.array([["a"], ["b"]]), "null": pa.nulls(2),
        "binary": pa.array([b"a", b"b"]), "bool": pa.array([True, False]),
    }  # fmt: skip
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"review": values[kind], "label": ["a", "b"]}), path)
    fails(capsys, "train", path, "--text", "review", *OPTIONS, "--out", tmp_path / "model", match=f"holds {held}")
    for text in (pa.array(["a", "b"], pa.large_string()), pa.array(["a", "b"]).dictionary_encode()):
        pq.write_table(pa.table({"review": text, "label": ["a", "b"]}), path)
        assert "label" in TextFile(File(path), "review", encoder).header()


def test_a_column_that_is_named_as_a_number_of_the_text_is_refused(encoder, tmp_path, capsys):
    """It would have taken the number's place without a word."""
    (tmp_path / "x.csv").write_text("review,label,review #3\n" + "good,pos,1\nbad,neg,2\n")
    options = ["--text", "review", *OPTIONS, "--out", tmp_path / "model"]
    fails(
        capsys, "train", tmp_path / "x.csv", *options, match="'review #3' is named as a number of the text is: rename"
    )


def test_a_prediction_that_fails_prints_no_header(encoder, reviews, tmp_path, capsys):
    model = tmp_path / "model"
    run("train", reviews, "--text", "review", *OPTIONS, "--out", model, capsys=capsys)
    (tmp_path / "x.csv").write_text("text\ngood\n")
    for more in ([], ["--proba"], ["--out", tmp_path / "p.csv"]):
        fails(capsys, "predict", model, tmp_path / "x.csv", *more, match="no column 'review'")
    assert run("predict", model, tmp_path / "x.csv", expect=1, capsys=capsys).out == ""
    assert not list(tmp_path.glob("*p.csv")) and not list(tmp_path.glob(".weightclip*"))


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
