"""The bias of gradient clipping: the paper's two-point regression example, by quadrature and by training.

The error of the clipped mean gradient over training is in ``_clip_error``.

Appendix "Avoiding the bias of gradient clipping" of [Barczewski2025]: x is uniform on [0, 1], y = a x + b + e with
e = 9 (probability 0.1) or e = -1 (probability 0.9), the loss is (theta_1 x + theta_2 - y)^2. Every per-record gradient
is 2 r (x, 1) with the residual r = u x + v - e, where (u, v) = theta - (a, b) is the shift from the optimum.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import integrate, optimize

from ._clip_error import ClippingErrorCurve as ClippingErrorCurve
from ._clip_error import FactorRadii as FactorRadii
from ._clip_error import FlatClip as FlatClip
from ._clip_error import PerLayerClip as PerLayerClip
from ._clip_error import PerLayerRule as PerLayerRule
from ._clip_error import clipping_error_curve as clipping_error_curve
from ._clip_error import plot_clipping_error as plot_clipping_error

Array = NDArray[np.float64]

ERRORS = ((9.0, 0.1), (-1.0, 0.9))
"""The two values of the error e and their probabilities; the mean is 0."""

PRINTED_NORM = 0.7791
PRINTED_SHIFT = (0.01765, 0.94221)
"""As printed. The magnitudes are right; the signs are not: see :class:`BiasExample`."""


@dataclass(frozen=True)
class BiasExample:
    """The example's numbers, by quadrature.

    Attributes:
        gradient_at_optimum: Mean clipped gradient at theta = (a, b); without clipping it is zero.
        norm_at_optimum: Its norm, 0.7791 in the paper.
        shift: Where the mean clipped gradient vanishes, relative to (a, b). Negative in both coordinates: clipping
            mutes the rare large positive errors, so the fit follows the frequent small negative ones.
        residual: Norm of the mean clipped gradient there.
        printed_shift: The shift the paper prints, with positive signs.
        norm_at_printed_shift: Norm of the mean clipped gradient there: not zero.
        excess_loss: Mean squared error at the shift above that at the optimum.
    """

    gradient_at_optimum: tuple[float, float]
    norm_at_optimum: float
    shift: tuple[float, float]
    residual: float
    printed_shift: tuple[float, float]
    norm_at_printed_shift: float
    excess_loss: float


@dataclass(frozen=True)
class BiasTrajectories:
    """Noiseless runs on one large sample; each path holds theta - (a, b), one row per step.

    Attributes:
        clipped: Path of gradient descent on clipped gradients.
        weight_clipped: Path of gradient descent with the weights kept in the ball of radius C.
        sample_optimum: Least-squares optimum of the sample, relative to (a, b).
        sample_gradient_norm: Norm of the sample's mean clipped gradient at the end of ``clipped``: converged if tiny.
        records: Size of the sample.
    """

    clipped: Array
    weight_clipped: Array
    sample_optimum: Array
    sample_gradient_norm: float
    records: int


def mean_clipped_gradient(shift: tuple[float, float] | Array, clip: float = 1.0) -> Array:
    """Population mean of clip_C(gradient) at theta = (a, b) + shift, by adaptive quadrature (``clip=inf``: none)."""
    u, v = float(shift[0]), float(shift[1])

    def integrand(x: float, e: float) -> Array:
        r = 2 * (u * x + v - e)
        size = abs(r) * np.hypot(x, 1.0)
        return r * min(1.0, clip / size if size > 0 else 1.0) * np.array([x, 1.0])

    total = np.zeros(2)
    for e, probability in ERRORS:
        # the integrand has kinks where the residual vanishes; adaptive bisection finds them
        value = integrate.quad_vec(lambda x, e=e: integrand(x, e), 0.0, 1.0, epsabs=1e-12, epsrel=1e-12)[0]
        total += probability * value
    return total


def bias_example(clip: float = 1.0) -> BiasExample:
    """Solve the appendix's example: the clipped mean gradient at the optimum, and where it vanishes instead."""
    at_optimum = mean_clipped_gradient((0.0, 0.0), clip)
    solution = optimize.root(lambda s: mean_clipped_gradient(s, clip), -np.sign(at_optimum) * 0.9, tol=1e-12)
    u, v = (float(s) for s in solution.x)
    return BiasExample(
        gradient_at_optimum=(float(at_optimum[0]), float(at_optimum[1])),
        norm_at_optimum=float(np.linalg.norm(at_optimum)),
        shift=(u, v),
        residual=float(np.linalg.norm(mean_clipped_gradient((u, v), clip))),
        printed_shift=PRINTED_SHIFT,
        norm_at_printed_shift=float(np.linalg.norm(mean_clipped_gradient(PRINTED_SHIFT, clip))),
        excess_loss=u * u / 3 + u * v + v * v,  # E[(u x + v)^2]; the cross term with e has mean 0
    )


def run_bias_trainers(
    *,
    slope: float = 1.0,
    intercept: float = 2.0,
    records: int = 100_000,
    steps: int = 800,
    learning_rate: float = 0.3,
    clip: float = 1.0,
    weight_norm: float = 10.0,
    start: tuple[float, float] = (1.3, 1.2),
    seed: int = 0,
) -> BiasTrajectories:
    """Train on a sample of the example's distribution with clipped gradients and with clipped weights, without noise.

    Args:
        slope: a.
        intercept: b.
        records: Size of the sample; its own optimum is about 3 / sqrt(records) away from (a, b).
        steps: Full-batch steps of both trainers.
        learning_rate: Of both.
        clip: Bound on each record's gradient (first trainer).
        weight_norm: Radius C of the ball ||theta||_2 <= C (second trainer), which should contain (a, b).
        start: Where both start, relative to (a, b).
        seed: Of the sample.

    Returns:
        Both paths.
    """
    rng = np.random.default_rng(seed)
    x = rng.uniform(size=records)
    e = np.where(rng.uniform(size=records) < ERRORS[0][1], ERRORS[0][0], ERRORS[1][0])
    truth = np.array([slope, intercept])
    y = slope * x + intercept + e
    row_norm = 2 * np.hypot(x, 1.0)
    design = np.stack([x, np.ones_like(x)], axis=1)

    def mean_gradient(theta: Array, bound: float) -> Array:
        r = theta[0] * x + theta[1] - y
        if np.isfinite(bound):
            r = np.clip(r, -bound / row_norm, bound / row_norm)  # clip_C(2 r (x, 1)) for a row of known norm
        return 2 * (design.T @ r) / records

    def descend(bound: float, radius: float) -> Array:
        theta = truth + np.asarray(start, dtype=float)
        path = [theta - truth]
        for _ in range(steps):
            theta = theta - learning_rate * mean_gradient(theta, bound)
            theta = theta * min(1.0, radius / max(float(np.linalg.norm(theta)), 1e-300))
            path.append(theta - truth)
        return np.array(path)

    clipped, weight_clipped = descend(clip, np.inf), descend(np.inf, weight_norm)
    return BiasTrajectories(
        clipped=clipped,
        weight_clipped=weight_clipped,
        sample_optimum=np.asarray(np.linalg.lstsq(design, y, rcond=None)[0] - truth, dtype=np.float64),
        sample_gradient_norm=float(np.linalg.norm(mean_gradient(clipped[-1] + truth, clip))),
        records=records,
    )


def plot_bias_example(path: str | Path, trajectories: BiasTrajectories | None = None) -> Path:
    """Draw the mean gradient and the mean clipped gradient around the optimum, and where each trainer ends.

    Args:
        path: File to write (PNG, SVG or PDF by its suffix).
        trajectories: Runs to draw; by default :func:`run_bias_trainers` is run.

    Returns:
        The path written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs = run_bias_trainers() if trajectories is None else trajectories
    example = bias_example()
    u, v = np.meshgrid(np.linspace(-2, 2, 61), np.linspace(-2, 2, 61))
    nodes, weights = np.polynomial.legendre.leggauss(48)
    x, w = (nodes + 1) / 2, weights / 2

    def field(clip: float) -> tuple[Array, Array]:
        g = np.zeros((2, *u.shape))
        for e, probability in ERRORS:
            r = u[..., None] * x + v[..., None] - e
            if np.isfinite(clip):
                bound = clip / (2 * np.hypot(x, 1.0))
                r = np.clip(r, -bound, bound)
            g += probability * np.stack([(2 * r * x * w).sum(-1), (2 * r * w).sum(-1)])
        return g[0], g[1]

    figure = Figure(figsize=(11, 5.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2, sharey=True)
    panels = (
        ("Mean gradient (weight clipping)", np.inf, runs.weight_clipped, "#1f5fa8", "weight-clipped descent"),
        ("Mean clipped gradient, C = 1 (gradient clipping)", 1.0, runs.clipped, "#c4372c", "clipped-gradient descent"),
    )
    for axis, (title, clip, walk, colour, label) in zip(axes, panels, strict=True):
        gx, gy = field(clip)
        axis.streamplot(u, v, -gx, -gy, color="#b9bec6", linewidth=0.8, density=0.9, arrowsize=0.9)
        axis.plot(*walk.T, color=colour, linewidth=2.2, label=label, zorder=3)
        axis.plot(*walk[0], "o", color=colour, markersize=6, markerfacecolor="white", zorder=4)
        axis.plot(0, 0, "*", color="#222222", markersize=16, zorder=5, label="optimum (a, b)", linestyle="none")
        axis.plot(
            *example.shift, "X", color="#e08a00", markersize=11, markeredgecolor="white", zorder=5, linestyle="none",
            label=f"clipped mean gradient is 0: ({example.shift[0]:.5f}, {example.shift[1]:.5f})",
        )  # fmt: skip
        axis.set(title=title, xlabel=r"$\theta_1 - a$  (slope)", xlim=(-2, 2), ylim=(-2, 2), aspect="equal")
        axis.legend(loc="upper left", fontsize=8.5, framealpha=0.95)
    axes[0].set_ylabel(r"$\theta_2 - b$  (intercept)")
    axes[1].annotate(
        f"norm {example.norm_at_optimum:.4f}\nat the optimum", (0, 0), (-1.75, 0.3), fontsize=9,
        arrowprops={"arrowstyle": "-", "color": "#555555", "shrinkB": 7}, bbox={"fc": "white", "ec": "#cccccc"},
    )  # fmt: skip
    figure.suptitle(
        "Clipping gradients moves the solution towards the frequent small errors; clipping weights does not"
    )
    figure.savefig(path, dpi=150)
    return Path(path)
