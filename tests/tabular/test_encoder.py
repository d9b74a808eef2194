from __future__ import annotations

import json
import math

import numpy as np
import pytest

from weightclip.accounting._accounting import Mechanism
from weightclip.errors import WeightclipError
from weightclip.noise._mechanisms import combine
from weightclip.noise._streams import Streams
from weightclip.tabular._columns import Column
from weightclip.tabular._encoder import (
    Codes,
    Encoder,
    Fitted,
    Pieces,
    center,
    center_error,
    encoder_error,
    fit_private,
    fit_public,
    fit_unprotected,
    lack_of_precision,
)
from weightclip.tabular._private import Door
from weightclip.tabular._table import Table

RNG = np.random.default_rng(0)
N = 3000
COLUMNS = (
    Column("age", "numeric", 0, 100),
    Column("income", "numeric"),
    Column("flag", "flag"),
    Column("colour", "categorical", categories=("red", "green", "blue")),
    Column("city", "categorical"),
)
VALUES = np.column_stack([
    RNG.normal(40, 12, N), RNG.lognormal(10, 1, N), RNG.integers(0, 2, N), RNG.integers(0, 3, N),
    RNG.choice([17, 99], N),
])  # fmt: skip
TABLE = Table(COLUMNS, VALUES)
PLAIN = {"center": [], "gain": 1.0, "radius": 1.0}


def test_every_mechanism_is_listed_and_together_they_have_the_stated_multiplier():
    fitted = fit_private(TABLE, 5.0, 6, Door(Streams.seeded(0)), N)
    assert [m.label.split()[0] for m in fitted.mechanisms] == ["ranges", "categories", "quantiles"]
    assert all(m == Mechanism("gaussian", m.sigma, 1.0, 1, label=m.label) for m in fitted.mechanisms)
    assert combine(m.sigma for m in fitted.mechanisms if m.sigma is not None) == pytest.approx(5.0)


def test_nothing_is_read_without_noise_being_paid(monkeypatch):
    """The encoder may depend on records only through the released counts."""
    import weightclip.tabular._encoder as module

    asked = []
    for name in ("Forest", "frequent_buckets", "ranges"):
        original = getattr(module, name)
        monkeypatch.setattr(
            module,
            name,
            lambda *a, _o=original, _n=name, **k: asked.append((_n, a[3] if _n == "Forest" else a[2])) or _o(*a, **k),
        )
    fitted = fit_private(TABLE, 5.0, 6, Door(Streams.seeded(0)), N)
    assert sorted(s for _, s in asked) == pytest.approx(sorted(m.sigma for m in fitted.mechanisms))


def test_public_columns_cost_nothing():
    public = Table((COLUMNS[2], COLUMNS[3]), VALUES[:, 2:4])
    assert fit_private(public, 5.0, 6, Door(Streams.seeded(0)), N).mechanisms == ()
    for table, pieces in ((public, 4), (Table(COLUMNS[:1], VALUES[:, :1]), 4)):
        assert fit_public(table, pieces).mechanisms == ()


def test_public_scaling_reads_no_record():
    class Untouchable:
        def __getitem__(self, _):
            raise AssertionError("a record was read")

        def __len__(self):
            return 3

    fitted = fit_public(Table((COLUMNS[0], COLUMNS[3]), Untouchable()), 2)  # type: ignore[arg-type]
    assert fitted.encoder.parts[0] == Pieces((0.0, 50.0, 100.0))


@pytest.mark.parametrize("column", [COLUMNS[1], COLUMNS[4]])
def test_public_scaling_refuses_what_is_not_public(column):
    with pytest.raises(WeightclipError, match=column.name):
        fit_public(Table((column,), VALUES[:, :1]), 2)


def test_unprotected_statistics_say_so():
    fitted = fit_unprotected(TABLE, 4)
    assert fitted.uncovered and not fitted.mechanisms
    assert fitted.encoder.parts[0].edges[2] == pytest.approx(np.median(VALUES[:, 0]), abs=1)  # type: ignore[union-attr]


def test_rows_have_norm_at_most_one_and_depend_on_their_own_record():
    fitted = fit_private(TABLE, 1.0, 6, Door(Streams.seeded(0)), N)
    wild = np.concatenate([VALUES[:50], np.full((1, 5), np.nan), np.full((1, 5), np.inf), np.full((1, 5), -1e300)])
    features = fitted.encoder.transform(wild)
    assert features.shape == (53, fitted.encoder.width) and features.dtype == np.float32
    assert np.all(np.isfinite(features)) and np.linalg.norm(features, axis=1).max() <= 1 + 1e-6
    for i in (0, 50, 52):
        assert np.array_equal(fitted.encoder.transform(wild[i : i + 1])[0], features[i])


def test_pieces():
    out = np.empty((6, 3))
    Pieces((0.0, 1.0, 3.0), missing=True).write(np.array([-1, 0.5, 2, 9, np.nan, np.inf]), out)
    r = math.sqrt(0.5)
    assert out == pytest.approx(
        np.array([[-r, -r, 0], [0, -r, 0], [r, 0, 0], [r, r, 0], [0, 0, 1], [0, 0, 1]], dtype=float)
    )


def test_codes():
    out = np.empty((4, 2))
    Codes((3, 8)).write(np.array([8, 3, 5, np.nan]), out)
    assert out.tolist() == [[0, 1], [1, 0], [0, 0], [0, 0]]
    Codes(()).write(np.array([1.0]), np.empty((1, 0)))


def test_missing_values_get_a_feature_where_they_are_common():
    values = VALUES[:, :1].copy()
    assert not fit_private(Table(COLUMNS[:1], values), 1.0, 4, Door(Streams.seeded(0)), N).encoder.parts[0].missing  # type: ignore
    values[: N // 3] = np.nan
    part = fit_private(Table(COLUMNS[:1], values), 1.0, 4, Door(Streams.seeded(0)), N).encoder.parts[0]
    assert isinstance(part, Pieces) and part.missing and part.width == len(part.edges)


@pytest.mark.parametrize("fill", [np.nan, 7.0, 0.0, 1e300])
@pytest.mark.parametrize("column", [Column("x", "numeric"), Column("x", "numeric", 0, 10)])
def test_constant_and_empty_columns_work(fill, column):
    table = Table((column,), np.full((20, 1), fill))
    for fitted in (fit_private(table, 2.0, 6, Door(Streams.seeded(0)), 20), fit_unprotected(table, 6)):
        assert np.all(np.isfinite(fitted.encoder.transform(np.array([[fill], [3.0], [np.nan]]))))


def test_json_round_trip():
    encoder = center(
        fit_private(TABLE, 3.0, 6, Door(Streams.seeded(0)), N), TABLE, 3.0, Door(Streams.seeded(0)), N
    ).encoder
    again = Encoder.from_json(*(json.loads(json.dumps(j)) for j in (encoder.to_json(), encoder.shift_json())))
    assert again == encoder
    assert np.array_equal(again.transform(VALUES[:9]), encoder.transform(VALUES[:9]))


@pytest.mark.parametrize("change, match", [
    ({"edges": [1.0]}, "edges"), ({"edges": [1.0, 0.0]}, "edges"), ({"edges": [0.0, float("nan")]}, "edges"),
    ({"type": "evil"}, "type"), ({"code": "x"}, "schema"),
])  # fmt: skip
def test_damaged_descriptions_are_refused(change, match):
    entries = fit_public(Table(COLUMNS[:1], VALUES[:, :1]), 2).encoder.to_json()
    with pytest.raises(WeightclipError, match=match):
        Encoder.from_json([{**entries[0], **change}], PLAIN)
    with pytest.raises(WeightclipError, match="codes"):
        Encoder.from_json([{"name": "c", "type": "categorical", "codes": [3, 3]}], PLAIN)
    for shift in ({"center": [1.0]}, {"gain": 0.0}, {"radius": float("nan")}):
        with pytest.raises(WeightclipError, match="center"):
            Encoder.from_json(entries, {**PLAIN, **shift})


def test_expected_error_is_public_arithmetic():
    assert encoder_error(COLUMNS, 2.0, 1000) == pytest.approx(2.0 * 8 * math.sqrt(2) / 2 / 1000)
    assert lack_of_precision(COLUMNS, 2.0, 1000) > lack_of_precision(COLUMNS, 1.0, 1000) > 0
    assert lack_of_precision(COLUMNS[2:4], 2.0, 1000) == 0  # nothing to find


def test_centered_features_have_mean_zero_and_typical_norm_one():
    fitted = center(fit_private(TABLE, 3.0, 6, Door(Streams.seeded(0)), N), TABLE, 3.0, Door(Streams.seeded(0)), N)
    paid = fitted.mechanisms[-1]
    assert (paid.sigma, paid.q, paid.steps) == (3.0, 1.0, 1) and len(fitted.mechanisms) == 4
    features = fitted.encoder.transform(VALUES)
    assert np.abs(features.mean(axis=0)).max() < 0.02
    assert np.square(features).sum(axis=1).mean() == pytest.approx(1.0, abs=0.1)
    assert np.linalg.norm(features, axis=1).max() <= fitted.encoder.radius * (1 + 1e-6)


@pytest.mark.parametrize("record", [VALUES[0], np.full(5, np.nan), np.full(5, 1e300), np.array([0, 0, 1, 2, 17.0])])
def test_one_record_moves_the_sums_by_no_more_than_the_noise_assumes(record, monkeypatch):
    import weightclip.tabular._private as private

    seen = []
    monkeypatch.setattr(private, "release", lambda total, touched, *_: seen.append((total, touched)) or total)
    fitted = fit_public(Table(COLUMNS[:1], VALUES[:, :1]), 3)
    plain = Encoder(COLUMNS[:1] + COLUMNS[2:4], (*fitted.encoder.parts, Pieces((0.0, 1.0)), Codes((0, 1, 2))))
    for rows in (VALUES[1:40, [0, 2, 3]], np.vstack([VALUES[1:40], record])[:, [0, 2, 3]]):
        center(Fitted(plain), Table(plain.columns, rows), 1.0, Door(Streams.seeded(0)), 40)
    assert np.linalg.norm(seen[1][0] - seen[0][0]) <= math.sqrt(seen[0][1])


def test_centered_rows_are_projected():
    encoder = Encoder(COLUMNS[:1], (Pieces((0.0, 1.0)),), center=(-1.0,), gain=3.0, radius=1.5)
    assert encoder.transform(np.array([[1.0], [0.0], [0.1]])) == pytest.approx(
        np.array([[1.5], [0.0], [0.6]]), abs=1e-6
    )


def test_sums_of_features_are_exact_and_ignore_what_is_not_finite(monkeypatch):
    """Order and number of records leave no rounding behind; a range too wide for a float64 gives no NaN."""
    import weightclip.tabular._private as private

    seen = []
    monkeypatch.setattr(private, "release", lambda total, *_: seen.append(total) or total)
    encoder = fit_public(Table(COLUMNS[:1], VALUES[:, :1]), 3).encoder
    for rows in (VALUES[:, :1], VALUES[::-1, :1], np.vstack([VALUES[:, :1], VALUES[:1, :1]])):
        center(Fitted(encoder), Table(COLUMNS[:1], rows), 1.0, Door(Streams.seeded(0)), N)
    assert np.array_equal(seen[0], seen[1])
    term = encoder.transform(VALUES[:1, :1])[0].astype(np.float64)
    assert np.abs(seen[2] - seen[0] - [*term, np.square(term).sum()]).max() <= 2.0**-31
    wide = (Column("w", "numeric", -1.7e308, 1.7e308),)
    with np.errstate(all="ignore"):
        center(Fitted(Encoder(wide, (Pieces((-1.7e308, 1.7e308)),))), Table(wide, np.full((5, 1), 1.7e308)), 1.0,
               Door(Streams.seeded(0)), 5)  # fmt: skip
    assert not seen[-1].any()  # those records count zero


def test_there_is_a_feature_even_if_no_category_is_found(monkeypatch):
    import weightclip.tabular._encoder as module

    monkeypatch.setattr(module, "frequent_buckets", lambda *_: [np.array([], dtype=int)] * 2)
    table = Table((Column("i", "categorical"), Column("j", "categorical")), np.zeros((9, 2)))
    assert fit_private(table, 1.0, 6, Door(Streams.seeded(0)), 9).encoder.width == 1


def test_a_mean_that_is_noise_is_shrunk_away():
    fitted = center(fit_private(TABLE, 3.0, 6, Door(Streams.seeded(0)), N), TABLE, 1e5, Door(Streams.seeded(0)), N)
    assert np.linalg.norm(fitted.encoder.center) < 0.5 * center_error(fitted.encoder.width, 1e5, N)
