"""train, predict and certify, end to end and on everything that can be wrong with a file."""

from __future__ import annotations

import csv
import gzip
import json
import os

import numpy as np
import pytest

from weightclip.cli import main

RNG = np.random.default_rng(0)
N = 400
ROWS = [
    [f"{RNG.normal(40, 10):.1f}", RNG.choice(["a", "b", "c"]), RNG.choice(["1.5", "", "2"]), f"u{i}"] for i in range(N)
]
LABELS = ["yes" if row[1] == "a" else "no" for row in ROWS]
QUICK = ["--epochs", "2", "--seed", "0", "--accountant", "rdp"]


def write(path, rows=ROWS, labels=LABELS, header=("age", "job", "score", "id", "label"), **options):
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, **options)
        writer.writerow(header)
        writer.writerows([*row, label] for row, label in zip(rows, labels, strict=True))
    return path


@pytest.fixture
def table(tmp_path):
    return write(tmp_path / "data.csv")


def run(*arguments, expect=0, capsys=None):
    with pytest.raises(SystemExit) as exit:
        main([str(a) for a in arguments])
    captured = capsys.readouterr() if capsys else None
    assert exit.value.code == expect, captured
    return captured


def fails(capsys, *arguments, match, expect=1):
    error = run(*arguments, expect=expect, capsys=capsys).err.strip()
    lines = [line for line in error.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and match in lines[0], error
    assert "Traceback" not in error


def train(table, out, *more):
    return ["train", table, "--target", "label", "--epsilon", "3", "--out", out, *QUICK, *more]


def test_train_predict_certify(table, tmp_path, capsys):
    out = tmp_path / "model"
    assert "differentially private" in run(*train(table, out, "--ignore", "id"), capsys=capsys).out
    text = run("predict", out, table, "--proba", capsys=capsys).out.splitlines()
    assert text[0] == "label,P(no),P(yes)" and len(text) == N + 1
    assert abs(sum(float(v) for v in text[1].split(",")[1:]) - 1) < 1e-4
    run("predict", out, table, "--out", tmp_path / "p.csv", capsys=capsys)
    assert [line.split(",")[0] for line in text[1:]] == (tmp_path / "p.csv").read_text().splitlines()[1:]
    lines = run("predict", out, table, "--json", capsys=capsys).out.splitlines()
    assert json.loads(lines[0]) == {"label": text[1].split(",")[0]}
    shown = run("certify", out, capsys=capsys).out
    assert "files          unchanged" in shown and "layers.0" in shown
    result = json.loads(run("certify", out, "--json", capsys=capsys).out)
    report = json.loads((out / "privacy.json").read_text())
    assert result["epsilon"] == report["epsilon"] == pytest.approx(result["epsilon_recomputed"])
    assert {row["name"] for row in result["certificate"]["layers"]} == {e["name"] for e in report["layers"]}


def test_accuracy_of_the_whole_way(table, tmp_path, capsys):
    schema = {"columns": [{"name": "age", "type": "numeric", "low": 0, "high": 100},
                          {"name": "job", "type": "categorical", "categories": ["a", "b", "c"]}],
              "ignore": ["id"], "classes": ["no", "yes"]}  # fmt: skip
    (tmp_path / "s.json").write_text(json.dumps(schema))
    out = tmp_path / "m"
    run("train", table, "--target", "label", "--epsilon", 8, "--out", out, "--schema", tmp_path / "s.json", "--seed", 1,
        "--json", capsys=capsys)  # fmt: skip
    found = run("predict", out, table, capsys=capsys).out.splitlines()[1:]
    assert np.mean([a == b for a, b in zip(found, LABELS, strict=True)]) > 0.95


def test_json_report_and_inferred_types(table, tmp_path, capsys):
    captured = run(*train(table, tmp_path / "m", "--json"), capsys=capsys)
    report = json.loads(captured.out)
    assert any("types of columns age, job, score, id were inferred" in s for s in report["not_covered"])
    shown = run(*train(table, tmp_path / "m", "--overwrite"), capsys=capsys).err
    assert "numeric" in shown and "categorical" in shown and "values" in shown


def test_parquet_arrow_and_compressed_text(tmp_path, capsys):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    columns = list(zip(*ROWS, strict=True))
    frame = pa.table({"age": [float(v) for v in columns[0]], "job": list(columns[1]), "label": LABELS})
    pq.write_table(frame, tmp_path / "d.parquet")
    with pa.ipc.new_file(tmp_path / "d.arrow", frame.schema) as sink:
        sink.write_table(frame)
    with pa.ipc.new_stream(tmp_path / "s.arrow", frame.schema) as sink:
        sink.write_table(frame)
    with gzip.open(tmp_path / "d.csv.gz", "wt") as file:
        file.write("age,job,label\n" + "".join(f"{r[0]},{r[1]},{y}\n" for r, y in zip(ROWS, LABELS, strict=True)))
    results = []
    for name in ("d.parquet", "d.arrow", "s.arrow", "d.csv.gz"):
        out = tmp_path / f"m-{name}"
        run(*train(tmp_path / name, out), capsys=capsys)
        results.append(run("predict", out, tmp_path / name, "--proba", capsys=capsys).out)
    assert results[0] == results[1] == results[2] == results[3]


def test_regression(tmp_path, capsys):
    table = write(tmp_path / "r.csv", labels=[row[0] for row in ROWS])
    out = tmp_path / "m"
    run(*train(table, out, "--task", "regression", "--target-range", "0,100", "--ignore", "id"), capsys=capsys)
    values = [float(v) for v in run("predict", out, table, capsys=capsys).out.splitlines()[1:]]
    assert all(0 <= v <= 100 for v in values)
    fails(capsys, "predict", out, table, "--proba", match="--proba")
    run("certify", out, capsys=capsys)
    run(*train(table, tmp_path / "m2", "--task", "regression"), capsys=capsys)  # range found within the budget


def test_unseen_categories_missing_values_and_other_columns(table, tmp_path, capsys):
    out = tmp_path / "m"
    run(*train(table, out), capsys=capsys)
    (tmp_path / "new.csv").write_text("score,extra,id,job,age\n?,1,new,zebra,\n2,1,u1,a,40\n")
    captured = run("predict", out, tmp_path / "new.csv", capsys=capsys)
    assert len(captured.out.splitlines()) == 3
    assert "warning: 1 of 2 values of 'job' are missing or of categories the model does not know" in captured.err


@pytest.mark.parametrize("rows", [10, 11])
def test_ten_rows(tmp_path, capsys, rows):
    table = write(tmp_path / "d.csv", ROWS[:rows], ["x", "y"] * 5 + ["x"] * (rows - 10))
    captured = run(*train(table, tmp_path / "m"), capsys=capsys)
    assert f"{rows} records at epsilon 3 teach a model next to nothing" in " ".join(captured.err.split())
    assert (tmp_path / "m" / "privacy.json").exists()


def test_constant_and_empty_columns_and_many_classes(tmp_path, capsys):
    rows = [["1", "", "k", row[0]] for row in ROWS]
    table = write(tmp_path / "d.csv", rows, [str(i % 150) for i in range(N)])
    assert "classes share one budget" in run(*train(table, tmp_path / "m"), capsys=capsys).err
    assert json.loads((tmp_path / "m" / "pipeline.json").read_text())["classes"][:3] == ["0", "1", "2"]


def test_memory_does_not_grow_with_the_file(tmp_path, capsys, monkeypatch):
    """A file is read in blocks, into a mapped array, and encoded draw by draw."""
    import tracemalloc

    from weightclip.tabular import files as _files
    from weightclip.tabular._columns import Schema

    monkeypatch.setattr(_files, "_ROWS", 100)
    names = [f"c{i}" for i in range(60)]
    path = tmp_path / "wide.csv"
    path.write_text(",".join([*names, "label"]) + "\n" + ",".join(["0.125", "abc"] * 30 + ["2\n"]) * 10_000)
    tracemalloc.start()
    loaded = _files.load(_files.File(path), "label", Schema())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(loaded.table.values, np.memmap) and loaded.table.values.shape == (10_000, 60)
    assert peak < 0.4 * loaded.table.values.nbytes


def test_a_wrong_first_guess_is_revised(tmp_path, monkeypatch):
    from weightclip.tabular import files as _files
    from weightclip.tabular._columns import Schema

    monkeypatch.setattr(_files, "_ROWS", 3)
    path = tmp_path / "d.csv"
    path.write_text("a,b,y\n" + "1,2,x\n" * 7 + "1,oops,y\n")
    loaded = _files.load(_files.File(path), "y", Schema())
    assert [c.kind for c in loaded.table.columns] == ["numeric", "categorical"]
    assert loaded.classes == ("x", "y") and loaded.target.tolist() == [0.0] * 7 + [1.0]


# -- what must fail, with one line, an exit code, and nothing half-written ---------------------------------------------


def nothing_written(tmp_path):
    return not [p for p in tmp_path.iterdir() if p.name.startswith((".m", "m"))]


def test_missing_target(table, tmp_path, capsys):
    fails(
        capsys, "train", table, "--target", "nope", "--epsilon", "1", "--out", tmp_path / "m", match="no column 'nope'"
    )
    assert nothing_written(tmp_path)


def test_text_in_a_numeric_column(table, tmp_path, capsys):
    (tmp_path / "s.json").write_text(json.dumps({"columns": [{"name": "job", "type": "numeric", "low": 0, "high": 1}]}))
    # a declared type is taken at its word, value by value: an error would tell of a single record
    run(*train(table, tmp_path / "declared", "--schema", tmp_path / "s.json"), capsys=capsys)
    run(*train(table, tmp_path / "m"), capsys=capsys)
    (tmp_path / "new.csv").write_text("age,job,score,id\nold,a,1,u\n")
    fails(
        capsys, "predict", tmp_path / "m", tmp_path / "new.csv", "--out", tmp_path / "p.csv", match="'age' is numeric"
    )
    assert not (tmp_path / "p.csv").exists()


def test_a_single_class(tmp_path, capsys):
    table = write(tmp_path / "d.csv", labels=["same"] * N)
    fails(capsys, *train(table, tmp_path / "m"), match="at least two are needed")
    assert nothing_written(tmp_path)


def test_not_utf8(tmp_path, capsys):
    (tmp_path / "d.csv").write_bytes("name,label\nJosé,yes\n".encode("latin-1"))
    fails(capsys, *train(tmp_path / "d.csv", tmp_path / "m"), match="not UTF-8")
    assert nothing_written(tmp_path)


def test_truncated_files(tmp_path, capsys):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"a": list(range(5000)), "label": ["x", "y"] * 2500}), tmp_path / "d.parquet")
    whole = (tmp_path / "d.parquet").read_bytes()
    (tmp_path / "d.parquet").write_bytes(whole[: len(whole) // 2])
    fails(capsys, *train(tmp_path / "d.parquet", tmp_path / "m"), match="not a whole Parquet")
    (tmp_path / "d.csv.gz").write_bytes(gzip.compress(b"a,label\n1,x\n2,y\n")[:-9])
    fails(capsys, *train(tmp_path / "d.csv.gz", tmp_path / "m"), match="cannot read it")
    assert nothing_written(tmp_path)


@pytest.mark.parametrize("content, match", [
    ("", "is empty"), ("a,a,label\n1,2,x\n", "appears twice"), ("a,label\n1,x,3\n", "3 fields, the header has 2"),
    ("a,label\n", "no rows"), ("label\nx\ny\n", "no columns are left"),
])  # fmt: skip
def test_broken_text(tmp_path, capsys, content, match):
    (tmp_path / "d.csv").write_text(content)
    fails(capsys, *train(tmp_path / "d.csv", tmp_path / "m"), match=match)
    assert nothing_written(tmp_path)


def test_missing_file_and_unknown_kind(tmp_path, capsys):
    fails(capsys, *train(tmp_path / "none.csv", tmp_path / "m"), match="cannot read it")
    (tmp_path / "d.xlsx").touch()
    fails(capsys, *train(tmp_path / "d.xlsx", tmp_path / "m"), match="unknown kind")


def test_existing_folder_and_no_permission(table, tmp_path, capsys, monkeypatch):
    (tmp_path / "full").mkdir()
    fails(capsys, *train(table, tmp_path / "full"), match="exists already")
    fails(capsys, *train(table, tmp_path / "full", "--overwrite"), match="no model folder")
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.R_OK)
    fails(capsys, *train(table, tmp_path / "m"), match="no permission")
    assert nothing_written(tmp_path)


def test_disk_full(table, tmp_path, capsys, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    fails(capsys, *train(table, tmp_path / "m"), match="No space left")
    assert nothing_written(tmp_path)


def test_disk_full_while_reading_or_predicting(table, tmp_path, capsys, monkeypatch):
    run(*train(table, tmp_path / "m"), capsys=capsys)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("tempfile.mkstemp", full)
        fails(capsys, "predict", tmp_path / "m", table, "--out", tmp_path / "p.csv", match="No space left")
    monkeypatch.setattr("numpy.memmap", full)
    fails(capsys, *train(table, tmp_path / "m2"), match="No space left")
    assert not (tmp_path / "m2").exists() and not (tmp_path / "p.csv").exists()


@pytest.mark.parametrize("more, match", [
    (["--task", "ranking"], "--task"), (["--hidden", "x"], "--hidden"), (["--delta", "2"], "--delta"),
    (["--target-range", "1"], "--target-range"), (["--public-scaling", "--non-private-scaling"], "exclude"),
    (["--public-scaling"], "no public range"), (["--ignore", "zz"], "no column 'zz'"), (["--classes", "a,a"], "twice"),
    (["--accountant", "x"], "accountant"),
])  # fmt: skip
def test_bad_options(table, tmp_path, capsys, more, match):
    arguments = [
        a for a in train(table, tmp_path / "m") if more[0] != "--accountant" or a not in ("--accountant", "rdp")
    ]
    fails(capsys, *arguments, *more, match=match)
    assert nothing_written(tmp_path)


def test_negative_epsilon_and_missing_options(table, tmp_path, capsys):
    fails(capsys, "train", table, "--target", "label", "--epsilon", "-1", "--out", tmp_path / "m", match="--epsilon")
    fails(capsys, "train", table, "--target", "label", "--out", tmp_path / "m", match="--epsilon", expect=2)


def test_damaged_model_folders(table, tmp_path, capsys):
    out = tmp_path / "m"
    run(*train(table, out), capsys=capsys)
    privacy = out / "privacy.json"
    original = privacy.read_text()
    privacy.write_text(original.replace('"epsilon": ', '"epsilon": 0.', 1))
    for command in (["predict", out, table], ["certify", out]):
        fails(capsys, *command, match="privacy.json was changed")
    privacy.unlink()
    fails(capsys, "predict", out, table, match="cannot read privacy.json")
    fails(capsys, "certify", tmp_path / "nothing", match="cannot read checksums.json")


@pytest.mark.parametrize("field, value, match", [
    ("epsilon", 0.5, "claims epsilon 0.5"), ("mechanisms", [], "not complete"),
    ("layers", [{"name": "layers.0", "parameters": 3, "sensitivity": 1.0, "noise": 1e-3}], "its noise has multiplier"),
])  # fmt: skip
def test_certify_does_not_believe_a_resealed_report(table, tmp_path, capsys, field, value, match):
    import hashlib

    out = tmp_path / "m"
    run(*train(table, out), capsys=capsys)
    report = json.loads((out / "privacy.json").read_text())
    (out / "privacy.json").write_text(json.dumps({**report, field: value}))
    sums = json.loads((out / "checksums.json").read_text())
    sums["privacy.json"] = hashlib.sha256((out / "privacy.json").read_bytes()).hexdigest()
    (out / "checksums.json").write_text(json.dumps(sums))
    fails(capsys, "certify", out, match=match)


def test_non_private_scaling_is_loud(table, tmp_path, capsys):
    captured = run(*train(table, tmp_path / "m", "--non-private-scaling"), capsys=capsys)
    assert "not differentially private" in " ".join(captured.err.split()) and "(inf," in captured.out
    assert "NOT PRIVATE" in run("certify", tmp_path / "m", capsys=capsys).out


@pytest.mark.parametrize("command", ["train", "predict", "certify"])
def test_help_has_an_example(command, capsys):
    assert "Example: weightclip" in run(command, "--help", capsys=capsys).out
