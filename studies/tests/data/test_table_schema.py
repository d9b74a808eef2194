"""Schemas of the bundled sets, as `weightclip train` reads them."""

from __future__ import annotations

import pytest

from weightclip.tabular._columns import Schema
from weightclip_studies import data


@pytest.mark.parametrize("name", data.names())
def test_schema_round_trip(name):
    schema = data.table_schema(data.describe(name))
    assert Schema.from_json(schema.to_json()) == schema
    assert {c.name for c in schema.columns} == {c.name for c in data.describe(name).columns}
