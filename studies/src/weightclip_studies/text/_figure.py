"""The table of the text study as a picture: accuracy over ε, one panel for each part that was trained."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

_PARTS = ("head", "lora", "last", "full")
_COLOURS = {"cap": "tab:blue", "opacus": "tab:orange", "factors": "tab:green", "quantiles": "tab:purple"}


def figure(table: Path, out: Path) -> None:
    """Draw it.

    Args:
        table: The CSV file that the study wrote.
        out: The picture to write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    parts = [part for part in _PARTS if any(row["part"] == part for row in rows)]
    drawn = Figure(figsize=(3.2 * len(parts) + 0.8, 3.4), layout="constrained")
    FigureCanvasAgg(drawn)
    panels = drawn.subplots(1, len(parts), sharey=True, squeeze=False)[0]
    for part, panel in zip(parts, panels, strict=True):
        _panel(panel, [row for row in rows if row["part"] == part])
        panel.set(title=part, xscale="log", xlabel="ε (δ = 1e-5)", xticks=[1, 3, 8], xticklabels=["1", "3", "8"])
        panel.minorticks_off()
    panels[0].set_ylabel("accuracy on SST-2, test")
    panels[0].legend(fontsize=8)
    drawn.savefig(out, dpi=150)


def _panel(panel: Any, rows: list[dict[str, str]]) -> None:
    for method, colour in _COLOURS.items():
        points = sorted((float(r["epsilon"]), float(r["median"]), float(r["sem"] or 0)) for r in rows
                        if r["method"] == method)  # fmt: skip
        if points:
            x, y, sem = zip(*points, strict=True)
            panel.errorbar(x, y, yerr=[2 * s for s in sem], color=colour, marker="o", markersize=4, label=method)
    for row in rows:
        if row["method"] == "non-private":
            panel.axhline(float(row["median"]), color="grey", linestyle="--", label="non-private")
