"""The figures of the image study, drawn from its tables alone."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

TITLES = {"mnist": "MNIST", "fashion_mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
# Published results without real extra images, as (label, epsilon, accuracy): those that could be read in the paper, its
# abstract or its code. docs/images.md says what each of them assumes, and which could not be checked.
PUBLISHED: dict[str, tuple[tuple[str, float, float], ...]] = {
    "mnist": (
        ("Tramèr & Boneh 2021", 3, 98.7), ("DPSUR 2024", 1, 97.93), ("DPSUR 2024", 2, 98.70), ("DPSUR 2024", 3, 98.88),
    ),
    "fashion_mnist": (
        ("Tramèr & Boneh 2021", 3, 89.7), ("DPSUR 2024", 1, 88.38), ("DPSUR 2024", 2, 89.34), ("DPSUR 2024", 3, 89.71),
    ),
    "cifar10": (
        ("Tramèr & Boneh 2021", 3, 69.3), ("De et al. 2022", 8, 81.4), ("Klause et al. 2022", 8, 82.5),
        ("DP-RandP 2023", 1, 72.3), ("DPSUR 2024", 1, 64.41), ("DPSUR 2024", 2, 69.40), ("DPSUR 2024", 3, 70.83),
    ),
}  # fmt: skip
# Method -> (label, colour, marker); the same colour means the same method in every panel.
STYLES = {
    "lip-weights": ("weights only", "#0072B2", "o"),
    "lip-factors": ("both factors bounded", "#009E73", "s"),
    "caps": ("capped products", "#CC79A7", "^"),
    "fix-lip": ("Fix-Lip", "#E69F00", "v"),
    "dp-sgd": ("DP-SGD", "#555555", "D"),
}
# Part of the model's name -> (label, line)
HEADS = {"+linear": ("linear head", "-"), "+mlp": ("hidden layer", "--"), "cnn": ("convolutions", ":")}
_MARKS = {"Tramèr & Boneh 2021": "P", "De et al. 2022": "*", "Klause et al. 2022": "p", "DP-RandP 2023": "X",
          "DPSUR 2024": "h"}  # fmt: skip


def _read(path: Path) -> list[dict[str, str]]:
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def accuracy_figure(table: Path, out: Path) -> Path:
    """Accuracy against epsilon: median and standard error of every method and head, published results as points."""
    plt, rows = _pyplot(), _read(table)
    sets = [d for d in TITLES if any(r["dataset"] == d for r in rows)]
    figure, axes = plt.subplots(1, len(sets), figsize=(4.6 * len(sets), 4.6), squeeze=False, layout="constrained")
    handles: dict[str, Any] = {}
    for axis, dataset in zip(axes[0], sets, strict=True):
        for head, (kind, line) in HEADS.items():
            names = {r["model"] for r in rows if r["dataset"] == dataset and head in r["model"]}
            model = max(names, key=lambda name: (name.count("+"), name), default="")  # the most blocks of features
            for method, (label, colour, marker) in STYLES.items():
                points = sorted(
                    (float(r["epsilon"]), float(r["median"]), float(r["sem"] or 0))
                    for r in rows
                    if (r["dataset"], r["method"], r["model"]) == (dataset, method, model)
                )
                if points:
                    x, y, error = zip(*points, strict=True)
                    name = f"{label}, {kind}"
                    style = {"color": colour, "marker": marker, "linestyle": line, "markersize": 5, "capsize": 2}
                    handles.setdefault(name, axis.errorbar(x, y, error, **style))
        best = [float(r["median"]) for r in rows if r["dataset"] == dataset and r["method"] == "non-private"]
        if best:
            name = "not private, best head"
            handles.setdefault(name, axis.axhline(max(best), color="#999999", linewidth=1, linestyle=":"))
        lowest = min(float(r["median"]) for r in rows if r["dataset"] == dataset)
        for label, epsilon, accuracy in PUBLISHED[dataset]:
            mark = axis.scatter([epsilon], [accuracy], marker=_MARKS[label], s=60, zorder=5, color="black")
            handles.setdefault(label, mark)
            lowest = min(lowest, accuracy)
        axis.set(title=TITLES[dataset], xlabel="ε  (δ = 1e-5)")
        axis.set_xticks(sorted({float(r["epsilon"]) for r in rows if r["dataset"] == dataset} - {float("inf")}))
        axis.grid(alpha=0.25)
    axes[0][0].set_ylabel("test accuracy, %")
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(out, dpi=150)
    plt.close(figure)
    return out


def runtime_figure(table: Path, out: Path) -> Path:
    """Seconds per epoch and, where it was measured, peak memory against logical batch size."""
    plt, rows = _pyplot(), _read(table)
    from matplotlib import ticker

    lines: dict[str, Any] = {}
    panels = sorted({(r["model"], r["dataset"], r.get("views", ""), r.get("physical", "")) for r in rows})
    fields = {"seconds_per_epoch": "seconds per epoch", "peak_gib": "peak memory, GiB"}
    fields = {name: label for name, label in fields.items() if any(r[name] for r in rows)}
    size = (4.6 * len(panels), 3 * len(fields))
    figure, axes = plt.subplots(len(fields), len(panels), figsize=size, squeeze=False, layout="constrained")
    for column, (model, dataset, views, physical) in enumerate(panels):
        mine = [r for r in rows if (r["model"], r.get("views", ""), r.get("physical", "")) == (model, views, physical)]
        for mode in dict.fromkeys(r["mode"] for r in mine):
            for axis, field in zip(axes[:, column], fields, strict=True):
                points = sorted((int(r["batch"]), float(r[field])) for r in mine if r["mode"] == mode and r[field])
                if points:
                    (line,) = axis.plot(*zip(*points, strict=True), marker="o", label=mode)
                    lines.setdefault(mode, line)
        told = (
            f"on {TITLES[dataset]}\n{views} view(s), passes of {physical}"
            if views
            else f"the shape of {TITLES[dataset]}"
        )
        axes[0, column].set(title=f"{model}, {told}", xscale="log", ylim=(0, None))
        if "peak_gib" in fields:
            axes[1, column].set(xscale="log", yscale="log")
            axes[1, column].yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            axes[1, column].yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axes[-1, column].set(xlabel="logical batch size")
        for axis in axes[:, column]:
            sizes = sorted({int(r["batch"]) for r in mine})
            axis.set_xticks(sizes, [str(s) for s in sizes])
            axis.minorticks_off()
            axis.grid(alpha=0.25)
    for axis, label in zip(axes[:, 0], fields.values(), strict=True):
        axis.set_ylabel(label)
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    figure.savefig(out, dpi=150)
    plt.close(figure)
    return out


# Way of bounding -> colour, the same in every panel.
WAYS = {"free": "#0072B2", "channel": "#56B4E9", "late": "#009E73", "exact": "#CC79A7", "opacus": "#555555"}


def caps_figure(caps: Path, tightness: Path, out: Path) -> Path:
    """Accuracy against the time of a step, and how far the cheap bounds lie above the exact norm, layer by layer."""
    plt = _pyplot()
    from matplotlib import ticker

    rows = [r for r in _read(caps) if r["cost"] and r["bound"] in WAYS]
    cells = sorted({(r["dataset"], r["model"], r["epsilon"]) for r in rows})
    cells = [c for c in cells if sum((r["dataset"], r["model"], r["epsilon"]) == c for r in rows) > 1]
    looks = _read(tightness)
    models = list(dict.fromkeys((r["dataset"], r["model"]) for r in looks))
    figure, axes = plt.subplots(1, 1 + len(models), figsize=(3.6 * (1 + len(models)), 3.8), layout="constrained")
    marks = dict(zip(cells, "osD^v*P", strict=False))
    for cell, mark in marks.items():
        for r in rows:
            if (r["dataset"], r["model"], r["epsilon"]) == cell:
                axes[0].scatter(float(r["cost"]), float(r["median"]), marker=mark, color=WAYS[r["bound"]], s=45)
    for way, colour in WAYS.items():
        if any(r["bound"] == way for r in rows):
            axes[0].scatter([], [], color=colour, label=way)
    for (dataset, model, epsilon), mark in marks.items():
        name = f"{TITLES[dataset]}, {model}, ε = {epsilon}"
        axes[0].scatter([], [], color="white", edgecolors="black", marker=mark, label=name)
    axes[0].set(xlabel="time of a step / plain training", ylabel="test accuracy, %", title="accuracy against cost")
    if marks:
        axes[0].legend(frameon=False, fontsize=7)
    for axis, (dataset, model) in zip(axes[1:], models, strict=True):
        mine = [r for r in looks if (r["dataset"], r["model"]) == (dataset, model)]
        first = (mine[0]["bound"], mine[0]["epsilon"])
        mine = [r for r in mine if (r["bound"], r["epsilon"]) == first]
        steps = sorted({int(r["step"]) for r in mine})
        for step, alpha in ((steps[0], 0.45), (steps[-1], 1.0)):
            layers = [r for r in mine if int(r["step"]) == step]
            for kind in ("free", "channel"):
                ratio = [float(r[kind]) / max(float(r["exact"]), 1e-12) for r in layers]
                axis.plot(range(1, len(ratio) + 1), ratio, marker="o", markersize=4, color=WAYS[kind], alpha=alpha,
                          label=f"{kind}, step {step}")  # fmt: skip
        axis.set(title=f"{model}, {TITLES[dataset]}", xlabel="layer", yscale="log")
        axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axis.yaxis.set_minor_formatter(ticker.NullFormatter())
        axis.axhline(1.0, color="#999999", linewidth=1)
        axis.legend(frameon=False, fontsize=7)
    axes[1].set_ylabel("bound / exact norm (medians)")
    for axis in axes:
        axis.grid(alpha=0.25)
    figure.savefig(out, dpi=130)
    plt.close(figure)
    return out
