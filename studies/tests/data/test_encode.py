"""Encoding: what each row may depend on, what is paid, and what is not covered."""

from __future__ import annotations

import dataclasses
import math
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightclip.errors import WeightclipError
from weightclip_studies import data
from weightclip_studies.data import _statistics


@pytest.fixture(scope="module")
def german():
    return data.load("german_credit")


def replaced(table: data.TabularData, row: int, **values) -> data.TabularData:
    """The table with some values of one record replaced."""
    columns = dict(table.values)
    for name, value in values.items():
        column = columns[name].astype("<U16") if columns[name].dtype.kind == "U" else columns[name].copy()
        column[row] = value
        columns[name] = column
    return dataclasses.replace(table, values=MappingProxyType(columns))


@pytest.mark.parametrize(
    ("name", "features"),
    [
        ("adult", 105),
        ("android", 86),
        ("breast_cancer", 30),
        ("default_credit", 99),
        ("dropout", 247),
        ("german_credit", 63),
        ("nursery", 27),
    ],
)
def test_public_encoding_has_public_width_and_range(name, features):
    table = data.load(name)
    encoded = data.encode(table)
    assert encoded.X.shape == (len(table), features) and encoded.X.dtype == np.float32
    assert len(set(encoded.feature_names)) == features
    assert np.abs(encoded.X).max() <= 1.0
    assert encoded.mechanisms == () and encoded.epsilon == 0
    assert encoded.covered == "feature scales are public ranges: nothing was read from the data, nothing to pay"
    assert np.array_equal(encoded.y, table.target)


def test_one_hot_blocks_by_hand(german):
    encoded = data.encode(german)
    at = encoded.feature_names.index
    for i in (0, 17, 999):
        for category in ("A11", "A12", "A13", "A14"):
            expected = float(german.values["status_checking_account"][i] == category)
            assert encoded.X[i, at(f"status_checking_account={category}")] == expected
        assert math.isclose(encoded.X[i, at("age")], (german.values["age"][i] - 49) / 31, abs_tol=1e-6)
        amount = math.log1p(german.values["credit_amount"][i])
        low, high = math.log1p(200), math.log1p(20000)
        assert math.isclose(encoded.X[i, at("credit_amount")], 2 * (amount - low) / (high - low) - 1, abs_tol=1e-6)


def test_ordinal_gives_one_number_to_ordered_columns_only(german):
    nursery = data.encode(data.load("nursery"), categorical=data.Ordinal())
    assert nursery.feature_names == tuple(column.name for column in data.describe("nursery").columns)
    children = nursery.X[:, nursery.feature_names.index("children")]
    assert np.unique(children) == pytest.approx([-1.0, -1 / 3, 1 / 3, 1.0])
    mixed = data.encode(german, categorical=data.Ordinal()).feature_names
    assert "job" in mixed and "purpose" not in mixed and "purpose=A40" in mixed


def test_unknown_missing_and_non_finite_values_become_zeros(german):
    odd = replaced(german, 3, purpose="A47", status_checking_account="A99", age=math.nan, credit_amount=math.inf)
    odd = replaced(odd, 3, job="?")
    for strategy in (data.PublicRanges(), data.PrivateQuantiles(5.0, seed=0), data.FromData()):
        for categorical in (data.OneHot(), data.Ordinal()):
            encoded = data.encode(odd, fit_on=np.arange(1000), statistics=strategy, categorical=categorical)
            assert np.isfinite(encoded.X).all()
            names = np.array([name.split("=")[0] for name in encoded.feature_names])
            for column in ("status_checking_account", "age", "credit_amount", "job"):
                assert (encoded.X[3, names == column] == 0).all()
            assert encoded.X[3, encoded.feature_names.index("purpose=A47")] == 1  # documented, though never seen


def test_values_outside_the_public_range_are_clipped(german):
    encoded = data.encode(replaced(german, 0, age=1e9, credit_amount=-1e9))
    assert encoded.X[0, encoded.feature_names.index("age")] == 1
    assert encoded.X[0, encoded.feature_names.index("credit_amount")] == -1


def test_public_encoding_of_a_record_ignores_all_others(german):
    before = data.encode(german).X
    after = data.encode(replaced(german, 7, age=20, purpose="A46", credit_amount=19999)).X
    assert (before[7] != after[7]).any()
    assert np.array_equal(np.delete(before, 7, axis=0), np.delete(after, 7, axis=0))


@pytest.mark.parametrize("strategy", [data.PrivateQuantiles(2.0, seed=3), data.FromData()])
def test_statistics_read_the_named_records_only(german, strategy):
    train = data.split(german).train
    outside = int(data.split(german).test[0])
    changed = replaced(german, outside, age=79, credit_amount=19999, duration_months=71)
    before = data.encode(german, fit_on=train, statistics=strategy).X
    after = data.encode(changed, fit_on=train, statistics=strategy).X
    assert np.array_equal(before[train], after[train])


def test_from_data_standardises_the_training_rows_and_says_it_is_not_covered(german):
    train = data.split(german).train
    encoded = data.encode(german, fit_on=train, statistics=data.FromData())
    age = encoded.X[train, encoded.feature_names.index("age")].astype(np.float64)
    assert abs(age.mean()) < 1e-6 and abs(age.std() - 1) < 1e-6
    assert encoded.covered == "feature statistics taken from private data: not covered by ε"
    assert not data.FromData.covered and data.PublicRanges.covered and data.PrivateQuantiles.covered


def test_constant_column_does_not_divide_by_zero(german):
    constant = dataclasses.replace(german, values={**german.values, "age": np.full(1000, 30.0)})
    encoded = data.encode(constant, fit_on=np.arange(1000), statistics=data.FromData())
    assert (encoded.X[:, encoded.feature_names.index("age")] == 0).all()


def test_strategies_that_read_need_records(german):
    for strategy in (data.FromData(), data.PrivateQuantiles(1.0)):
        for fit_on in (None, []):
            with pytest.raises(WeightclipError, match="fit_on"):
                data.encode(german, fit_on=fit_on, statistics=strategy)


def test_private_quantiles_split_epsilon_over_columns_and_list_it():
    table = data.load("dropout")
    train = data.split(table).train
    strategy = data.PrivateQuantiles(0.5, seed=0)
    encoded = data.encode(table, fit_on=train, statistics=strategy)
    estimated = [column for column in table.columns if column.kind == "numeric" and not column.flag]
    assert encoded.mechanisms == strategy.mechanism([c for c in table.columns if c.kind == "numeric"])
    assert len(encoded.mechanisms) == 2 * len(estimated)
    assert {query.column for query in encoded.mechanisms} == {column.name for column in estimated}
    assert {query.query for query in encoded.mechanisms} == {"quantile 0.05", "quantile 0.95"}
    assert math.isclose(encoded.epsilon, 0.5) and "0.5" in encoded.covered
    assert np.abs(encoded.X).max() <= 1


def test_tables_of_flags_cost_nothing():
    table = data.load("android")
    encoded = data.encode(table, fit_on=np.arange(100), statistics=data.PrivateQuantiles(1.0))
    assert encoded.mechanisms == () and set(np.unique(encoded.X).tolist()) == {-1.0, 1.0}


@pytest.mark.parametrize("bad", [{"epsilon": 0.0}, {"epsilon": math.inf}, {"epsilon": math.nan}, {"epsilon": -1.0}])
def test_bad_epsilon_is_refused(bad):
    with pytest.raises(WeightclipError, match="epsilon"):
        data.PrivateQuantiles(**bad)


def test_bad_quantiles_and_candidates_are_refused():
    with pytest.raises(WeightclipError, match="quantiles"):
        data.PrivateQuantiles(1.0, quantiles=(0.9, 0.1))
    with pytest.raises(WeightclipError, match="candidates"):
        data.PrivateQuantiles(1.0, candidates=1)


GRID = np.linspace(0.0, 1.0, 21)
VALUES = st.one_of(st.sampled_from(GRID.tolist()), st.floats(0, 1))


@settings(max_examples=300)
@given(
    ties=st.lists(st.tuples(VALUES, st.integers(1, 100)), max_size=5),
    extra=VALUES,
    p=st.sampled_from([0.0, 0.05, 0.3, 0.5, 0.95, 1.0]),
    epsilon=st.sampled_from([0.01, 0.5, 3.0, 40.0]),
)
def test_quantile_draw_is_epsilon_dp_exactly(ties, extra, p, epsilon):
    """The drawn distribution is known exactly (integer weights), so the privacy loss is too: it never exceeds ε."""
    x = [value for value, times in ties for _ in range(times)]
    assert privacy_loss(x, extra, p, epsilon) <= epsilon


# All records between two candidates, one more at the end: candidates on both sides move, in opposite directions.
WORST = {"x": [0.51] * 60, "extra": 1.0, "p": 0.95, "epsilon": 0.5}


def test_quantile_draw_reaches_its_epsilon():
    """The bound is tight (largest ratio above 0.999), so the test above could fail."""
    assert 0.999 * 0.5 < privacy_loss(**WORST) <= 0.5


def test_a_sensitivity_of_one_half_would_be_caught(monkeypatch):
    """Mutant: the exponent is scaled as if one record moved the distance by ½, as for a median with fixed n."""
    sound = _statistics.quantile_weights
    monkeypatch.setattr(
        _statistics, "quantile_weights", lambda x, p, grid, epsilon: sound(x, p, grid, epsilon * max(p, 1 - p) / 0.5)
    )
    assert privacy_loss(**WORST) > 0.5


def privacy_loss(x: list[float], extra: float, p: float, epsilon: float) -> float:
    without = np.array(_statistics.quantile_weights(np.array(x), p, GRID, epsilon), dtype=object)
    with_it = np.array(_statistics.quantile_weights(np.array([*x, extra]), p, GRID, epsilon), dtype=object)
    total, total_with = sum(without), sum(with_it)
    return max(abs(math.log((a * total_with) / (b * total))) for a, b in zip(without, with_it, strict=True))


def test_quantile_draw_follows_its_weights():
    """Frequencies of seeded draws against the weights, by χ²."""
    from scipy.stats import chisquare

    x = np.array([0.1, 0.2, 0.2, 0.7, 0.9])
    weights = np.array(_statistics.quantile_weights(x, 0.5, GRID, 2.0), dtype=np.float64)
    random = _statistics._Uniform(0)
    drawn = [_statistics.private_quantile(x, 0.5, GRID, 2.0, random.below) for _ in range(4000)]
    counts = np.array([np.isclose(drawn, candidate).sum() for candidate in GRID])
    assert counts.sum() == 4000
    assert chisquare(counts, 4000 * weights / weights.sum()).pvalue > 1e-3


@pytest.mark.parametrize("atom", [0.0, 0.4, 1.0])
def test_quantiles_of_tied_values_land_on_the_tie(atom):
    x = np.full(5000, atom)
    random = _statistics._Uniform(1)
    for p in (0.05, 0.95):
        assert math.isclose(_statistics.private_quantile(x, p, GRID, 1.0, random.below), atom)


def test_private_quantiles_are_near_the_true_ones_at_large_epsilon():
    table = data.load("adult")
    age = next(column for column in table.columns if column.name == "age")
    (scaling,), _ = data.PrivateQuantiles(5.0, seed=0).fit([age], table.values["age"][:, None])
    low, high = np.quantile(table.values["age"], [0.05, 0.95])
    assert abs(scaling.low - low) < 1 and abs(scaling.high - high) < 1


def test_secure_draws_differ_and_seeded_draws_repeat():
    table = data.load("breast_cancer")
    numeric = list(table.columns)
    rows = np.stack([table.values[column.name] for column in numeric], axis=1)
    seeded = [data.PrivateQuantiles(1.0, seed=5).fit(numeric, rows)[0] for _ in range(2)]
    secure = [data.PrivateQuantiles(1.0).fit(numeric, rows)[0] for _ in range(2)]
    assert seeded[0] == seeded[1]
    assert secure[0] != secure[1]


def test_degenerate_draws_still_give_an_interval():
    column = data.Feature(name="x", kind="numeric", low=0.0, high=10.0)
    (scaling,), _ = data.PrivateQuantiles(1000.0, seed=0).fit([column], np.full((1000, 1), 4.0))
    assert scaling.low < 4.0 < scaling.high and scaling(np.array([4.0]))[0] == pytest.approx(0.0)
