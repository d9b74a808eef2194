"""What is public of a bundled set, as the schema that `weightclip train` and the estimators read."""

from __future__ import annotations

from weightclip.tabular import Column, Schema

from ._schema import Description


def table_schema(described: Description) -> Schema:
    """The public columns of a bundled data set (`describe`): kinds, ranges, categories and what is dropped."""
    columns = []
    for c in described.columns:
        if c.kind == "categorical":
            columns.append(Column(c.name, "categorical", categories=tuple(c.categories)))
        elif c.flag:
            columns.append(Column(c.name, "flag"))
        else:
            columns.append(Column(c.name, "numeric", c.low, c.high))
    return Schema(tuple(columns), tuple(described.dropped))
