"""Pictures of the audits, and the report on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from weightclip.accounting import gdp_delta, gdp_mu
from weightclip.audit._accountants import write_accountants
from weightclip.audit._checks import FALSIFIER, ONE_RUN, ONE_STEP, RELEASES, TWO_WORLDS, gdp_estimate_of
from weightclip.audit._falsifier import Falsification
from weightclip.audit._trainer import TrainerAudit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from weightclip.audit._suite import Caught, Report

_FOUND, _USUAL, _CLAIM, _BAD, _GREY = "#2a6f97", "#a9c6d8", "#222222", "#c1121f", "#8a8a8a"


def _new(width: float, height: float, columns: int = 1, rows: int = 1, **options: Any) -> Any:
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(rows, columns, figsize=(width, height), layout="constrained", **options)
    for ax in np.atleast_1d(axes).flat:
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)
    return path


def tightness_figure(found: Falsification, path: Path) -> Path:
    """Bar chart of one model: largest and typical gradient of each layer over its bound."""
    figure, ax = _new(7, 1.2 + 0.45 * len(found.layers))
    rows = [(f.layer or "(model)", f.ratio, f.typical / f.bound) for f in found.layers]
    _tightness(ax, rows)
    ax.set_title(found.subject, loc="left", fontsize=10)
    return _save(figure, path)


def _tightness(ax: Axes, rows: Sequence[tuple[str, float, float]]) -> None:
    places = np.arange(len(rows))[::-1]
    top = max(1.05, min(2.0, max(r[1] for r in rows) * 1.05))
    ax.barh(places, [min(r[1], top) for r in rows], 0.75, label="largest found",
            color=[_BAD if r[1] > 1 + 1e-6 else _FOUND for r in rows])  # fmt: skip
    ax.barh(places, [min(r[2], top) for r in rows], 0.35, color=_USUAL, label="typical record")
    ax.axvline(1, color=_CLAIM, lw=1.2, ls="--")
    ax.set_yticks(places, [r[0] for r in rows], fontsize=7)
    ax.set_xlim(0, top)
    ax.set_xlabel("gradient of one record / certified bound")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, 1.0), ncols=2, fontsize=8, frameon=False)
    ax.set_ylim(-0.8, len(rows) + 1.2)


def audit_figure(report: Report, path: Path) -> Path:
    """The whole report in one picture."""
    figure, axes = _new(14, 11, 2, 2)
    rows = [(f"{c.subject}: {layer['layer'] or 'model'}", float(layer["ratio"]), layer["typical"] / layer["bound"])
            for c in report.checks if c.audit == FALSIFIER for layer in c.details["layers"]]  # fmt: skip
    _tightness(axes[0, 0], rows)
    axes[0, 0].set_title("Falsifier: no record found above its bound" if all(r[1] <= 1 + 1e-6 for r in rows)
                         else "Falsifier: a bound is broken", loc="left")  # fmt: skip
    _exact_curves(axes[0, 1], report)
    _lower_bounds(axes[1, 0], report)
    if report.printed:
        _printed_bars(axes[1, 1], report.printed)
    else:
        axes[1, 1].axis("off")
    return _save(figure, path)


def _exact_curves(ax: Axes, report: Report) -> None:
    """Claimed delta(epsilon) of one step, and the exact ones of the worst pair of every trainer."""
    from matplotlib import colormaps

    shifts = [c.measured for c in report.checks if c.audit == ONE_STEP]
    colours = colormaps["viridis"](np.linspace(0.15, 0.85, len(report.epsilons)))
    for target, colour in zip(report.epsilons, colours, strict=True):
        sigma = 1 / gdp_mu(target, report.delta)
        grid = np.linspace(0, 1.6 * target, 80)
        for shift in shifts:
            mu = min(shift, 1e3) / sigma
            ax.plot(grid, [max(gdp_delta(mu, e), 1e-12) for e in grid], color=colour, lw=0.8, alpha=0.5)
        ax.plot(grid, [gdp_delta(1 / sigma, e) for e in grid], color=_CLAIM, lw=1.6, ls="--")
        ax.plot([target], [report.delta], "o", color=_CLAIM, ms=4)
        ax.annotate(f"{target:g}", (target, report.delta), (5, -3), textcoords="offset points", fontsize=8,
                    bbox={"fc": "white", "ec": "none", "pad": 0.5, "alpha": 0.8})  # fmt: skip
    ax.set_yscale("log")
    ax.set_ylim(1e-8, 1)
    ax.set_xlabel("epsilon")
    ax.set_ylabel("delta")
    ax.set_title(f"One step, exact: worst neighbours of {len(shifts)} trainers (lines), claim (dashed)", loc="left",
                 fontsize=10)  # fmt: skip


def _lower_bounds(ax: Axes, report: Report) -> None:
    """Lower bounds and Gaussian estimates against the claim."""
    top = 1.25 * max([*report.epsilons, 1.0])
    ax.plot([0, top], [0, top], color=_CLAIM, lw=1.2, ls="--", label="claimed")
    ax.fill_between([0, top], [0, top], [top, top], color=_BAD, alpha=0.06, lw=0)
    styles = {RELEASES: ("o", _FOUND, "one step, sampled"), TWO_WORLDS: ("s", "#52796f", "whole runs, two worlds"),
              ONE_RUN: ("^", "#bc6c25", "one run, many canaries")}  # fmt: skip
    for place, (audit, (marker, colour, label)) in enumerate(styles.items()):
        mine = [c for c in report.checks if c.audit == audit and c.details["rate"] == 1.0]
        x = np.array([c.allowed for c in mine]) * (1 + 0.03 * (place - 1))
        if len(mine):
            ax.plot(x, [c.measured for c in mine], marker, color=colour, label=f"{label}: 95% lower bound")
            ax.plot(
                x, [gdp_estimate_of(c) for c in mine], marker, color=colour, mfc="none", label=f"{label}: GDP estimate"
            )
    ax.set_xlim(0, top)
    ax.set_ylim(0, top)
    ax.set_xlabel("claimed epsilon")
    ax.set_ylabel("audited epsilon")
    ax.legend(fontsize=8, loc="upper left")
    ax.set_title(f"Sampled audits at q = 1, delta = {report.delta:g}", loc="left", fontsize=10)


def _printed_bars(ax: Axes, cases: Sequence[Caught]) -> None:
    places = np.arange(len(cases))[::-1]
    ax.barh(places, [c.result.epsilon_lower for c in cases], 0.7, color=_BAD, label="95% lower bound")
    ax.plot([min(c.result.epsilon_gdp, 40) for c in cases], places, "d", color=_GREY, ms=5,
            label="GDP estimate (cut at 40)")  # fmt: skip
    ax.axvline(1, color=_CLAIM, lw=1.2, ls="--", label="claimed")
    ax.set_yticks(places, [c.name for c in cases], fontsize=8)
    ax.set_xscale("symlog", linthresh=10)
    ax.set_xlabel("epsilon")
    ax.legend(fontsize=8, loc="upper center", ncols=3, frameon=False)
    ax.set_ylim(-0.8, len(cases) + 0.4)
    ax.set_title("The algorithm as printed, claimed epsilon = 1", loc="left", fontsize=10)


def printed_figure(case: Caught, path: Path) -> Path:
    """One flaw: what the two worlds look like, and the true curve above the claimed one."""
    figure, (left, right) = _new(9, 3.4, 2)
    low, high = np.quantile(np.concatenate(case.scores), [0.002, 0.998])
    bins = np.linspace(low, high + 1e-9, 70).tolist()
    left.hist(case.scores[0], bins, color=_GREY, alpha=0.7, density=True, label="without the record")
    left.hist(case.scores[1], bins, color=_BAD, alpha=0.55, density=True, label="with it")
    left.set_xlabel("adversary's score of one release")
    left.set_yticks([])
    left.legend(fontsize=8)
    grid = np.linspace(0, max(3.0, 1.4 * case.result.epsilon_lower), 90)
    claimed = [max(case.claim(float(e)), 1e-12) for e in grid]
    right.plot(grid, claimed, color=_CLAIM, ls="--", label="claimed")
    right.plot(grid, np.maximum(case.curve(grid), 1e-12), color=_BAD, label="measured")
    right.axvline(case.result.epsilon_lower, color=_BAD, lw=0.8, ls=":", label="95% lower bound of epsilon")
    right.set_yscale("log")
    right.set_ylim(1e-6, 300)
    right.set_xlabel("epsilon")
    right.set_ylabel("delta")
    right.legend(fontsize=8, loc="upper right")
    figure.suptitle(f"{case.name}: {case.note}", fontsize=10, x=0.01, ha="left")
    return _save(figure, path)


def trainer_figure(found: TrainerAudit, path: Path) -> Path:
    """Scores of somebody's trainer on both data sets, and how often they are told apart beside what is allowed."""
    figure, (left, right) = _new(9, 3.4, columns=2)
    without, with_record = (
        np.clip(s, *np.quantile(np.concatenate(found.scores), [0.001, 0.999])) for s in found.scores
    )
    edges = np.linspace(min(without.min(), with_record.min()), max(without.max(), with_record.max()) + 1e-12, 40)
    left.hist(without, edges, color=_GREY, alpha=0.7, label="without the record")
    left.hist(with_record, edges, color=_BAD if found.violation else _FOUND, alpha=0.7, label="with it")
    left.set_xlabel(f"score: {found.told_by}", fontsize=8)
    left.set_ylabel("runs")
    left.legend(frameon=False, fontsize=8)
    cuts = np.quantile(np.concatenate(found.scores), np.linspace(0, 1, 200))
    rates = np.array([[(s > c).mean() for s in found.scores] for c in cuts])
    right.plot(rates[:, 0], rates[:, 1], color=_BAD if found.violation else _FOUND, label="measured")
    fpr = np.linspace(0, 1, 200)
    grow, shrink = np.exp(found.epsilon), np.exp(-found.epsilon)
    allowed = np.minimum(grow * fpr + found.delta, 1 - shrink * (1 - fpr - found.delta))
    right.plot(
        fpr, np.minimum(allowed, 1), color=_CLAIM, ls="--", lw=1.2, label=f"claimed, epsilon = {found.epsilon:g}"
    )
    right.set(xlabel="false alarms", ylabel="found", xlim=(0, 1), ylim=(0, 1.01))
    right.legend(frameon=False, fontsize=8, loc="lower right")
    verdict = "refuted" if found.violation else "not refuted"
    figure.suptitle(f"{found.name}: {verdict}, at least {found.result.epsilon_lower:.3g} with 95%", fontsize=10)
    return _save(figure, path)


def write_report(report: Report, folder: Path) -> list[Path]:
    """report.json, audit.png, report.md, the accountants' table and one picture per flaw that was caught."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "report.json", audit_figure(report, folder / "audit.png"), folder / "report.md"]
    files[0].write_text(report.to_json() + "\n")
    files[2].write_text(_markdown(report))
    if report.accountants:
        write_accountants(report.accountants, folder)
        files.append(folder / "accountants.md")
    for i, case in enumerate(report.printed):
        name = "".join(ch if ch.isalnum() else "-" for ch in case.name.lower()).replace("--", "-")
        files.append(printed_figure(case, folder / "printed" / f"{i:02d}-{name}.png"))
    return files


def _markdown(report: Report) -> str:
    lines = [
        f"# Audit, seed {report.seed}, delta {report.delta:g}", "",
        f"{len(report.failures)} violations in {len(report.checks)} checks of the sound trainer.", "",
        "| audit | trainer | measured | allowed | found | verdict |", "|---|---|---:|---:|---|---|",
    ]  # fmt: skip
    for c in report.checks:
        verdict = "**violation**" if c.violation else "ok"
        lines.append(f"| {c.audit} | {c.subject} | {c.measured:.4g} | {c.allowed:g} | {c.note} | {verdict} |")
    head = "| flaw | case | shift / allowed | 95% lower bound | GDP estimate | caught |"
    if not report.printed:
        return "\n".join([*lines, ""])
    lines += ["", "## The algorithm as printed, claimed epsilon = 1", "", head, "|---|---|---:|---:|---:|---|"]
    for p in report.printed:
        lines.append(f"| {p.name} | {p.note} | {p.shift:.3g} | {p.result.epsilon_lower:.3g} | "
                     f"{p.result.epsilon_gdp:.3g} | {'yes' if p.result.violation else '**no**'} |")  # fmt: skip
    return "\n".join([*lines, ""])
