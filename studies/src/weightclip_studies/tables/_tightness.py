"""How tight every bound is over training: what is certified against what the records really do.

For each layer of a small network trained by the engine: the input bound X_k, the cotangent bound L_k (or R_k) and the
sensitivity Δ_k, each beside the largest and the mean of the quantity it bounds, over all training records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import weightclip as wc
from weightclip.losses import BCEWithLogits, Loss
from weightclip.models import MLP

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Tightness:
    """Bounds and measurements at some steps of one run; arrays are (steps x layers).

    Attributes:
        steps: At which it was measured.
        input_bound: a_k, the bound of ||(x, β)||.
        input_max: Largest over the records.
        input_mean: Mean over the records.
        cotangent_bound: Bound of ||δ||.
        cotangent_max: Largest.
        cotangent_mean: Mean.
        sensitivity: Δ_k.
        gradient_max: Largest norm of one record's bounded gradient: never above Δ_k.
        gradient_mean: Mean.
    """

    steps: Array
    input_bound: Array
    input_max: Array
    input_mean: Array
    cotangent_bound: Array
    cotangent_max: Array
    cotangent_mean: Array
    sensitivity: Array
    gradient_max: Array
    gradient_mean: Array


def tightness(
    X: Array,
    y: NDArray[np.int64],
    bounds: wc.Bounds,
    *,
    width: int = 16,
    cap: float | None = 0.3,
    noise_multiplier: float = 1.0,
    batches: int = 16,
    epochs: int = 8,
    learning_rate: float = 0.02,
    every: int = 4,
    seed: int = 0,
) -> Tightness:
    """Train a two-layer network on a binary task with the engine and measure every bound on the way.

    Formal guarantees: none for the result; it is read from raw records and is a figure, not a release.
    """
    inputs, targets = torch.as_tensor(X, dtype=torch.float32), torch.as_tensor(y, dtype=torch.float32)[:, None]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MLP(inputs.shape[1], (width,), 1)
    loss = BCEWithLogits(cap=cap)
    engine = wc.PrivacyEngine()
    model, optimizer, loader, criterion = engine.make_private(
        module=model, optimizer=torch.optim.Adam(model.parameters(), lr=learning_rate),
        data_loader=DataLoader(TensorDataset(inputs, targets), batch_size=max(1, len(inputs) // batches)),
        criterion=loss, noise_multiplier=noise_multiplier, bounds=bounds,
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    rows: list[tuple[int, list[list[float]]]] = []
    step = 0
    for _ in range(epochs):
        for x, t in loader:
            if step % every == 0:
                rows.append((step, _measure(engine, model, inputs, targets, loss, bounds)))
            optimizer.zero_grad()
            criterion(model(x), t).backward()
            optimizer.step()
            step += 1
    values = np.array([measured for _, measured in rows])  # steps x 9 x layers
    return Tightness(np.array([s for s, _ in rows], dtype=float), *(values[:, i] for i in range(9)))


def _measure(
    engine: wc.PrivacyEngine, model: torch.nn.Module, inputs: Tensor, targets: Tensor, loss: Loss, bounds: wc.Bounds
) -> list[list[float]]:
    """The nine rows of :class:`Tightness` at the present weights, by a forward and backward pass written out."""
    layers = [(path, m) for path, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    with torch.no_grad():
        first, last = (m for _, m in layers)
        radius = bounds.of("input_radius", "") or float("inf")
        x = inputs * (radius / inputs.norm(dim=1, keepdim=True).clamp(min=1e-12)).clamp(max=1.0)
        h = (x @ first.weight.T + first.bias).relu()
        cotangent = loss.gradient(h @ last.weight.T + last.bias, targets)
        factors = [(x, (cotangent @ last.weight) * (h > 0)), (h, cotangent)]
    certificate = {row.name: row for row in engine.certificate().rows}
    table: list[list[float]] = [[] for _ in range(9)]
    for k, (path, _) in enumerate(layers):
        beta = bounds.of("bias_scale", path) or 1.0
        x_norm = (factors[k][0].square().sum(1) + beta**2).sqrt().double()
        d_norm = factors[k][1].norm(dim=1).double()
        radius, cotangent_radius = bounds.of("layer_radius", path), bounds.of("cotangent_radius", path)
        row = certificate[path]
        a_k = (row.input_bound**2 + beta**2) ** 0.5
        a_k = min(a_k, radius) if radius else a_k
        L_k = min(row.cotangent_bound, cotangent_radius) if cotangent_radius else row.cotangent_bound
        bounded = x_norm.clamp(max=a_k) * d_norm.clamp(max=L_k)
        numbers = (a_k, x_norm.max(), x_norm.mean(), L_k, d_norm.max(), d_norm.mean(), row.sensitivity,
                   bounded.max(), bounded.mean())  # fmt: skip
        for column, number in zip(table, numbers, strict=True):
            column.append(float(number))
    return table


def plot_tightness(
    path: str | Path, curves: Mapping[str, Tightness], layers: Sequence[str] = ("first", "last")
) -> Path:
    """A row per run, a column per bound: bound (line), largest record (dashed) and mean record (dotted)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = (
        ("input factor", "input_bound", "input_max", "input_mean"),
        ("output factor", "cotangent_bound", "cotangent_max", "cotangent_mean"),
        ("gradient (Δ)", "sensitivity", "gradient_max", "gradient_mean"),
    )
    colours = ("#1f5fa8", "#c4372c")
    figure = Figure(figsize=(13.5, 0.8 + 2.9 * len(curves)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(curves), 3, squeeze=False)
    for i, (name, curve) in enumerate(curves.items()):
        for axis, (title, bound, largest, mean) in zip(axes[i], columns, strict=True):
            for k, layer in enumerate(layers):
                for values, style, what in ((bound, "-", "bound"), (largest, "--", "largest"), (mean, ":", "mean")):
                    axis.plot(curve.steps, getattr(curve, values)[:, k], style, color=colours[k], linewidth=1.7,
                              label=f"{layer} layer, {what}")  # fmt: skip
            ratio = getattr(curve, bound)[-1] / np.maximum(getattr(curve, mean)[-1], 1e-12)
            text = ", ".join(f"{layer} {r:.1f}×" for layer, r in zip(layers, ratio, strict=True))
            axis.set_yscale("log")
            axis.set_title(f"{name}: {title}\nbound / mean at the end: {text}", fontsize=9.5)
            axis.spines[["top", "right"]].set_visible(False)
            axis.grid(color="#eceef1", linewidth=0.7)
            if i == len(curves) - 1:
                axis.set_xlabel("step")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=6, frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)
    return Path(path)
