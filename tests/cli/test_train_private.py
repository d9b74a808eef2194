"""What ``weightclip train`` leaves behind, and what it reads of the records to describe columns."""

from __future__ import annotations

import json

import pytest

from weightclip.cli import main


def train(*arguments):
    with pytest.raises(SystemExit) as exit:
        main(["train", *map(str, arguments)])
    assert exit.value.code == 0


def test_kinds_of_parquet_columns_come_from_its_schema(tmp_path, capsys):
    """A thousand missing values before the first true or false: one more or less used to change the kind."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    reports = []
    for missing in (999, 1000):
        flags = [None] * missing + [i % 3 == 0 for i in range(500)]
        labels = ["a" if v else "b" for v in flags]
        pq.write_table(pa.table({"flag": pa.array(flags), "label": labels}), tmp_path / "d.parquet")
        train(
            tmp_path / "d.parquet", "--target", "label", "--epsilon", "3", "--out", tmp_path / f"m{missing}",
            "--classes", "a,b", "--seed", "0", "--json", "--epochs", "1", "--delta", "1e-6",
        )  # fmt: skip
        reports.append(json.loads((tmp_path / f"m{missing}" / "privacy.json").read_text()))
        pipeline = json.loads((tmp_path / f"m{missing}" / "pipeline.json").read_text())
        assert pipeline["columns"][0]["type"] == "flag"
    labels = [[m["label"] for m in report["mechanisms"]] for report in reports]
    assert labels[0] == labels[1] == ["means of 1 features", "noisy gradients"]
    capsys.readouterr()


def test_the_scratch_file_has_no_name(tmp_path, monkeypatch):
    """Whatever kills the process, nothing of the table stays in the temporary folder, and nobody else can open it."""
    import os
    import tempfile

    from weightclip.tabular import files as _files
    from weightclip.tabular._columns import Schema

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    seen = []
    path = tmp_path / "d.csv"
    path.write_text("a,y\n" + "1,x\n2,y\n" * 50)
    monkeypatch.setattr(_files, "_ROWS", 10)
    original = _files._target

    def spy(*arguments):
        seen.append(os.listdir(tmp_path / "scratch"))
        return original(*arguments)

    monkeypatch.setattr(_files, "_target", spy)
    loaded = _files.load(_files.File(path), "y", Schema())
    assert len(seen) == 10 and not any(seen)  # looked at in the middle of reading
    assert not os.listdir(tmp_path / "scratch") and loaded.table.values[:2, 0].tolist() == [1.0, 2.0]
    # a file with a name would be seen
    monkeypatch.setattr(tempfile, "TemporaryFile", tempfile.NamedTemporaryFile)
    _files.load(_files.File(path), "y", Schema())
    assert any(seen)
