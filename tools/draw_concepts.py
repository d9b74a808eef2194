"""Draws the pictures of docs/concepts.md and docs/epsilon.md from committed results: ``python tools/draw_concepts.py``.

No model is trained here: curves come from ``results/`` or from formulas. Pictures are SVG, the same for the same data.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle

ROOT = Path(__file__).parents[1]
BLUE, RED, GREY, GREEN = "#1f5fa8", "#c0392b", "#8a8f98", "#2e7d4f"


def rows(name: str) -> list[dict[str, str]]:
    """A table of results/."""
    with (ROOT / "results" / name).open() as file:
        return list(csv.DictReader(file))


def step() -> Any:
    """What happens to one record between the layer and the optimiser."""
    figure, axes = plt.subplots(figsize=(8.4, 2.5))
    axes.set(xlim=(0, 100), ylim=(0, 30))
    axes.axis("off")
    boxes = [
        (1, "input x\nof one record", GREY),
        (1, "signal δ\nfrom the loss", GREY),
        (24, "product x·δ\nof this record", BLUE),
        (43, "scaled to at\nmost the limit c", RED),
        (62, "added to the\nother records", BLUE),
        (81, "noise for c,\ndivided by b", GREEN),
    ]
    for i, (left, text, colour) in enumerate(boxes):
        low = (18, 3, 10.5, 10.5, 10.5, 10.5)[i]
        axes.add_patch(Rectangle((left, low), 16, 9, fc="white", ec=colour, lw=1.6))
        axes.text(left + 8, low + 4.5, text, ha="center", va="center", fontsize=9, color="#222222")
    arrow: Any = {"arrowprops": {"arrowstyle": "->", "color": "#444444"}}
    for start, end in (((17, 22), (24, 16.5)), ((17, 8), (24, 13.5)), ((40, 15), (43, 15)), ((59, 15), (62, 15)),
                       ((78, 15), (81, 15)), ((97, 15), (100, 15))):  # fmt: skip
        axes.annotate("", end, start, **arrow)
    axes.text(51, 6, "inside the layer, before anything is kept", ha="center", fontsize=8.5, color=RED)
    axes.text(89, 6, "the only release", ha="center", fontsize=8.5, color=GREEN)
    return figure


def slack() -> Any:
    """How far the limit of each layer lies above the gradients it limits, for three ways to choose it."""
    found = [r for r in rows("images/tightness.csv") if r["step"] == "49"]
    layers = list(dict.fromkeys(r["layer"] for r in found))
    methods = {"weights": ("bounds from weights", GREY), "factors": ("radii on both factors", BLUE),
               "joint-cap": ("joint cap (default)", RED)}  # fmt: skip
    figure, axes = plt.subplots(figsize=(8.0, 3.4))
    for i, (method, (label, colour)) in enumerate(methods.items()):
        mine = {r["layer"]: r for r in found if r["method"] == method}
        ratio = [float(mine[n]["sensitivity"]) / float(mine[n]["median_gradient"]) for n in layers]
        accuracy = float(mine[layers[0]]["accuracy"])
        axes.bar(np.arange(len(layers)) + 0.27 * (i - 1), ratio, 0.25, color=colour, label=f"{label}: {accuracy:.1f} %")
    axes.axhline(1, color="#222222", lw=0.8)
    axes.set(yscale="log", xticks=range(len(layers)), ylabel="limit / median gradient",
             xticklabels=["convolution 1", "convolution 2", "dense 1", "dense 2"])  # fmt: skip
    axes.legend(frameon=False, title="accuracy after 50 steps", fontsize=9, title_fontsize=9)
    return figure


def clipping() -> Any:
    """Flat clipping on two tables: the mean gradient, the mean of the clipped ones, and the share that was clipped."""
    found = rows("tabular/clipping_error.csv")
    figure, both = plt.subplots(1, 2, figsize=(8.4, 3.2))
    for axes, data in zip(both, ("adult", "dropout"), strict=True):
        mine = [r for r in found if r["dataset"] == data and r["method"] == "DP-SGD, flat clipping"]
        x = [int(r["iteration"]) for r in mine]
        for column, colour, label in (("true_norm", BLUE, "length of the mean gradient"),
                                      ("clipped_norm", GREY, "of the mean clipped gradient"),
                                      ("error", RED, "of their difference")):  # fmt: skip
            axes.plot(x, [float(r[column]) for r in mine], color=colour, label=label)
        touched = 100 * np.mean([float(r["fraction"]) for r in mine if int(r["iteration"]) > 200])
        axes.set(title=f"{data}: {touched:.0f} % of the records clipped", xlabel="step")
        axes.set_ylim(bottom=0)
    figure.legend(*both[0].get_legend_handles_labels(), loc="upper center", ncols=3, frameon=False, fontsize=9)
    figure.subplots_adjust(top=0.8)
    return figure


def belief() -> Any:
    """How sure an attacker can become, for two beliefs held before."""
    epsilon = np.linspace(0, 8, 200)
    figure, axes = plt.subplots(figsize=(7.0, 3.0))
    for prior, colour in ((0.5, BLUE), (0.01, RED)):
        odds = prior / (1 - prior) * np.exp(epsilon)
        axes.plot(epsilon, 100 * odds / (1 + odds), color=colour, label=f"{100 * prior:g} % sure before")
    for mark in (1, 3, 8):
        axes.axvline(mark, color=GREY, lw=0.6, ls=":")
        axes.text(mark, 103, f"{100 / (1 + math.exp(-mark)):.4g} %", ha="center", fontsize=8, color=BLUE)
    axes.set(xlabel="ε", ylabel="at most this sure after, %", ylim=(0, 100), xlim=(0, 8.2))
    axes.legend(frameon=False, loc="center right", fontsize=9)
    return figure


PICTURES: dict[str, Callable[[], Any]] = {"step": step, "slack": slack, "clipping": clipping, "belief": belief}


def main(folder: Path) -> None:
    """Draw all pictures into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    style: Any = {"svg.hashsalt": "weightclip", "svg.fonttype": "none", "font.family": "sans-serif",
             "axes.spines.top": False, "axes.spines.right": False}  # fmt: skip
    with plt.rc_context(style):
        for name, draw in PICTURES.items():
            figure = draw()
            figure.savefig(folder / f"{name}.svg", bbox_inches="tight", metadata={"Date": None})
            plt.close(figure)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "pictures")
