"""Rows of the step benchmark: what they hold, their file, and the picture of them."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weightclip.errors import WeightclipError
from weightclip_studies.bench._others import OTHERS

MODES = (
    "plain", "weights", "weights-refresh", "factors", "both", "joint-cap", "exact-cap", "exact-joint-cap",
    "weights-fast", *OTHERS,
)  # fmt: skip
GRAPHED = (  # the step as a CUDA graph
    "plain-graph", "weights-graph", "factors-graph", "both-graph", "joint-cap-graph", "exact-cap-graph",
    "exact-joint-cap-graph",
)  # fmt: skip
COLUMNS = (
    "device", "model", "batch", "mode", "ms", "ratio", "peak_gib", "spread", "precision", "compile", "channels_last",
)  # fmt: skip


@dataclass(frozen=True)
class StepRow:
    """One line of results/bench/step.csv; ``ratio`` is to plain training of the same model and batch, that of a step
    recorded as a CUDA graph to plain training recorded likewise.

    ``peak_gib`` is the peak of steps after warm-up: allocated memory, of a recorded step reserved memory.
    """

    device: str
    model: str
    batch: int
    mode: str
    ms: float
    ratio: float
    peak_gib: float | None
    spread: float  # interquartile range over median
    precision: str
    compile: int = 0  # 1: both sides by torch.compile
    channels_last: int = 0


def file_of(draws: bool, path: Path | None = None) -> Path:
    """Where rows go: steps over Poisson draws to a file of their own, since no column tells them from others.

    Raises:
        WeightclipError: ``path`` is a file of the other kind.
    """
    if path is None:
        return Path("results/bench") / ("draws.csv" if draws else "step.csv")
    if draws != path.name.startswith("draws"):
        kind, wanted = ("over Poisson draws", "draws.csv") if draws else ("of one batch size", "step.csv")
        raise WeightclipError(
            f"rows of steps {kind} do not go to {path.name}: name the file {wanted}, or leave --out out."
        )
    return path


def read_csv(path: Path) -> list[StepRow]:
    """The rows of a file that :func:`write_csv` wrote."""
    with path.open(newline="") as file:
        return [
            StepRow(
                r["device"], r["model"], int(r["batch"]), r["mode"], float(r["ms"]), float(r["ratio"]),
                float(r["peak_gib"]) if r["peak_gib"] else None, float(r["spread"]), r["precision"],
                int(r.get("compile") or 0), int(r.get("channels_last") or 0),
            ) for r in csv.DictReader(file)
        ]  # fmt: skip


def write_csv(rows: Sequence[StepRow], path: Path, append: bool = False) -> None:
    """All rows as CSV, written whole or not at all; ``append`` keeps rows of the file that were not measured again.

    A row is known by its settings without ``Setting.draws``: see :func:`file_of`.
    """

    def what(r: StepRow) -> tuple[Any, ...]:
        return r.device, r.model, r.batch, r.mode, r.precision, r.compile, r.channels_last

    if append and path.exists():
        again = {what(r) for r in rows}
        rows = [*(r for r in read_csv(path) if what(r) not in again), *rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".part")
    with scratch.open("w", newline="") as file:
        writer: csv.DictWriter[str] = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for row in rows:
            writer.writerow(asdict(row))
    scratch.replace(path)


def plot(rows: Sequence[StepRow], path: Path) -> None:
    """Ratio to plain training against batch size, one panel per model and device."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib import ticker

    def panel(row: StepRow) -> tuple[str, ...]:
        extra = ", compiled" * row.compile + ", channels last" * row.channels_last
        return row.device, row.model, row.precision + extra

    panels = sorted({panel(r) for r in rows})
    across = min(3, len(panels))
    down = -(-len(panels) // across)
    figure, grid = plt.subplots(down, across, figsize=(4.2 * across, 3.6 * down), squeeze=False, layout="constrained")
    axes, lines = grid.flatten(), {}
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    for axis, (device, model, kind) in zip(axes, panels, strict=False):
        for mode in (*MODES, *GRAPHED):
            points = sorted((r.batch, r.ratio) for r in rows if (*panel(r), r.mode) == (device, model, kind, mode))
            if points and not mode.startswith("plain"):
                colour = plt.get_cmap("tab20")(2 * MODES.index(mode.removesuffix("-graph")) % 19)  # no two alike
                style = {"linestyle": "--", "marker": "s"} if mode.endswith("-graph") else {"marker": "o"}
                (lines[mode],) = axis.plot(*zip(*points, strict=True), color=colour, **style)
        axis.axhline(1.0, color="#888888", linewidth=1)
        axis.set(title=f"{model}\n{device}, {kind}", xlabel="batch", xscale="log", yscale="log")
        batches = sorted({r.batch for r in rows if panel(r) == (device, model, kind)})
        axis.set_xticks(batches, [str(b) for b in batches])
        axis.set_xticks([], minor=True)
        for which in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
            which(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    for row in grid:
        row[0].set_ylabel("step time / plain training")
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)
