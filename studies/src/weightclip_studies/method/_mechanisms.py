"""Gaussian and K-norm noise at equal (epsilon, delta), over dimension and steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from weightclip.accounting import Adjacency, calibrate_sigma
from weightclip.noise import KNorm, calibrate_epsilon0, spread

from ._files import write_csv

DIMENSIONS = (1, 10, 100, 1_000, 10_000, 100_000)
STEPS = (1, 10, 100, 1_000)


def compare(epsilon: float, delta: float, q: float, steps: int, dimensions: tuple[int, ...] = DIMENSIONS):
    """Root mean square noise per entry for a sum that one record moves by at most 1 in the mechanism's own norm.

    A gradient of l2 norm 1 has l1 norm up to sqrt(d) and l_inf norm up to 1 (and down to 1/sqrt(d)): the last columns
    say what each mechanism costs against the Gaussian when all that is known is the l2 norm.
    """
    sigma = calibrate_sigma(epsilon, delta, q, steps)
    epsilon0 = calibrate_epsilon0(epsilon, delta, q, steps, "pld", Adjacency.ADD_OR_REMOVE_ONE)
    one = torch.ones(1, dtype=torch.float64)
    for d in dimensions:
        noise = {p: float(spread(KNorm(p), [d], epsilon0, one)[0]) for p in (1, 2, math.inf)}
        yield {
            "epsilon": epsilon, "delta": delta, "q": q, "steps": steps, "dimension": d, "sigma": sigma,
            "epsilon0": epsilon0, "gaussian": sigma, "knorm_1": noise[1], "knorm_2": noise[2],
            "knorm_inf": noise[math.inf], "ratio_1_from_l2": math.sqrt(d) * noise[1] / sigma,
            "ratio_2": noise[2] / sigma, "ratio_inf_from_l2": noise[math.inf] / sigma,
        }  # fmt: skip


def mechanisms_study(out: Path, *, epsilon: float = 2.0, delta: float = 1e-5, q: float = 0.01) -> list[Path]:
    """results/method/mechanisms.csv and .png."""
    rows = [row for steps in STEPS for row in compare(epsilon, delta, q, steps)]
    return [write_csv(out / "mechanisms.csv", rows), _figure(rows, out / "mechanisms.png", epsilon, delta, q)]


def _figure(rows: list[dict[str, Any]], path: Path, epsilon: float, delta: float, q: float) -> Path:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    labels = {"ratio_1_from_l2": "K-norm, l1", "ratio_2": "K-norm, l2", "ratio_inf_from_l2": "K-norm, l∞"}
    for key, label in labels.items():
        last = [r for r in rows if r["steps"] == STEPS[-1]]
        axes[0].loglog([r["dimension"] for r in last], [r[key] for r in last], marker="o", ms=3, label=label)
        mid = [r for r in rows if r["dimension"] == 1_000]
        axes[1].loglog([r["steps"] for r in mid], [r[key] for r in mid], marker="o", ms=3, label=label)
    for axis, name in zip(axes, (f"dimension ({STEPS[-1]} steps)", "steps (dimension 1000)"), strict=True):
        axis.axhline(1.0, color="black", lw=1)
        axis.set_xlabel(name)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("noise per entry / Gaussian's")
    axes[0].legend(frameon=False)
    figure.suptitle(f"a sum known to move by 1 in l2; ε = {epsilon:g}, δ = {delta:g}, q = {q:g}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
