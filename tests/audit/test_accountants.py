"""Independent accountants agree, and disagreement would be seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from weightclip.audit import AccountantRow, compare_accountants
from weightclip.audit._accountants import GRID, SHORT_GRID, write_accountants


@pytest.fixture(scope="module")
def rows() -> list[AccountantRow]:
    return compare_accountants(SHORT_GRID)


def test_all_agree(rows: list[AccountantRow]):
    assert [r.disagreement for r in rows] == [""] * len(SHORT_GRID)
    assert all(r.opacus_rdp is not None and r.opacus_prv is not None for r in rows)
    assert {(q, s) for _, q, s in GRID} > {(0.001, 2000), (0.1, 100), (1.0, 1)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pld": 2.0}, "below PRV"),
        ({"pld": 4.0, "dp_accounting": None}, "above RDP"),
        ({"dp_accounting": 2.0}, "dp-accounting"),
        ({"opacus_rdp": 4.0}, "Opacus"),
        ({"exact": 3.0}, "exact"),
    ],
)
def test_disagreement_is_named(rows: list[AccountantRow], change: dict[str, float | None], words: str):
    row = next(r for r in rows if (r.sigma, r.q, r.steps) == (1.0, 0.01, 2000))
    assert words in replace(row, **change).disagreement


def test_tables(rows: list[AccountantRow], tmp_path: Path):
    write_accountants(rows, tmp_path)
    assert len((tmp_path / "accountants.csv").read_text().splitlines()) == 1 + len(rows)
    assert (tmp_path / "accountants.md").read_text().count("| none |") == len(rows)
