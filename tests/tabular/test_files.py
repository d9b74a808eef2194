"""Tables in files: types that no record can change, what is left out cannot fail, nothing of them stays behind."""

from __future__ import annotations

import gzip
import os

import numpy as np
import pytest

from weightclip.errors import WeightclipError
from weightclip.tabular._columns import Schema
from weightclip.tabular.files import File, load

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

BIG = 2**53 + 1


def parquet(path, **columns):
    pq.write_table(pa.table(columns), path)
    return File(path)


@pytest.mark.parametrize("ignore", [(), ("id",)])
def test_whole_numbers_above_two_to_the_53(tmp_path, ignore):
    file = parquet(tmp_path / "d.parquet", id=[BIG, BIG + 2, -BIG], a=[1, 2, 3], y=["u", "v", "u"])
    loaded = load(file, "y", Schema(ignore=ignore))
    assert loaded.table.values[:, -1].tolist() == [1, 2, 3]
    if not ignore:
        assert loaded.table.values[:, 0].tolist() == [float(BIG), float(BIG + 2), float(-BIG)]


def test_a_declared_type_is_not_guessed_from_values(tmp_path):
    """A thousand missing values first, as in leak 3: the type of the file says what the column is."""
    flags = [None] * 1500 + [True, False]
    file = parquet(tmp_path / "d.parquet", flag=flags, y=["u", "v"] * 751)
    loaded = load(file, "y", Schema())
    assert [c.kind for c in loaded.table.columns] == ["flag"] and loaded.inferred == ()
    assert loaded.table.values[-2:, 0].tolist() == [1, 0]


def test_the_scratch_file_has_no_name(tmp_path, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    (tmp_path / "d.csv").write_text("a,y\n" + "1,u\n2,v\n" * 50)
    loaded = load(File(tmp_path / "d.csv"), "y", Schema())
    assert os.listdir(scratch) == [] and np.isfinite(loaded.table.values).all()
    assert isinstance(loaded.table.values, np.memmap)


def test_columns_of_lists_are_refused_unless_ignored(tmp_path):
    file = parquet(tmp_path / "d.parquet", tags=[["x"], ["y", "z"]], a=[1, 2], y=["u", "v"])
    with pytest.raises(WeightclipError, match="'tags' holds lists"):
        load(file, "y", Schema())
    assert len(load(file, "y", Schema(ignore=("tags",))).table) == 2


def test_errors_repeat_no_values(tmp_path):
    """A file without a header has its first record where names are expected."""
    (tmp_path / "d.csv").write_text("37,Jane Doe,secret,secret\n38,Joe,x,y\n")
    with pytest.raises(WeightclipError) as caught:
        load(File(tmp_path / "d.csv"), "label", Schema())
    assert "secret" not in str(caught.value) and "fields 3 and 4" in str(caught.value)
    (tmp_path / "d.csv").write_text("37,Jane Doe,secret\n38,Joe,x\n")
    with pytest.raises(WeightclipError) as caught:
        load(File(tmp_path / "d.csv"), "label", Schema())
    assert "Jane" not in str(caught.value) and "no column 'label'" in str(caught.value)
    (tmp_path / "d.csv").write_text("age,Label\n1,x\n")
    with pytest.raises(WeightclipError, match="did you mean 'Label'"):
        load(File(tmp_path / "d.csv"), "label", Schema())


@pytest.mark.parametrize("delimiter", ["", ";;", "\n", '"'])
def test_delimiters_are_one_character(tmp_path, delimiter):
    with pytest.raises(WeightclipError, match="--delimiter"):
        File(tmp_path / "d.csv", delimiter)


def test_damaged_compression_and_pipes(tmp_path):
    whole = bytearray(gzip.compress(b"a,y\n" + b"1,u\n2,v\n" * 2000))
    whole[len(whole) // 2] ^= 255
    (tmp_path / "d.csv.gz").write_bytes(bytes(whole))
    with pytest.raises(WeightclipError, match="cannot read it"):
        load(File(tmp_path / "d.csv.gz"), "y", Schema())
    os.mkfifo(tmp_path / "p.csv")
    with pytest.raises(WeightclipError, match="no regular file"):
        load(File(tmp_path / "p.csv"), "y", Schema())


def test_labels_are_sorted_whatever_they_are(tmp_path):
    orders = set()
    for labels in (["nan", "10", "2", "b"], ["b", "2", "10", "nan"]):
        file = parquet(tmp_path / "d.parquet", a=[1, 2, 3, 4], y=labels)
        orders.add(load(file, "y", Schema()).classes)
    assert orders == {("2", "10", "b", "nan")}
