"""Rows to CSV and Markdown."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Line = Mapping[str, Any]


def write_csv(path: Path, rows: Iterable[Line]) -> Path:
    """All rows, with the first one's columns."""
    rows = list(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: _text(v) for k, v in row.items()} for row in rows)
    return path


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a file as text."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def markdown(rows: Iterable[Line]) -> str:
    """A table."""
    rows = list(rows)
    head = list(rows[0])
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(str(_text(row[k])) for k in head) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _text(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value
