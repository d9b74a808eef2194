"""How tight the chains in p = 1, 2, inf are on trained networks, and whether Hoelder's combination ever helps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weightclip.bounds import Numerics
from weightclip.certificate import Bounds, build_plan
from weightclip.losses import recognise

from ._files import markdown, write_csv
from ._networks import convnet, digits, mlp, record_norms, table, train

EXPONENTS = (1, 2, math.inf)


def tightness(model: nn.Module, x: Tensor, y: Tensor) -> list[dict[str, Any]]:
    """Per layer: certified sensitivity in each exponent over the largest gradient norm of any record."""
    exact = {path: float(v.max()) for path, v in record_norms(model, x, y).items()}
    loss, deltas, cotangents = recognise(nn.CrossEntropyLoss()), {}, {}
    for p in EXPONENTS:
        plan = build_plan(model, loss, Bounds(input_radius=1.0, p=p), x[:1])
        found = plan.evaluate(Numerics())
        deltas[p] = {path: float(e.sensitivity) for path, e in found.items()}
        cotangents[p] = {path: float(e.cotangent) for path, e in found.items()}
    rows = []
    for path, largest in exact.items():
        # the chain in inf bounds the l1 norm of the cotangent, the chain in 1 its l_inf norm
        hoelder = math.sqrt(cotangents[math.inf][path] * cotangents[1][path]) / cotangents[2][path]
        ratios = {f"p={p:g}": deltas[p][path] / largest for p in EXPONENTS}
        rows.append({"layer": path, "largest_gradient": largest, **ratios, "hoelder/p=2": hoelder})
    return rows


def norms_study(out: Path, *, datasets: tuple[str, ...] = ("adult", "dropout", "nursery"), records: int = 512,
                steps: int = 300) -> list[Path]:  # fmt: skip
    """results/method/norms.csv, .md and .png."""
    rows: list[dict[str, Any]] = []

    def measure(
        name: str, network: str, model: nn.Module, x: Tensor, y: Tensor, limit: float | None, lr: float
    ) -> None:
        train(model, x, y, steps=steps, limit=limit, lr=lr)
        weights = "free" if limit is None else f"clipped to {limit:g}"
        for row in tightness(model, x[:records], y[:records]):
            rows.append({"data": name, "network": network, "weights": weights, **row})

    for name in datasets:
        x, y, classes = table(name)
        for hidden in ((16,), (32, 32)):
            for limit in (None, 1.0):
                measure(name, f"MLP {hidden}", mlp(x.shape[1], classes, hidden), x, y, limit, 1e-2)
    x, y = digits(12)
    for limit in (None, 1.0):
        measure("digits", "ConvNet (small)", convnet(True), x, y, limit, 3e-3)
    text = (
        "# Tightness of the chains in p = 1, 2, inf on trained networks\n\n"
        "Certified sensitivity over the largest gradient norm of any record (1 would be exact). `hoelder/p=2` is\n"
        "sqrt(L1 Linf)/L2 for the cotangent: below 1 it would help. It cannot: every gain satisfies\n"
        "c2 <= sqrt(c1 cinf), and Cauchy-Schwarz over paths carries this to whole graphs.\n\n"
    )
    path = out / "norms.md"
    files = [write_csv(out / "norms.csv", rows), path, _figure(rows, out / "norms.png")]
    path.write_text(text + markdown(rows) + "\n" + markdown(summary(rows)))
    return files


def summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Median over layers and data sets of each kind of network, with the smallest and the largest."""
    found = []
    for kind in dict.fromkeys((r["network"].split()[0], r["weights"]) for r in rows):
        line: dict[str, str] = {"network": kind[0], "weights": kind[1]}
        for column in (*(f"p={p:g}" for p in EXPONENTS), "hoelder/p=2"):
            values = [float(r[column]) for r in rows if (r["network"].split()[0], r["weights"]) == kind]
            line[column] = f"{statistics.median(values):.2g} ({min(values):.2g}–{max(values):.4g})"
        found.append(line)
    return found


def _figure(rows: list[dict[str, Any]], path: Path) -> Path:
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 3.6))
    for i, p in enumerate(EXPONENTS):
        for weights, marker in (("free", "o"), ("clipped to 1", "s")):
            values = torch.tensor([r[f"p={p:g}"] for r in rows if r["weights"] == weights])
            places = i + 0.18 * (marker == "s") - 0.09 + torch.linspace(-0.05, 0.05, len(values))
            axis.scatter(places, values, s=16, marker=marker, label=weights if i == 0 else None,
                         color="tab:blue" if marker == "o" else "tab:orange")  # fmt: skip
    axis.set_yscale("log")
    axis.set_xticks(range(3), [f"p = {p:g}" for p in EXPONENTS])
    axis.set_ylabel("certified Δ / largest gradient")
    axis.axhline(1, color="black", lw=1)
    axis.legend(frameon=False)
    axis.grid(alpha=0.3, axis="y")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
