"""The figure of `_effects`: accuracy and tightness against τ, X_0 and C."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FACTORS = {
    "tau": "loss temperature τ",
    "X0": "input radius X₀ / norm of a typical row",
    "C": "weight norm C, all layers",
    "C per layer": "factors on C of (first, last)",
}
COLOURS = {"table": "#1f5fa8", "plain": "#c4372c"}


def plot_effects(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Two rows of panels per data set, accuracy and bound over largest gradient; a column per factor."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    datasets = list(dict.fromkeys(r["data"] for r in rows))
    figure = Figure(figsize=(15, 0.7 + 4.6 * len(datasets)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2 * len(datasets), len(FACTORS), squeeze=False, sharey="row")
    for d, dataset in enumerate(datasets):
        for j, (factor, title) in enumerate(FACTORS.items()):
            top, below = axes[2 * d][j], axes[2 * d + 1][j]
            for base, colour in COLOURS.items():
                own = [r for r in rows if r["data"] == dataset and r["base"] == base]
                mine = [r for r in own if r["factor"] == factor]
                start = [r for r in own if r["factor"] == "none"]
                if not mine or not start:
                    continue
                by_layer = factor == "C per layer"
                x = list(range(len(mine))) if by_layer else [float(r["value"]) for r in mine]
                line = "" if by_layer else "-"
                top.errorbar(x, [r["test"] for r in mine], yerr=[r["test_sd"] for r in mine], color=colour,
                             fmt="o" + line, markersize=4, linewidth=1.3, label=f"from {base}")  # fmt: skip
                top.axhline(start[0]["test"], color=colour, linewidth=0.9, linestyle="--")
                for layer, style in (("first", "o"), ("last", "s")):
                    below.plot(x, [r[f"{layer}_bound/largest"] for r in mine], style + line, color=colour, markersize=4,
                               linewidth=1.1, markerfacecolor=colour if layer == "first" else "white",
                               label=f"from {base}, {layer} layer")  # fmt: skip
                if factor == "tau":
                    outer = [r for r in own if r["factor"] == "loss / tau"]
                    top.plot([float(r["value"]) for r in outer], [r["test"] for r in outer], "x", color=colour,
                             markersize=8, label=f"from {base}, whole loss divided by τ")  # fmt: skip
                if by_layer:
                    for axis in (top, below):
                        axis.set_xticks(x, [r["value"] for r in mine], fontsize=8)
                else:
                    for axis in (top, below):
                        axis.set_xscale("log", base=2)
                        axis.set_xticks(x, [r["value"] for r in mine], fontsize=8)
                        axis.minorticks_off()
            top.set_title(f"{dataset}: {title}", fontsize=10)
            for axis in (top, below):
                axis.spines[["top", "right"]].set_visible(False)
                axis.grid(color="#eceef1", linewidth=0.7)
        mine = [r for r in rows if r["data"] == dataset]
        best, floor = max(r["test"] for r in mine), min(r["test"] for r in mine if r["factor"] == "none")
        axes[2 * d][0].set_ylim(max(floor - 0.035, min(r["test"] for r in mine) - 0.005), best + 0.006)
        axes[2 * d][0].set_ylabel("test accuracy\n(the worst cells leave the panel)")
        below = axes[2 * d + 1][0]
        below.set_yscale("log", base=2)
        below.set_yticks([1, 2, 4, 8], ["1", "2", "4", "8"])
        below.minorticks_off()
        below.set_ylabel("certified Δ / largest gradient")
    for axis in axes[:2, 0]:
        axis.legend(frameon=False, fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path
