"""Table, picture and page of the figure, made from its rows."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weightclip_studies.figure._recipe import METHODS
from weightclip_studies.figure._rows import ROWS_FILE, Row, read_rows, summary

_TITLES = {"mnist": "MNIST, ConvNet", "fashion_mnist": "Fashion-MNIST, ConvNet", "cifar10": "CIFAR-10, WRN-16-4"}


def table(out: Path) -> Path:
    """``figure.csv``: one line for each cell."""
    rows = summary(read_rows(out / ROWS_FILE))
    path = out / "figure.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


def draw(out: Path) -> Path:
    """``figure.png``: accuracy against epsilon, a panel for each data set, standard errors as vertical lines."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [r for r in summary(read_rows(out / ROWS_FILE)) if not r["changes"]]
    sets = [d for d in _TITLES if any(r["dataset"] == d for r in rows)]
    panels = max(1, len(sets))
    figure, axes = plt.subplots(1, panels, figsize=(4.4 * panels, 4.2), squeeze=False, layout="constrained")
    lines: dict[str, Any] = {}
    for axis, dataset in zip(axes[0], sets, strict=False):
        for colour, method in enumerate(METHODS):
            mine = sorted((r for r in rows if (r["dataset"], r["method"]) == (dataset, method)),
                          key=lambda r: float(r["epsilon"]))  # fmt: skip
            if method == "plain":
                for r in mine:
                    lines[method] = axis.axhline(float(r["median"]), color="#888888", linestyle="--")
            elif mine:
                lines[method] = axis.errorbar(
                    [float(r["epsilon"]) for r in mine], [float(r["median"]) for r in mine],
                    [float(r["sem"] or 0) for r in mine], marker="o", markersize=4, color=f"C{colour}",
                )  # fmt: skip
        axis.set(title=_TITLES[dataset], xlabel="ε, at δ = 1e-5", ylabel="test accuracy, %")
        axis.grid(alpha=0.25)
    names = [METHODS[m] for m in lines]
    figure.legend(list(lines.values()), names, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    path = out / "figure.png"
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def page(out: Path) -> Path:
    """``figure.md``: the table in words, with what was chosen at an edge and which rows are of few seeds."""
    rows = summary(read_rows(out / ROWS_FILE))
    lines = ["# Accuracy on the paper's networks", "",
             "Made by `weightclip-study reproduce figure` from `figure.jsonl`. δ = 1e-5, PLD, adding or removing one",
             "record; chosen on a tenth of the training part, tested once for each seed. Median of seeds, ± standard",
             "error of the mean. Opacus has one view of a record at most.", ""]  # fmt: skip
    for dataset, title in _TITLES.items():
        mine = [r for r in rows if r["dataset"] == dataset]
        levels = sorted({r["epsilon"] for r in mine if r["epsilon"] != "inf"}, key=float)
        if not mine:
            continue
        private = [r for r in mine if r["epsilon"] != "inf"]
        kinds = list(dict.fromkeys((r["method"], r["changes"]) for r in private))
        lines += [f"## {title}", "", "| method | " + " | ".join(f"ε = {e}" for e in levels) + " |",
                  "|---|" + "---|" * len(levels)]  # fmt: skip
        for method, changes in sorted(kinds, key=lambda k: (list(METHODS).index(k[0]), k[1])):
            cells = [_cell(private, method, changes, e) for e in levels]
            lines.append(f"| {METHODS[method]}{f' ({changes})' if changes else ''} | " + " | ".join(cells) + " |")
        lines += [""] + [f"Without privacy: {_said(r)}.\n" for r in mine if r["epsilon"] == "inf"]
    lines += _pace(rows) + _audited(out) + _warnings(rows)
    path = out / "figure.md"
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    return path


def _pace(rows: Sequence[Row]) -> list[str]:
    """Time on real data, as it was trained: draws, views, inputs, bounds, noise and optimiser."""
    if not rows:
        return []
    lines = ["## Time", "", "Medians of steps of the final runs, on records that lie on the device; an epoch is as",
             "many records as there are. Processes may share a GPU (two to seven did for the first rows):",
             "these times are no measurement of speed, `results/bench/step.csv` is one.", "",
             "| data set, network | method | batch | views | ms a step | s an epoch | device |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for row in rows:
        method = METHODS[row["method"]] + (f" ({row['changes']})" if row["changes"] else "")
        level = "" if row["epsilon"] == "inf" else f", ε = {row['epsilon']}"
        sizes = f"{row['batch']} | {max(1, int(row['views']))}"
        times = f"{row['step_ms']} | {row['epoch_s']} | {row['device']}"
        lines.append(f"| {_TITLES[row['dataset']]} | {method}{level} | {sizes} | {times} |")
    return [*lines, ""]


def _audited(out: Path) -> list[str]:
    """What `reproduce figure --audit` found; for bounds from weights that is also how loose they are."""
    path = out / "audit.json"
    if not path.exists():
        return []
    lines = ["## Audit", "", "`weightclip-study reproduce figure --audit`: the largest gradient of one record that a",
             "search found, over what the noise is made for, and the largest shift of one release by one record, in",
             "units of the noise's scale. Above 1 a recipe would leak. A search that finds little shows no more than",
             "that: bounds from weights alone pay for gradients that it does not find. Initial weights, random records",
             "of this size, float32, single steps; what Opacus trains is not audited.", "",
             "| network | method | size | largest gradient / bound | shift |", "|---|---|---|---|---|"]  # fmt: skip
    for row in json.loads(path.read_text()):
        parts = [name for name in ("group_norm", "standardise") if row[name]]
        method = METHODS[row["method"]] + (f" ({', '.join(parts)})" if parts else "")
        found = f"{row['falsifier']:.3f} | {row['one_step']:.3f}"
        lines.append(f"| {row['network']} | {method} | {row['size']} | {found} |")
    return [*lines, ""]


def _cell(rows: Sequence[Row], method: str, changes: str, level: str) -> str:
    found = [r for r in rows if (r["method"], r["changes"], r["epsilon"]) == (method, changes, level)]
    return _said(found[0]) if found else ""


def _said(row: Row) -> str:
    error = f" ± {float(row['sem']):.2f}" if row["sem"] else ""
    return f"{row['median']}{error}{'*' if row['at_edge'] else ''}"


def _warnings(rows: Sequence[Row]) -> list[str]:
    """What a reader must know of single rows."""
    said = []
    if any(r["at_edge"] for r in rows):
        said.append("\\* The chosen value lies at the edge of what was tried, so a better one may lie beyond: "
                    "see the column `at_edge` of `figure.csv`.")  # fmt: skip
    few = sorted({r["seeds"] for r in rows if r["seeds"] < 3})
    if few:
        said.append(f"Rows of fewer than three seeds are there ({', '.join(map(str, few))}): see `figure.csv`.")
    if any(not r["trials"] for r in rows):
        said.append("Of rows with `trials` 0 nothing was chosen: settings as published, or as chosen at another ε.")
    return [line for text in said for line in (text, "")]
