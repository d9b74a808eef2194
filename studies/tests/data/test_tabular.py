"""The bundled tables: checksums, shapes, class balance, errors, splits."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from importlib import resources
from typing import Any

import numpy as np
import pytest

from weightclip.errors import WeightclipError
from weightclip_studies import data

# Rows, attributes (without identifiers and target) and records per class, as the data's documentation states them.
PUBLISHED = {
    "adult": (48842, 14, {"<=50K": 37155, ">50K": 11687}),
    "android": (29332, 86, {"benign": 14632, "malware": 14700}),
    "breast_cancer": (569, 30, {"benign": 357, "malignant": 212}),
    "default_credit": (30000, 23, {"no default": 23364, "default": 6636}),
    "dropout": (4424, 36, {"no dropout": 2209 + 794, "dropout": 1421}),
    "german_credit": (1000, 20, {"good": 700, "bad": 300}),
    "nursery": (12960, 8, {"not_recom": 4320, "priority": 4266, "spec_prior": 4044, "very_recom": 328, "recommend": 2}),
}


def test_names_are_the_seven_sets_in_order():
    assert data.names() == tuple(sorted(PUBLISHED))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shape_and_balance(name):
    rows, attributes, balance = PUBLISHED[name]
    table = data.load(name)
    assert len(table) == table.schema.rows == rows
    assert len(table.columns) == len(table.values) == attributes
    assert Counter(table.classes[code] for code in table.target.tolist()) == balance
    assert not set(table.schema.dropped) & set(table.values)
    assert "ID" not in table.values


@pytest.mark.parametrize("name", PUBLISHED)
def test_public_schema_describes_the_values(name):
    """Numeric values are finite, at most 1 in 100 outside the public range, every category is a known one."""
    table = data.load(name)
    for column in table.columns:
        values = table.values[column.name]
        assert len(values) == len(table)
        if column.kind == "numeric":
            assert values.dtype == np.float64 and np.isfinite(values).all()
            assert np.mean((values < column.low) | (values > column.high)) < 1e-2, column.name
            assert not column.flag or set(values.tolist()) <= {0.0, 1.0}
        else:
            assert len(set(column.categories)) == len(column.categories)
            assert set(values.tolist()) <= {*column.categories, column.missing}, column.name


def test_missing_values_of_adult_are_as_published():
    values = data.load("adult").values
    counts = {name: int((values[name] == "?").sum()) for name in ("workclass", "occupation", "native-country")}
    assert counts == {"workclass": 2799, "occupation": 2809, "native-country": 857}


def test_bundled_files_match_the_schema_and_nothing_else_is_bundled():
    files = {entry.name: entry for entry in (resources.files("weightclip_studies.data") / "files").iterdir()}
    assert set(files) == {f"{name}.csv.gz" for name in data.names()}
    for name in data.names():
        assert hashlib.sha256(files[f"{name}.csv.gz"].read_bytes()).hexdigest() == data.describe(name).sha256


def test_changed_file_is_refused_in_one_line(tmp_path):
    original = (resources.files("weightclip_studies.data") / "files" / "nursery.csv.gz").read_bytes()
    changed = bytearray(original)
    changed[len(changed) // 2] ^= 1
    (tmp_path / "nursery.csv.gz").write_bytes(bytes(changed))
    with pytest.raises(WeightclipError, match="SHA-256") as caught:
        data.load("nursery", folder=tmp_path)
    assert "\n" not in str(caught.value) and "nursery" in str(caught.value)
    (tmp_path / "nursery.csv.gz").write_bytes(original)
    assert len(data.load("nursery", folder=tmp_path)) == 12960


def test_missing_file_and_unknown_name_are_refused_in_one_line(tmp_path):
    for call in (lambda: data.load("adult", folder=tmp_path), lambda: data.load("census")):
        with pytest.raises(WeightclipError) as caught:
            call()
        assert "\n" not in str(caught.value)
    with pytest.raises(WeightclipError, match="adult, android"):
        data.describe("census")


def test_arrays_cannot_be_changed_by_accident():
    table = data.load("german_credit")
    with pytest.raises(ValueError, match="read-only"):
        table.target[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        table.values["age"][0] = 1
    with pytest.raises(TypeError):
        table.values["age"] = table.target  # type: ignore[index]


def test_describe_prints_task_source_and_licence():
    text = str(data.describe("dropout"))
    for part in ("student drops out", "4424", "CC BY 4.0", "doi:10.24432/C5MC89"):
        assert part in text


def test_to_pandas_keeps_public_categories():
    pd = pytest.importorskip("pandas")
    table = data.load("adult")
    frame: Any = table.to_pandas()
    assert frame.shape == (48842, 14)
    assert isinstance(frame["workclass"].dtype, pd.CategoricalDtype)
    assert frame["workclass"].isna().sum() == 2799
    assert frame["education"].cat.ordered and frame["education"].max() == "Doctorate"


@pytest.mark.parametrize("name", PUBLISHED)
def test_split_is_a_partition_of_the_stated_sizes(name):
    table = data.load(name)
    parts = data.split(table, seed=0)
    n = len(table)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(n))
    for part, share in zip(parts, (0.64, 0.16, 0.20), strict=True):
        assert math.isclose(len(part) / n, share, abs_tol=2 / n)
    # Tables sorted by class would leave parts of one class.
    assert all(len(set(table.target[part].tolist())) >= 2 for part in parts)


def test_split_is_fixed_by_the_seed():
    table = data.load("german_credit")
    first, again, other = data.split(table, 0), data.split(table, 0), data.split(table, 1)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first.train, other.train)
    # Pinned: a change of the split would silently change every result of the study.
    assert first.test[:5].tolist() == [993, 859, 298, 553, 672]
