"""Rows of the figure in their file: which of them count, and one line for each cell of them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weightclip_studies.figure._recipe import Recipe

ROWS_FILE = "figure.jsonl"
Row = dict[str, Any]
CODE = 2
"""Of the trainers. It grows with every mend that changes what a run would be; rows without the number are of 1."""
_MENDED = {"joint": 2, "caps": 2}
"""Method -> the oldest code whose final runs still count. Before 2 an exact norm in TF32 could be 0.1% too small."""


def read_rows(path: Path) -> list[Row]:
    """The rows of a file; a last line that was cut off by a kill is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def append(path: Path, row: Row) -> None:
    """One short write at the file's end, on a line of its own even after half a line of a killed process."""
    with path.open("a+b") as file:
        torn = file.tell() and (file.seek(-1, 2), file.read(1))[1] != b"\n"
        file.write(b"\n" * bool(torn) + json.dumps(row).encode() + b"\n")


def of_recipe(row: Row, recipe: Recipe, records: int) -> bool:
    """Whether a run was made by this recipe on so many records."""
    return Recipe(**row["recipe"]) == recipe and row["records"] == records


def is_current(row: Row) -> bool:
    """Whether no mend of the trainers asks for this run to be made again."""
    return int(row.get("code", 1)) >= _MENDED.get(row["recipe"]["method"], 1)


def standing(rows: Sequence[Row]) -> list[Row]:
    """The final runs that count: of each cell those of one recipe and code, one a seed.

    The newest, where there are as many seeds of it as of every older one: a cell that is being made again keeps its old
    runs until all new ones are there.
    """
    cells: dict[str, dict[tuple[Any, ...], dict[int, Row]]] = {}
    for row in rows:
        if row["stage"] == "final":
            kind = (Recipe(**row["recipe"]), row["records"], row.get("code", 1))
            kinds = cells.setdefault(row["cell"], {})
            kinds[kind] = {**kinds.pop(kind, {}), row["seed"]: row}  # last, as it was made last
    found = []
    for kinds in cells.values():
        most = max(map(len, kinds.values()))
        found += [r for _, r in sorted([one for one in kinds.values() if len(one) == most][-1].items())]
    return found


def summary(rows: Sequence[Row]) -> list[Row]:
    """One row for each cell that was tested: median and standard error over seeds, what was chosen and how."""
    found, tested = [], standing(rows)
    for key in dict.fromkeys(r["cell"] for r in tested):
        finals = [r for r in tested if r["cell"] == key]
        accuracies, first = [r["accuracy"] for r in finals], finals[0]
        spread = statistics.stdev(accuracies) / len(finals) ** 0.5 if len(finals) > 1 else None
        recipe = first["recipe"]
        found.append({
            "dataset": first["dataset"], "network": recipe["network"], "method": recipe["method"],
            "epsilon": "inf" if first["target"] is None else f"{first['target']:g}", "delta": 1e-5, "accountant": "pld",
            "changes": " ".join(f"{k}={v}" for k, v in first["changes"].items()), "seeds": len(finals),
            "median": f"{statistics.median(accuracies):.2f}", "sem": "" if spread is None else f"{spread:.3f}",
            "trials": first["trials"], "at_edge": " ".join(first["open_sides"]), "batch": recipe["batch"],
            "steps": first["releases"], "learning_rate": f"{recipe['learning_rate']:g}", "clip": f"{recipe['clip']:g}",
            "views": recipe["views"], "group_norm": int(recipe["group_norm"]),
            "standardise": int(recipe["standardise"]), "average": recipe["average"],
            "seconds": f"{statistics.fmean(r['seconds'] for r in finals):.1f}",
            "step_ms": f"{(pace := statistics.median(r['step_ms'] for r in finals)):.4g}",
            "epoch_s": f"{1e-3 * pace * first['records'] / recipe['batch']:.4g}",
            "device": first["device"],
        })  # fmt: skip
    return found
