"""Does ClipWeights find the constrained optimum? Noiseless runs of every variant on convex problems.

Theorem 2 of [Barczewski2025] says that a point to which noiseless Lip-DP-SGD converges is a local optimum over the
ball {||W|| <= C}. Where rescaling stops, the gradient is parallel to the weights, W - eta G = s W: the Lagrange
condition of the paper's own proof, and the optimality condition of the *Frobenius* ball. The spectral ball is only
touched along the leading singular vectors, and rescaling shrinks all the others for nothing. So the theorem holds where
rescaling is the projection (Frobenius norm, or a weight with a single row) and fails for p = 2 (SOUNDNESS section 2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

Strategy = Callable[[Tensor, float, Callable[[Tensor], Tensor]], Any]
"""``strategy(weight, C, norm)`` brings the weight under the bound in place, as in :mod:`weightclip.bounds`."""


class Ball(Protocol):
    """A unit ball of matrices."""

    @property
    def name(self) -> str:
        """A word for tables."""
        ...

    def norm(self, weight: Tensor) -> Tensor:
        """Its norm."""
        ...

    def dual(self, weight: Tensor) -> Tensor:
        """The dual norm: the largest inner product with a member of the ball."""
        ...

    def project(self, weight: Tensor, radius: float) -> Tensor:
        """Nearest point of the ball of that radius."""
        ...


@dataclass(frozen=True)
class SpectralBall:
    """Largest singular value at most C: the ball of the paper's p = 2."""

    name: str = "spectral"

    def norm(self, weight: Tensor) -> Tensor:
        return torch.linalg.matrix_norm(weight, 2)

    def dual(self, weight: Tensor) -> Tensor:
        return torch.linalg.matrix_norm(weight, "nuc")

    def project(self, weight: Tensor, radius: float) -> Tensor:
        u, s, vh = torch.linalg.svd(weight, full_matrices=False)
        return (u * s.clamp_max(radius)) @ vh


@dataclass(frozen=True)
class FrobeniusBall:
    """Root of the sum of squares at most C: here rescaling is the projection."""

    name: str = "Frobenius"

    def norm(self, weight: Tensor) -> Tensor:
        return torch.linalg.matrix_norm(weight)

    def dual(self, weight: Tensor) -> Tensor:
        return torch.linalg.matrix_norm(weight)

    def project(self, weight: Tensor, radius: float) -> Tensor:
        return weight * (radius / self.norm(weight).clamp_min(1e-300)).clamp_max(1.0)


@dataclass(frozen=True)
class ConvexProblem:
    """Minimise a smooth convex function of a matrix over a ball.

    Attributes:
        name: Short label.
        objective: The function, differentiable by autograd.
        shape: Shape of the matrix.
        radius: C.
        smoothness: Lipschitz constant of the gradient; steps are at most its inverse.
        ball: The constraint.
    """

    name: str
    objective: Callable[[Tensor], Tensor]
    shape: tuple[int, int]
    radius: float
    smoothness: float
    ball: Ball

    def gradient(self, weight: Tensor) -> Tensor:
        leaf = weight.detach().requires_grad_()
        return torch.autograd.grad(self.objective(leaf), leaf)[0]

    def gap(self, weight: Tensor) -> float:
        """Upper bound of objective(weight) - optimum for any admissible weight (Frank-Wolfe duality gap)."""
        g = self.gradient(weight)
        return float((g * weight).sum() + self.radius * self.ball.dual(g))


@dataclass(frozen=True)
class TheoremRow:
    """One variant on one problem.

    Attributes:
        problem: Name of the problem.
        ball: Name of its constraint.
        strategy: Name of the ClipWeights variant.
        value: Objective where the variant ended.
        optimum: Reference optimum.
        excess: value - optimum.
        reference_gap: Certified accuracy of the reference.
        distance: Frobenius distance from the reference optimum (softmax has several: shifting all logits is free).
        norm: Norm of the final weights in units of C.
        movement: Length of the last step in units of C: converged if tiny.
        singular_values: Of the final weights.
        optimal_singular_values: Of the reference.
        converged: The run came to rest.
        optimal: It came to rest at an optimum; Theorem 2 says it always does.
    """

    problem: str
    ball: str
    strategy: str
    value: float
    optimum: float
    excess: float
    reference_gap: float
    distance: float
    norm: float
    movement: float
    singular_values: tuple[float, ...]
    optimal_singular_values: tuple[float, ...]
    converged: bool
    optimal: bool


def diagonal_problem() -> ConvexProblem:
    """min ||W - diag(3, .5)||_F^2 over ||W||_2 <= 1: optimum diag(1, .5); rescaling stops at diag(1, 1/6).

    With G = 2 (W - A), W = diag(1, w) is a fixed point of rescaling when (1 + 4 eta) w = w + 2 eta (.5 - w): w = 1/6.
    """
    A = torch.diag(torch.tensor([3.0, 0.5], dtype=torch.double))
    return ConvexProblem("diag(3, .5)", lambda W: (W - A).square().sum(), (2, 2), 1.0, 2.0, SpectralBall())


def default_problems() -> list[ConvexProblem]:
    """The diagonal instance, regressions and classifications, with the constraint active or not."""
    g = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.double)

    X = randn(200, 5)
    smooth = float(torch.linalg.eigvalsh(X.T @ X / 200)[-1])
    # a teacher with singular values 3, 1 and .4: the ball of radius 1 binds in one direction, or in all but one
    basis_out, basis_in = torch.linalg.qr(randn(3, 3))[0], torch.linalg.qr(randn(5, 3))[0]
    teacher = basis_out @ torch.diag(torch.tensor([3.0, 1.0, 0.4], dtype=torch.double)) @ basis_in.T
    Y = X @ teacher.T + 0.1 * randn(200, 3)
    labels = (2 * X @ teacher.T + 0.5 * randn(200, 3)).argmax(1)
    sign = (X @ teacher[0] > 0).double()

    def least_squares(W: Tensor) -> Tensor:
        return (X @ W.T - Y).square().sum() / 400

    def softmax(W: Tensor) -> Tensor:
        return F.cross_entropy(X @ W.T, labels)

    def logistic(W: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits((X @ W.T)[:, 0], sign)

    spectral, frobenius = SpectralBall(), FrobeniusBall()
    return [
        diagonal_problem(),
        ConvexProblem("regression", least_squares, (3, 5), 1.0, smooth, spectral),
        ConvexProblem("3-class softmax", softmax, (3, 5), 2.0, smooth / 2, spectral),
        ConvexProblem("regression, optimum inside", least_squares, (3, 5), 5.0, smooth, spectral),
        ConvexProblem("logistic, one row", logistic, (1, 5), 2.0, smooth / 4, spectral),
        ConvexProblem("regression, Frobenius ball", least_squares, (3, 5), 1.0, smooth, frobenius),
        ConvexProblem("3-class softmax, Frobenius ball", softmax, (3, 5), 2.0, smooth / 2, frobenius),
    ]


def default_strategies(ball: Ball) -> dict[str, Strategy]:
    """The variants of :mod:`weightclip.bounds` that suit a ball; those through singular values: the spectral one."""
    from weightclip.bounds import Bjorck, Rescale, SpectralProjection, Sphere

    radial: dict[str, Strategy] = {"rescale (paper)": Rescale(), "sphere (Fix-Lip)": Sphere()}
    if not isinstance(ball, SpectralBall):
        return radial
    return radial | {"projection": SpectralProjection(), "Björck": Bjorck()}


def reference_optimum(problem: ConvexProblem, tolerance: float = 1e-10, limit: int = 100_000) -> Tensor:
    """Accelerated projected gradient descent in float64, stopped by a duality gap that certifies it.

    Raises:
        RuntimeError: If the gap does not fall below ``tolerance``.
    """
    W = torch.zeros(problem.shape, dtype=torch.double)
    V, t = W, 1.0
    for i in range(limit):
        new = problem.ball.project(V - problem.gradient(V) / problem.smoothness, problem.radius)
        # restart the momentum when it points uphill: linear convergence on strongly convex problems
        t_next = (1 + math.sqrt(1 + 4 * t * t)) / 2 if ((V - new) * (new - W)).sum() <= 0 else 1.0
        V = new + ((t - 1) / t_next) * (new - W) if t_next > 1 else new
        W, t = new, t_next
        if i % 50 == 0 and problem.gap(W) < tolerance:
            return W
    raise RuntimeError(f"reference for {problem.name!r}: duality gap {problem.gap(W):.1e} after {limit} steps")


def run_variant(
    problem: ConvexProblem,
    strategy: Strategy,
    *,
    steps: int = 800,
    relative_step: float = 0.5,
    start: Tensor | None = None,
) -> list[Tensor]:
    """Noiseless Lip-DP-SGD on a full batch: a gradient step of ``relative_step / smoothness``, then ClipWeights.

    Returns:
        The weights after every step, the starting point (clipped) first.
    """
    if start is None:
        start = 0.1 * torch.randn(problem.shape, generator=torch.Generator().manual_seed(1), dtype=torch.double)
    W = start.clone()
    strategy(W, problem.radius, problem.ball.norm)
    path = [W.clone()]
    for _ in range(steps):
        W = W - relative_step / problem.smoothness * problem.gradient(W)
        strategy(W, problem.radius, problem.ball.norm)
        path.append(W.clone())
    return path


def theorem_check(
    problems: Sequence[ConvexProblem] | None = None,
    strategies: Callable[[Ball], Mapping[str, Strategy]] | None = None,
    *,
    steps: int = 800,
) -> list[TheoremRow]:
    """Run every variant on every problem against the certified reference optimum.

    Args:
        problems: :func:`default_problems` by default.
        strategies: The variants for a ball; :func:`default_strategies` by default.
        steps: Gradient steps of each run.

    Returns:
        A row per problem and variant.
    """
    rows = []
    for problem in default_problems() if problems is None else problems:
        best = reference_optimum(problem)
        optimum = float(problem.objective(best))
        for name, strategy in (strategies or default_strategies)(problem.ball).items():
            path = run_variant(problem, strategy, steps=steps)
            W, value = path[-1], float(problem.objective(path[-1]))
            movement = float((path[-1] - path[-2]).norm()) / problem.radius
            rows.append(
                TheoremRow(
                    problem=problem.name,
                    ball=problem.ball.name,
                    strategy=name,
                    value=value,
                    optimum=optimum,
                    excess=value - optimum,
                    reference_gap=problem.gap(best),
                    distance=float((W - best).norm()),
                    norm=float(problem.ball.norm(W)) / problem.radius,
                    movement=movement,
                    singular_values=tuple(torch.linalg.svdvals(W).tolist()),
                    optimal_singular_values=tuple(torch.linalg.svdvals(best).tolist()),
                    converged=movement < 1e-6,
                    optimal=movement < 1e-6 and value - optimum < 1e-6,
                )
            )
    return rows


COLOURS = {"rescale (paper)": "#c4372c", "sphere (Fix-Lip)": "#e08a00", "projection": "#1f5fa8", "Björck": "#7a4fa3"}


def plot_theorem(path: str | Path, rows: Sequence[TheoremRow] | None = None) -> Path:
    """Left: where each variant stops on the 2 x 2 instance. Right: excess objective on every problem.

    Args:
        path: File to write.
        rows: Results to draw; :func:`theorem_check` is run by default.

    Returns:
        The path written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Circle, Rectangle

    rows = theorem_check() if rows is None else rows
    figure = Figure(figsize=(13.5, 5.4), layout="constrained")
    FigureCanvasAgg(figure)
    plane, chart = figure.subplots(1, 2, width_ratios=[1.15, 1])

    problem, start = diagonal_problem(), torch.diag(torch.tensor([0.15, 0.8], dtype=torch.double))
    for radius in (1.6, 2.0, 2.0276, 2.4, 2.8, 3.2):
        plane.add_patch(Circle((3, 0.5), radius, fill=False, color="#d5d8dd", linewidth=0.8))
    plane.add_patch(Rectangle((-1, -1), 2, 2, facecolor="#f3f6fa", edgecolor="#8892a0", linewidth=1.2))
    plane.text(0.05, 0.05, r"$\|W\|_2 \leq 1$", color="#5b6675", fontsize=11)
    for name, strategy in default_strategies(problem.ball).items():
        walk = torch.stack(run_variant(problem, strategy, relative_step=0.04, start=start, steps=300))
        w1, w2 = walk[:, 0, 0].tolist(), walk[:, 1, 1].tolist()
        # the rescaled path ends under the sphere's: drawn wider, both stay visible
        width, style, dot = {"rescale (paper)": (5, "-", 13), "sphere (Fix-Lip)": (1.8, "--", 6)}.get(name, (2, "-", 8))
        plane.plot(w1, w2, style, color=COLOURS[name], linewidth=width, label=name, zorder=3)
        plane.plot(w1[-1], w2[-1], "o", color=COLOURS[name], markersize=dot, markeredgecolor="white", zorder=5)
    plane.plot(1, 0.5, "*", color="#222222", markersize=20, zorder=4)
    plane.annotate("optimum (1, .5)", (1, 0.5), (1.08, 0.48), fontsize=10)
    plane.annotate(
        "rescaling stops\nat (1, .167)", (1, 1 / 6), (1.08, 0.11), fontsize=10, color=COLOURS["rescale (paper)"]
    )
    plane.set(xlim=(-0.05, 1.6), ylim=(-0.1, 1.12), aspect="equal", xlabel=r"$W_{11}$", ylabel=r"$W_{22}$")
    plane.set_title(r"$\min\ \|W - \mathrm{diag}(3, .5)\|_F^2$ on the spectral ball")

    floor = 1e-12
    problems = list(dict.fromkeys(row.problem for row in rows))
    for height, name in enumerate(problems):
        chart.axhline(-height, color="#eceef1", linewidth=24, zorder=0, alpha=0.7)
        for row in (r for r in rows if r.problem == name):
            offset = 0.15 * (list(COLOURS).index(row.strategy) - 1.5)
            chart.plot(max(row.excess, floor), -height - offset, "o", color=COLOURS[row.strategy], markersize=6.5)
    chart.axvspan(floor / 10, 1e-6, color="#e6f2e8", zorder=-1)
    chart.text(2e-13, 0.6, "at the optimum", color="#3d7a4a", fontsize=9.5)
    chart.set_xscale("log")
    chart.set(xlim=(floor / 10, 100), ylim=(-len(problems) + 0.4, 0.95), xlabel="objective above the optimum, no noise")
    chart.set_yticks([-i for i in range(len(problems))], problems)
    chart.tick_params(axis="y", length=0)
    chart.spines[["top", "right", "left"]].set_visible(False)
    chart.set_title("Theorem 2: is the resting point an optimum?")
    handles = plane.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=150)
    return Path(path)
