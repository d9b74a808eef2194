"""`weightclip-study reproduce bias`: the clipping-bias example, clipping error, theorem check, tightness of bounds."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

import weightclip as wc

from ._bias import (
    ClippingErrorCurve,
    FactorRadii,
    FlatClip,
    PerLayerClip,
    bias_example,
    clipping_error_curve,
    plot_bias_example,
    plot_clipping_error,
    run_bias_trainers,
)
from ._output import versions
from ._runs import prepare
from ._theorem import plot_theorem, theorem_check
from ._tightness import Tightness, plot_tightness, tightness


def clipping_curves(
    datasets: tuple[str, ...] = ("dropout", "adult"), steps: int = 400
) -> dict[str, dict[str, ClippingErrorCurve]]:
    """Error of the clipped mean gradient, 500 records, for DP-SGD (as printed and flat) and for our factor radii.

    The radii are chosen so that every rule has the same total sensitivity: errors compare at equal noise only.
    """
    from weightclip.models import MLP

    total = 1.0  # of one record's whole gradient
    root = 2**0.5
    curves: dict[str, dict[str, ClippingErrorCurve]] = {}
    for dataset in datasets:
        prepared = prepare(dataset)
        rows = prepared.parts.train
        # every row projected to the unit ball, as a private model's input is: all rules see the same network
        X = torch.as_tensor(prepared.X[rows])
        X = X * (1 / X.norm(dim=1, keepdim=True).clamp(min=1.0))
        y = torch.as_tensor(prepared.y[rows])

        def factory(features: int = X.shape[1], classes: int = prepared.classes) -> torch.nn.Module:
            return MLP(features, (16,), classes)

        rules = {
            "DP-SGD, each layer clipped (as printed)": PerLayerClip(total / root),
            "DP-SGD, flat clipping": FlatClip(total),
            "factor radii": FactorRadii(root, total / 2, 1.0),
        }
        curves[dataset] = {
            name: clipping_error_curve(X, y, factory, rule, steps, records=500) for name, rule in rules.items()
        }
    return curves


def tightness_curves(dataset: str = "dropout", epochs: int = 8) -> dict[str, Tightness]:
    """Every bound over training, for weights only and for both factors bounded."""
    prepared = prepare(dataset)
    rows = prepared.parts.train
    X, y = prepared.X[rows], prepared.y[rows]
    radius = prepared.radius
    first, last = "layers.0", "layers.2"
    return {
        "weights only": tightness(
            X, y, wc.Bounds(weight_norm=2.0, input_radius=radius, bias_scale=0.5), epochs=epochs
        ),
        "factor radii": tightness(
            X, y,
            wc.Bounds(
                input_radius=radius, bias_scale=0.5, layer_radius={last: 1.0},
                cotangent_radius={first: 0.1, last: 0.3},
            ),
            epochs=epochs,
        ),
    }  # fmt: skip


def bias_figures(folder: Path, *, quick: bool = False, progress: Callable[[str], None] | None = None) -> list[Path]:
    """Write every figure of the clipping-bias part, with the numbers behind them as JSON and CSV."""
    folder.mkdir(parents=True, exist_ok=True)
    say = progress or (lambda line: None)
    written: list[Path] = []

    example = bias_example()
    runs = run_bias_trainers(records=20_000 if quick else 100_000)
    written.append(plot_bias_example(folder / "bias_example.png", runs))
    say(
        f"two-point example: norm {example.norm_at_optimum:.4f}, shift ({example.shift[0]:.5f}, {example.shift[1]:.5f})"
    )

    curves = clipping_curves(steps=60 if quick else 400)
    written.append(plot_clipping_error(folder / "clipping_error.png", curves))
    written.append(_write_curves(curves, folder / "clipping_error.csv"))
    say("clipping error on Dropout and Adult")

    rows = theorem_check(steps=200 if quick else 800)
    written.append(plot_theorem(folder / "theorem.png", rows))
    say("theorem check")

    tight = tightness_curves(epochs=1 if quick else 8)
    written.append(plot_tightness(folder / "tightness.png", tight))
    say("tightness of every bound")

    body: dict[str, Any] = {
        "command": "weightclip-study reproduce bias",
        "versions": versions(),
        "two_point_example": {
            **asdict(example),
            "trained_shift": [float(v) for v in runs.clipped[-1]],
            "trained_gradient_norm": runs.sample_gradient_norm,
            "weight_clipped_end": [float(v) for v in runs.weight_clipped[-1]],
            "sample_optimum": [float(v) for v in runs.sample_optimum],
            "records": runs.records,
        },
        "theorem": [asdict(row) for row in rows],
        "tightness": {
            name: {
                "bound_over_largest": _ratios(t, "max"),
                "bound_over_mean": _ratios(t, "mean"),
            }
            for name, t in tight.items()
        },
    }
    summary = folder / "bias.json"
    summary.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    return [*written, summary]


def _ratios(t: Tightness, what: str) -> dict[str, list[float]]:
    """Bound over measurement at the end, by layer."""
    pairs = {"input": t.input_bound, "cotangent": t.cotangent_bound, "gradient": t.sensitivity}
    result = {}
    for name, bound in pairs.items():
        measured = getattr(t, f"{name}_{what}")[-1]
        result[name] = [float(v) for v in np.round(bound[-1] / np.maximum(measured, 1e-12), 4)]
    return result


def _write_curves(curves: Mapping[str, Mapping[str, ClippingErrorCurve]], path: Path) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("dataset", "method", "iteration", "error", "clipped_norm", "true_norm", "fraction"))
        for dataset, by_method in curves.items():
            for method, c in by_method.items():
                for t in range(0, len(c.error), max(1, len(c.error) // 100)):
                    numbers = (c.error[t], c.clipped_norm[t], c.true_norm[t], c.fraction[t])
                    writer.writerow((dataset, method, t + 1, *(f"{v:.5g}" for v in numbers)))
    return path
