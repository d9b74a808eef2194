"""How far a clipped mean gradient is from the true one, over training (appendix "Gradient clipping behavior").

A dense layer's gradient for one record is delta (x) (x, beta), so its norm is a product of two norms and every way of
bounding it is one number per record and layer: nothing per-sample is formed. Dense networks only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from weightclip.errors import WeightclipError

Array = NDArray[np.float64]
Factors = tuple[Tensor, Tensor]
"""One layer's (delta, x): cotangents (records x out) and inputs (records x in)."""


class ClipRule(Protocol):
    """A way to bound what one record contributes."""

    def scales(self, factors: Sequence[Factors]) -> list[Tensor]:
        """Per layer, the number in [0, 1] that multiplies each record's gradient."""
        ...

    def sensitivity(self, layers: int) -> float:
        """Bound on one record's whole scaled gradient, the bias block times ``beta``."""
        ...


def _shrink(norm: Tensor, radius: float) -> Tensor:
    return (radius / norm.clamp_min(1e-30)).clamp_max(1.0)


def _rows(x: Tensor, beta: float = 1.0) -> Tensor:
    return (x.square().sum(1) + beta**2).sqrt()


@dataclass(frozen=True)
class PerLayerClip:
    """Algorithm 2 as printed: each layer's gradient is clipped to ``norm``."""

    norm: float

    def scales(self, factors: Sequence[Factors]) -> list[Tensor]:
        return [_shrink(delta.norm(dim=1) * _rows(x), self.norm) for delta, x in factors]

    def sensitivity(self, layers: int) -> float:
        return self.norm * math.sqrt(layers)


@dataclass(frozen=True)
class FlatClip:
    """DP-SGD as practitioners run it: the whole gradient is clipped to ``norm``."""

    norm: float

    def scales(self, factors: Sequence[Factors]) -> list[Tensor]:
        squares = [(delta.norm(dim=1) * _rows(x)).square() for delta, x in factors]
        return [_shrink(torch.stack(squares).sum(0).sqrt(), self.norm)] * len(factors)

    def sensitivity(self, layers: int) -> float:
        return self.norm


@dataclass(frozen=True)
class FactorRadii:
    """Both factors bounded (SOUNDNESS section 4): (x, beta) rescaled to at most X_k, delta to at most R_k.

    Attributes:
        input_radius: X_k.
        cotangent_radius: R_k; ``math.inf`` leaves the cotangents alone.
        bias_scale: beta.
    """

    input_radius: float
    cotangent_radius: float
    bias_scale: float = 1.0

    def scales(self, factors: Sequence[Factors]) -> list[Tensor]:
        return [
            _shrink(_rows(x, self.bias_scale), self.input_radius) * _shrink(delta.norm(dim=1), self.cotangent_radius)
            for delta, x in factors
        ]

    def sensitivity(self, layers: int) -> float:
        return self.input_radius * self.cotangent_radius * math.sqrt(layers)


@dataclass(frozen=True)
class PerLayerRule:
    """Any function of one layer's factors: ``scale(delta, x)`` gives each record's multiplier. For noiseless runs."""

    scale: Callable[[Tensor, Tensor], Tensor]

    def scales(self, factors: Sequence[Factors]) -> list[Tensor]:
        return [self.scale(delta, x) for delta, x in factors]

    def sensitivity(self, layers: int) -> float:
        return math.nan


@dataclass(frozen=True)
class ClippingErrorCurve:
    """Per iteration t, on fixed records, all layers together (and apart in the ``layer_`` arrays, t x K).

    Attributes:
        error: ||g - clip(g)||, g the mean gradient and clip(g) the mean of the bounded gradients.
        clipped_norm: ||clip(g)||.
        true_norm: ||g||.
        fraction: Share of (record, layer) pairs whose gradient was scaled down.
        loss: Mean loss on the records.
        layer_error: ||g_k - clip(g)_k||.
        layer_clipped_norm: ||clip(g)_k||.
        sensitivity: Bound on one record's whole bounded gradient (inf or nan: none). Errors compare at equal ones only.
    """

    error: Array
    clipped_norm: Array
    true_norm: Array
    fraction: Array
    loss: Array
    layer_error: Array
    layer_clipped_norm: Array
    sensitivity: float


def dense_factors(
    model: nn.Module, inputs: Tensor, targets: Tensor, loss: Callable[[Tensor, Tensor], Tensor]
) -> tuple[list[Factors], Tensor]:
    """Every dense layer's (delta, x) on a batch, and the loss per record."""
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    if sum(p.numel() for m in layers for p in m.parameters()) != sum(p.numel() for p in model.parameters()):
        raise WeightclipError("clipping_error_curve takes networks whose only parameters are in nn.Linear layers")
    seen: list[tuple[Tensor, Tensor]] = []

    def record(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        seen.append((args[0].detach(), output))

    hooks = [m.register_forward_hook(record) for m in layers]
    try:
        values = loss(model(inputs), targets)
    finally:
        for handle in hooks:
            handle.remove()
    deltas = torch.autograd.grad(values.sum(), [out for _, out in seen])
    return [(delta, x) for delta, (x, _) in zip(deltas, seen, strict=True)], values.detach()


def _summed(factors: Sequence[Factors], scales: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Per layer, the scaled sums of the weight's and the bias's gradients."""
    return [
        ((delta * s[:, None]).T @ x, (delta * s[:, None]).sum(0)) for (delta, x), s in zip(factors, scales, strict=True)
    ]


def clipping_error_curve(
    X: Tensor,
    y: Tensor,
    model_factory: Callable[[], nn.Module],
    clip: float | ClipRule | Callable[[Tensor, Tensor], Tensor],
    steps: int,
    *,
    records: int = 500,
    batch_size: int = 256,
    learning_rate: float = 1e-2,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
    noise_multiplier: float = 0.0,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    seed: int = 0,
) -> ClippingErrorCurve:
    """Train with bounded gradients and record, at every step, the error this causes on fixed records.

    Formal guarantees: none; the curve itself is computed from raw gradients and is a figure, not a release.

    Args:
        X: Training inputs (n x d).
        y: Training targets.
        model_factory: Makes the dense network; called once, under ``seed``.
        clip: A number (each layer clipped to it, as in Algorithm 2), a :class:`ClipRule`, or a function of one layer's
            (delta, x) that returns each record's multiplier.
        steps: Steps of training, one point each.
        records: How many records the error is averaged over (500 in the paper).
        batch_size: Expected size of the Poisson batches trained on.
        learning_rate: Of the optimiser.
        optimizer: Factory ``(parameters, lr=)``.
        noise_multiplier: sigma of the noise on the training gradients; 0 as in the paper's definition.
        loss: Loss per record; cross-entropy by default.
        seed: Of weights, measured records, batches and noise.

    Returns:
        The curve.
    """
    if isinstance(clip, (int, float)):
        rule: ClipRule = PerLayerClip(float(clip))
    else:
        rule = clip if hasattr(clip, "scales") else PerLayerRule(clip)  # type: ignore[assignment,arg-type]
    loss = loss or (lambda z, t: nn.functional.cross_entropy(z, t, reduction="none"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_factory()
    generator = torch.Generator().manual_seed(seed)
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    descent = optimizer(model.parameters(), lr=learning_rate)
    measured = torch.randperm(len(X), generator=generator)[:records]
    sensitivity = rule.sensitivity(len(layers))
    if noise_multiplier and not math.isfinite(sensitivity):
        raise WeightclipError("this clip has no finite sensitivity to scale noise by: use noise_multiplier=0")
    std = noise_multiplier * sensitivity if noise_multiplier else 0.0
    beta = getattr(rule, "bias_scale", 1.0)
    rows: list[tuple[list[float], list[float], list[float], float, float]] = []
    for _ in range(steps):
        factors, values = dense_factors(model, X[measured], y[measured], loss)
        scales = rule.scales(factors)
        true = [torch.cat([w, b[:, None]], 1) / len(measured) for w, b in _summed(factors, [s * 0 + 1 for s in scales])]
        kept = [torch.cat([w, b[:, None]], 1) / len(measured) for w, b in _summed(factors, scales)]
        rows.append(
            (
                [float((g - c).norm()) for g, c in zip(true, kept, strict=True)],
                [float(c.norm()) for c in kept],
                [float(g.norm()) for g in true],
                float((torch.stack(scales) < 1).double().mean()),
                float(values.mean()),
            )
        )
        batch = (torch.rand(len(X), generator=generator) < batch_size / len(X)).nonzero().flatten()
        factors, _ = dense_factors(model, X[batch], y[batch], loss)
        for layer, (weight, bias) in zip(layers, _summed(factors, rule.scales(factors)), strict=True):
            noise_w, noise_b = (std * torch.randn(g.shape, generator=generator).to(g) for g in (weight, bias))
            layer.weight.grad = (weight + noise_w) / batch_size
            if layer.bias is not None:
                layer.bias.grad = (bias + noise_b / beta) / batch_size
        descent.step()
    error, kept_norm, true_norm = (np.array([row[i] for row in rows]) for i in range(3))
    return ClippingErrorCurve(
        error=np.linalg.norm(error, axis=1),
        clipped_norm=np.linalg.norm(kept_norm, axis=1),
        true_norm=np.linalg.norm(true_norm, axis=1),
        fraction=np.array([row[3] for row in rows]),
        loss=np.array([row[4] for row in rows]),
        layer_error=error,
        layer_clipped_norm=kept_norm,
        sensitivity=sensitivity,
    )


def plot_clipping_error(path: str | Path, curves: Mapping[str, Mapping[str, ClippingErrorCurve]]) -> Path:
    """Draw ``curves[data set][method]``: a column per data set, a row per method, as in the paper blue and red.

    Returns:
        The path written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    methods = list(dict.fromkeys(method for by_method in curves.values() for method in by_method))
    figure = Figure(figsize=(5.2 * len(curves), 0.7 + 2.7 * len(methods)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(methods), len(curves), squeeze=False, sharex="col", sharey="col")
    for column, (dataset, by_method) in enumerate(curves.items()):
        for row, method in enumerate(methods):
            axis = axes[row][column]
            axis.set_title(f"{dataset}: {method}", fontsize=11)
            axis.spines[["top", "right"]].set_visible(False)
            axis.grid(axis="y", color="#e4e6ea", linewidth=0.8)
            if row == len(methods) - 1:
                axis.set_xlabel("training iteration")
            if column == 0:
                axis.set_ylabel("norm of the mean")
            if method not in by_method:
                axis.set_axis_off()
                continue
            curve = by_method[method]
            t = np.arange(1, len(curve.error) + 1)
            axis.plot(t, curve.error, color="#1f5fa8", linewidth=1.6, label="error  g − clip(g)")
            axis.plot(t, curve.clipped_norm, color="#c4372c", linewidth=1.6, label="update  clip(g)")
            share = f"{curve.fraction[-1]:.0%} scaled down at the end"
            if math.isfinite(curve.sensitivity):
                share += f"; sensitivity {curve.sensitivity:.2g}"
            axis.text(0.98, 0.93, share, transform=axis.transAxes, ha="right", fontsize=9, color="#555555")
        top = max(float(max(c.error.max(), c.clipped_norm.max())) for c in by_method.values())
        axes[0][column].set_ylim(0, 1.12 * top)  # shared by the column
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False)
    figure.savefig(path, dpi=150)
    return Path(path)
