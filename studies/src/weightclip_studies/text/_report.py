"""The tables of the text study as the lines of a page, so that no number in it was copied by hand."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from weightclip.errors import WeightclipError
from weightclip_studies.text._study import Line

BEGIN, END = "<!-- text study: written by weightclip-study text --page -->", "<!-- end of the text study -->"
_PARTS = {"head": "head", "lora": "low-rank updates", "last": "last layer", "full": "all layers"}
_METHODS = {"cap": "cap", "factors": "factors", "quantiles": "quantiles", "opacus": "Opacus", "non-private": "none"}
_BUDGETS = ("1", "3", "8")


def write_page(page: Path, table: Path) -> None:
    """Put the tables between the two marks of a page, in the place of what is there.

    Args:
        page: A Markdown file with the marks.
        table: The study's CSV file; recipes.csv and canaries.csv beside it are used where they are.

    Raises:
        WeightclipError: The page has no marks, or there is no table.
    """
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise WeightclipError(f"--page {page}: it holds no line {BEGIN} with {END} behind it.")
    if not table.exists():
        raise WeightclipError(f"--page: {table} is missing; weightclip-study text writes it.")
    page.write_text(f"{before}{begin}\n\n{lines(table)}\n\n{end}{after}")


def lines(table: Path) -> str:
    """All tables, and what they say of the claims, as Markdown."""
    rows = _read(table)
    made = [_accuracies(rows), *_claims(rows)]
    if timed := [row for row in rows if row["seconds"]]:
        devices = dict.fromkeys(row["device"] for row in timed)  # times of two machines stand in two tables
        made.extend(_times([row for row in timed if row["device"] == device]) for device in devices)
    if audits := _read(table.with_name("canaries.csv")):
        made.extend(_audit(row) for row in audits)
    if recipes := _read(table.with_name("recipes.csv")):
        made.append(_recipes(recipes))
    return "\n\n".join(made)


def _read(path: Path) -> list[Line]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _score(row: Line | None) -> str:
    if row is None:
        return ""
    few = "" if row["seeds"] == "5" else " (1 seed)" if row["seeds"] == "1" else f" ({row['seeds']} seeds)"
    error = f" ± {_short(row['sem'])}" if row["sem"] else ""
    return _short(row["median"]) + error + few


def _short(number: str) -> str:
    return f"{float(number):.3f}".removeprefix("0")


def _accuracies(rows: Sequence[Line]) -> str:
    found = []
    for part in _PARTS:
        for method in _METHODS:
            mine = [row for row in rows if row["part"] == part and row["method"] == method]
            if not mine:
                continue
            at = {row["epsilon"]: row for row in mine}
            cells = [_score(at.get(e)) for e in _BUDGETS] if method != "non-private" else ["", "", _score(mine[0])]
            found.append([_PARTS[part], _METHODS[method], *cells, _runs(mine)])
    return _grid(["trained", "limit", "ε = 1", "ε = 3", "ε = 8 (none: without privacy)", "steps of records"], found)


def _runs(rows: Sequence[Line]) -> str:
    """Steps and batches, and at which ε where they differ."""
    budgets: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda row: float(row["epsilon"] or 0)):
        budgets.setdefault(f"{row['steps']} of {row['batch']}", []).append(row["epsilon"])
    if len(budgets) == 1:
        return next(iter(budgets))
    return ", ".join(f"{steps} (ε = {', '.join(at)})" for steps, at in budgets.items())


def _claims(rows: Sequence[Line]) -> list[str]:
    """What "better than" means here, each with the numbers it rests on."""
    at = {(row["part"], row["method"], row["epsilon"]): row for row in rows}
    said = []
    for part in ("lora", "full", "last"):
        cap, head = at.get((part, "cap", "8")), at.get(("head", "cap", "8"))
        if cap is None or head is None:
            continue
        plain, opacus = at.get((part, "non-private", "")), at.get((part, "opacus", "8"))
        text = f"{_PARTS[part].capitalize()} at ε = 8 under one cap: {_apart(cap, head)} to the head"
        text += f", {_apart(cap, opacus)} to Opacus" if opacus else ""
        text += f", {_apart(cap, plain)} to training without privacy" if plain else ""
        text += " (± two standard errors of the difference)"
        if cap["ratio"]:
            text += f". A step takes {cap['ratio']} times that of ordinary training"
            text += f", Opacus' {opacus['ratio']} times" if opacus and opacus["ratio"] else ""
        if cap["peak_gib"]:
            text += f"; memory: {_gib(cap)}"
            text += f", ordinary training {_gib(plain)}" if plain and plain["peak_gib"] else ""
            text += f", Opacus {_gib(opacus)}" if opacus and opacus["peak_gib"] else ""
        said.append(text + ".")
    return said


def _apart(row: Line, other: Line) -> str:
    error = 2 * (float(row["sem"] or "nan") ** 2 + float(other["sem"] or "nan") ** 2) ** 0.5
    told = "" if error != error else f" ± {100 * error:.1f}"
    return f"{100 * (float(row['median']) - float(other['median'])):+.1f}{told} points"


def _gib(row: Line) -> str:
    return f"{float(row['peak_gib']):.1f} GiB"


def _times(rows: Sequence[Line]) -> str:
    """Times of each method, those beside its largest ε where several rows have some; ordinary training, which is timed
    in batches of the same size, for as many steps."""
    latest: dict[tuple[str, str], Line] = {}
    for row in sorted(rows, key=lambda row: float(row["epsilon"] or 0)):
        latest[row["part"], row["method"]] = row
    found = []
    for row in sorted(latest.values(), key=lambda row: (list(_PARTS).index(row["part"]), float(row["ratio"] or 0))):
        cap = latest.get((row["part"], "cap"))
        steps = row["steps"] if row["method"] != "non-private" else cap["steps"] if cap else ""
        pace = f"{1000 * float(row['seconds']) / int(steps):.1f}" if steps else ""
        names = _PARTS[row["part"]], _METHODS[row["method"]]
        found.append([*names, steps, row["seconds"], pace, row["ratio"], row["peak_gib"]])
    head = ["trained", "limit", "steps", "seconds", "ms a step", "of ordinary training", "GiB reserved"]
    return f"Alone on the device ({rows[0]['device']}):\n\n" + _grid(head, found)


def _audit(row: Line) -> str:
    steps = f" of a run of {row['steps']} steps" if row.get("steps") else ""
    return (
        f"The audit of {_PARTS[row['part']]} ({_METHODS[row['method']]}){steps}: of {row['canaries']} sentences that a "
        f"coin inserted or left out it guesses {row['correct']} of {row['guesses']} rightly, so that ε is at least "
        f"{float(row['epsilon_lower']):.2f}, beside the claim of {row['epsilon']}."
    )


def _recipes(rows: Sequence[Line]) -> str:
    found = [[_PARTS[row["part"]], row["recipe"], f"{100 * float(row['dev']):.2f}", row["sem"] and
              f"{100 * float(row['sem']):.2f}", row["above_plain"] and f"{100 * float(row['above_plain']):+.2f}"]
             for row in rows]  # fmt: skip
    budgets = ", ".join(sorted({row["epsilon"] for row in rows}))
    return f"Recipes at ε = {budgets}, percent right on dev:\n\n" + _grid(
        ["trained", "recipe", "dev", "standard error", "above plain"], found
    )
