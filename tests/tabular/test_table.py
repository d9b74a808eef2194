from __future__ import annotations

import math

import numpy as np
import pytest

from weightclip.errors import WeightclipError
from weightclip.tabular import _table
from weightclip.tabular._columns import BUCKETS, Column, Schema, canonical
from weightclip.tabular._table import (
    BLOCK,
    Coder,
    Table,
    array_columns,
    array_kinds,
    bucket,
    first_text,
    frame_columns,
    frame_kinds,
    to_numbers,
    to_values,
)


@pytest.mark.parametrize("value, text", [
    ("a", "a"), (3, "3"), (3.0, "3"), (np.float32(3), "3"), (2.5, "2.5"), (True, "true"), (np.bool_(False), "false"),
    (None, None), (math.nan, None), (b"x", "x"),
])  # fmt: skip
def test_one_spelling_for_a_category(value, text):
    assert canonical(value) == text


def test_codes_are_places_or_buckets():
    assert Coder(Column("c", "categorical", categories=("a", "1")))(["1", "a", 1.0, "z", None]).tolist()[:3] == [
        1,
        0,
        1,
    ]
    hashed = Coder(Column("c", "categorical"))(["x", "y", None, "x"])
    assert hashed[0] == hashed[3] == bucket("x") and hashed[1] == bucket("y") and math.isnan(hashed[2])
    assert 0 <= bucket("") < BUCKETS


def test_buckets_never_change():
    """Saved models hold them."""
    assert [bucket(v) for v in ("", "Private", "<=50K")] == [5293, 6743, 5179]


def test_a_column_of_identifiers_does_not_fill_memory(monkeypatch):
    assert Coder(Column("id", "categorical"))._code.cache_info().maxsize == 1_000_000  # type: ignore[union-attr]
    monkeypatch.setattr(_table, "_KNOWN", 10)
    coder, identifiers = Coder(Column("id", "categorical")), [str(i) for i in range(100)]
    for _ in range(2):
        assert coder(identifiers).tolist() == [bucket(i) for i in identifiers]
        assert coder._code.cache_info().currsize == 10  # type: ignore[union-attr]


def frames():
    pd, pl, pa = pytest.importorskip("pandas"), pytest.importorskip("polars"), pytest.importorskip("pyarrow")
    data = {"n": [1, 2, None], "x": [0.5, None, 2.0], "s": ["a", None, "b"], "b": [True, False, None]}
    yield pd.DataFrame(data)
    yield pd.DataFrame(data).convert_dtypes()
    yield pl.DataFrame(data)
    yield pa.table(data)


def test_all_kinds_of_frames_give_the_same_table():
    expected = None
    for frame in frames():
        arrays, kinds = frame_columns(frame), frame_kinds(frame)
        assert kinds["b"] in ("flag", None)  # pandas makes objects of booleans with a missing value
        columns = [Column(name, kind or "flag") for name, kind in kinds.items()]
        assert [c.kind for c in columns] == ["numeric", "numeric", "categorical", "flag"], type(frame)
        values = to_values(columns, arrays)
        if expected is None:
            expected = values
        np.testing.assert_array_equal(values, expected)
    assert expected is not None and expected[:2, 3].tolist() == [1.0, 0.0]


def test_pandas_categories_and_dates_are_categorical_and_objects_have_no_kind():
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"c": pd.Categorical(["u", "v", None]), "d": pd.to_datetime(["2020-01-01"] * 3)})
    assert list(frame_kinds(frame).values()) == ["categorical", "categorical"]
    frame = pd.DataFrame({"b": [True, False], "o": np.array([True, "x"], dtype=object), "n": np.array([1, 0])})
    assert list(frame_kinds(frame).values()) == ["flag", None, "numeric"]


def test_kinds_do_not_depend_on_values():
    """Booleans after a thousand missing values, in files as in frames."""
    pa = pytest.importorskip("pyarrow")
    assert frame_kinds(pa.table({"b": pa.array([None] * 1000 + [True] * 9)}))["b"] == "flag"
    assert array_kinds(np.dtype(bool), 2) == {"0": "flag", "1": "flag"}
    assert array_kinds(np.dtype(object), 1) == {"0": None} and array_kinds(np.dtype("U3"), 1) == {"0": "categorical"}


def test_object_arrays():
    arrays = array_columns(np.array([[1, "a"], [None, 2]], dtype=object))
    assert [a.dtype for a in arrays.values()] == [object, object]
    with pytest.raises(TypeError, match="argument must be a string or a number"):
        array_columns(np.array([[{}]], dtype=object))


def test_numbers_one_by_one():
    class Odd:
        def __eq__(self, other):
            raise RuntimeError("no")

    raw = ["1", "", None, " 2.5 ", "true", "secret", Odd(), 10**400, True]
    numbers = to_numbers(raw)
    assert np.flatnonzero(np.isfinite(numbers)).tolist() == [0, 3, 4, 8]
    assert numbers[[0, 3, 4, 8]].tolist() == [1.0, 2.5, 1.0, 1.0]
    assert (
        first_text(raw[:6], numbers[:6]) == 5 and first_text(raw[:5] + ["nan"], to_numbers(raw[:5] + ["nan"])) is None
    )


@pytest.mark.parametrize("odd", [True, 1.0, "1", b"1"])
def test_codes_do_not_depend_on_who_came_first(odd):
    from decimal import Decimal

    for column in (Column("c", "categorical"), Column("c", "categorical", categories=("true", "1", "1.0", "1.00"))):
        values = [1, True, 1.0, Decimal("1.0"), Decimal("1.00")]
        assert np.array_equal(Coder(column)([odd, *values])[1:], Coder(column)(values))
        assert len(set(Coder(column)(values).tolist())) == 4  # 1 and 1.0 are one spelling, the others differ


def test_missing_column():
    with pytest.raises(WeightclipError, match="'b' is missing"):
        to_values([Column("b", "numeric")], {"a": np.zeros(2)})


def test_blocks_cover_the_table():
    values = np.arange(2.0 * (BLOCK + 5)).reshape(-1, 2)
    blocks = list(Table((Column("a", "numeric"),) * 2, values).blocks())
    assert len(blocks) == 2 and np.array_equal(np.concatenate(blocks), values)


@pytest.mark.parametrize("bad, match", [
    ([], "expected an object"), ({"columns": [{"name": "a"}]}, "'name' and 'type'"), ({"colums": []}, "unknown entry"),
    ({"columns": [{"name": "a", "type": "numeric", "low": 1}]}, "both low and high"),
    ({"columns": [{"name": "a", "type": "numeric", "low": 2, "high": 1}]}, "low <= high"),
    ({"columns": [{"name": "a", "type": "text"}]}, "type must be"),
    ({"columns": [{"name": "a", "type": "flag", "low": 0, "high": 1}]}, "takes no range"),
    ({"columns": [{"name": "a", "type": "numeric", "categories": ["x"]}]}, "takes no categories"),
    ({"columns": [{"name": "a", "type": "categorical", "categories": ["x", "x"]}]}, "twice"),
    ({"columns": [{"name": "a", "type": "flag"}, {"name": "a", "type": "flag"}]}, "twice"),
])  # fmt: skip
def test_bad_schemas_fail_with_one_line(bad, match):
    with pytest.raises(WeightclipError, match=match) as caught:
        Schema.from_json(bad)
    assert "\n" not in str(caught.value)


def test_schema_round_trip(tmp_path):
    schema = Schema((Column("a", "numeric", 0.0, 2.0), Column("b", "categorical", categories=("x", "y"))), ("c",))
    assert Schema.from_json(schema.to_json()) == schema
    (tmp_path / "bad.json").write_text("{")
    for path, match in ((tmp_path / "bad.json", "not valid JSON"), (tmp_path / "none.json", "cannot read")):
        with pytest.raises(WeightclipError, match=match):
            Schema.read(path)
