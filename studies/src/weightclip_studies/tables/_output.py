"""Tables as files: CSV, JSON, Markdown and a picture."""

from __future__ import annotations

import csv
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from ._paper import PAPER_SIZES, best_lip, printed
from ._space import METHODS
from ._tables import COLUMNS, TableRow, Verdict

LABELS = {
    "dp-sgd": "DP-SGD",
    "dp-sgd-published": "DP-SGD, printed (claimed ε)",
    "lip-published": "Lip-DP-SGD, printed (claimed ε)",
    "fix-lip-published": "Fix-Lip-DP-SGD, printed (claimed ε)",
    "lip-weights": "sound, weights only",
    "lip-factors": "sound, factor radii",
    "joint-cap": "sound, joint cap",
    "fix-lip": "sound Fix-Lip",
    "non-private": "no privacy",
    "majority": "majority class",
}
COLOURS = {
    "dp-sgd": "#c4372c", "dp-sgd-published": "#dfb0ab", "lip-published": "#a9b4c2",
    "fix-lip-published": "#c9ced6", "lip-weights": "#7fb2d9",
    "lip-factors": "#1f5fa8", "joint-cap": "#2a8f6d", "fix-lip": "#b59ad0", "non-private": "#555555",
    "majority": "#999999",
}  # fmt: skip


def versions() -> dict[str, str]:
    """What the results were made with."""
    packages = ("weightclip", "torch", "numpy", "scipy", "scikit-learn", "dp-accounting", "botorch", "opacus")
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _number(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else value


def write_csv(rows: Sequence[TableRow], path: Path) -> Path:
    """table1.csv: exactly the agreed columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in rows:
            values = row.to_json()
            if row.method == "non-private":
                values["epsilon"] = "inf"
            elif row.method == "majority":
                values["epsilon"] = 0
            writer.writerow([_number(values[name]) for name in COLUMNS])
    return path


def write_json(
    rows: Sequence[TableRow], judged: Sequence[Verdict], path: Path, command: str, made: dict[str, str] | None = None
) -> Path:
    """All there is to say about every row, with the command and versions (``made``, or those of now) behind it."""
    body = {
        "command": command,
        "versions": versions() if made is None else made,
        "verdicts": [asdict(v) for v in judged],
        "rows": [row.to_json() for row in rows],
    }
    path.write_text(json.dumps(body, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def read_json(path: Path) -> tuple[list[TableRow], dict[str, str]]:
    """The rows of a file that :func:`write_json` wrote, and the versions behind them."""
    body = json.loads(path.read_text(encoding="utf-8"))
    return [TableRow(**(row | {"accuracies": tuple(row["accuracies"])})) for row in body["rows"]], body["versions"]


def _cell(row: TableRow | None) -> str:
    if row is None:
        return ""
    text = _short(row.median)
    text = {"best": f"**{text}**", "tied": f"<u>{text}</u>"}.get(row.mark, text)
    return text + (f" ± {_short(row.sd)}" if row.seeds > 1 and row.sd > 1e-9 else "")


def _short(value: float) -> str:
    """Three digits, without the zero before the point."""
    return f"{value:.3f}".removeprefix("0")


def markdown(rows: Sequence[TableRow], judged: Sequence[Verdict], command: str) -> str:
    """Table 1, the detailed table, quality beyond accuracy, and the verdicts."""
    datasets = list(dict.fromkeys(row.dataset for row in rows))
    found = {(r.dataset, r.method, r.group_norm): r for r in rows}
    seeds = max((r.seeds for r in rows), default=0)
    lines = [
        f"<!-- made by `{command}` -->",
        "",
        f"Median test accuracy over {seeds} seeds ± standard deviation, at the paper's ε (RDP) and δ = 1/n. **Bold**: "
        "best method whose ε holds; <u>underlined</u>: not significantly below it (Wilcoxon signed-rank, 5%, Holm's "
        "correction over a data set's methods). The "
        "printed algorithms only *claim* their ε and are not ranked. Feature statistics come from the data and the "
        "choice of settings is not "
        "charged, as in the paper: neither is covered by ε.",
        "",
    ]
    for group_norm in (False, True):
        methods = [m for m in METHODS if any(r.method == m and r.group_norm == group_norm for r in rows)]
        if not methods:
            continue
        title = "With group normalisation" if group_norm else "Without group normalisation (Table 1)"
        lines += [f"### {title}", "", "| method | " + " | ".join(datasets) + " |", "|---|" + "---|" * len(datasets)]
        lines.append("| ε | " + " | ".join(f"{printed(d).epsilon:g}" for d in datasets) + " |")
        for method in methods:
            cells = [_cell(found.get((d, method, group_norm))) for d in datasets]
            lines.append(f"| {LABELS[method]} | " + " | ".join(cells) + " |")
        for place, label in ((0, "DP-SGD"), (1, "Lip-DP-SGD"), (2, "Fix-Lip-DP-SGD")):
            values = [(printed(d).grouped if group_norm else printed(d).plain)[place] for d in datasets]
            cells = [_short(v) for v in values]
            lines.append(f"| *paper: {label}* | " + " | ".join(cells) + " |")
        lines.append("")
    lines += ["### Beyond accuracy (mean over seeds, without group normalisation): AUC / log-loss / ECE", ""]
    lines += ["| method | " + " | ".join(datasets) + " |", "|---|" + "---|" * len(datasets)]
    for method in METHODS:
        mine = [found.get((d, method, False)) for d in datasets]
        if any(mine):
            cells = [" / ".join(_short(v) for v in (r.auc, r.log_loss, r.ece)) if r else "" for r in mine]
            lines.append(f"| {LABELS[method]} | " + " | ".join(cells) + " |")
    lines += ["", "### The sound method, variant chosen on validation, against the paper and equally tuned DP-SGD", ""]
    lines += ["| data set | variant | median | 95% interval | paper's best Lip | DP-SGD | p | p, Holm | verdict |"]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    for v in judged:
        lines.append(
            f"| {v.dataset} | {v.variant} | {v.median:.4f} | {v.interval[0]:.3f}–{v.interval[1]:.3f} | {v.paper:.3f} "
            f"({'above' if v.above_paper else 'not above'}) | {v.baseline_median:.4f} ({v.baseline}) | {v.p:.3g} | "
            f"{v.p_holm:.3g} | {v.verdict} |"
        )
    above = sum(v.above_paper for v in judged)
    better, worse = (sum(v.verdict == word for v in judged) for word in ("above", "below"))
    lines += [
        "",
        f"Above the paper's Lip-DP-SGD on {above} of {len(judged)} sets; against DP-SGD significantly above on "
        f"{better}, significantly below on {worse} (corrected for {len(judged)} tests).",
        "",
    ]
    sizes = {(r.dataset, r.method): r.parameters for r in rows if r.parameters is not None and not r.group_norm}
    lines += [f"### Parameters of the networks ({PAPER_SIZES} in the paper, by data set not printed)", ""]
    lines += ["| method | " + " | ".join(datasets) + " |", "|---|" + "---|" * len(datasets)]
    for method in [m for m in METHODS if any(name == m for _, name in sizes)]:
        lines.append(f"| {LABELS[method]} | " + " | ".join(str(sizes.get((d, method), "")) for d in datasets) + " |")
    lines.append("")
    return "\n".join(lines)


def picture(rows: Sequence[TableRow], path: Path) -> Path:
    """One panel per data set: every seed a dot, the median a bar, the paper's best Lip-DP-SGD a line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    datasets = list(dict.fromkeys(row.dataset for row in rows))
    methods = [m for m in METHODS if m != "majority" and any(r.method == m for r in rows)]
    figure = Figure(figsize=(15, 0.9 + 3.4 * ((len(datasets) + 3) // 4)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots((len(datasets) + 3) // 4, 4, squeeze=False).ravel()
    for axis in axes[len(datasets) :]:
        axis.set_axis_off()
    rng = np.random.default_rng(0)
    for axis, dataset in zip(axes, datasets, strict=False):
        shown = [r for r in rows if r.dataset == dataset and r.method in methods]
        for row in shown:
            x = methods.index(row.method) + (0.2 if row.group_norm else -0.2)
            jitter = rng.uniform(-0.11, 0.11, row.seeds)
            colour = COLOURS[row.method]
            face = "white" if row.group_norm else colour
            axis.scatter(x + jitter, row.accuracies, s=11, color=face, edgecolors=colour, linewidths=0.7, zorder=3)
            axis.plot([x - 0.17, x + 0.17], [row.median] * 2, color=colour, linewidth=2.2, zorder=4)
        axis.axhline(best_lip(dataset), color="#e08a00", linewidth=1.2, linestyle="--", zorder=1)
        low = min([best_lip(dataset), *(float(np.min(r.accuracies)) for r in shown if r.method == "dp-sgd")])
        high = max(float(np.max(r.accuracies)) for r in shown)
        medians = sorted(r.median for r in shown)
        low = min(low, medians[len(medians) // 4])
        pad = 0.12 * (high - low) + 1e-3
        axis.set_ylim(low - pad, high + pad)  # the worst methods may leave the panel: the table has them
        axis.set_xlim(-0.6, len(methods) - 0.4)
        axis.set_title(f"{dataset}, ε = {printed(dataset).epsilon:g}", fontsize=10.5)
        axis.set_xticks(range(len(methods)), methods, rotation=40, ha="right", fontsize=8)
        axis.tick_params(axis="y", labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#e8eaee", linewidth=0.7)
    figure.suptitle(
        "Test accuracy by seed (filled: without group normalisation, hollow: with); bar: median; dashed: best "
        "Lip-DP-SGD the paper prints",
        fontsize=11,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path


def write_all(
    rows: Sequence[TableRow], judged: Sequence[Verdict], folder: Path, command: str, made: dict[str, str] | None = None
) -> list[Path]:
    """table1.csv, table1.json, tables.md and table1.png."""
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "tables.md"
    text.write_text(markdown(rows, judged, command), encoding="utf-8")
    return [
        write_csv(rows, folder / "table1.csv"),
        write_json(rows, judged, folder / "table1.json", command, made),
        text,
        picture(rows, folder / "table1.png"),
    ]
