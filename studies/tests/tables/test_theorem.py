"""Rescaling misses the optimum over the spectral ball, projection finds it; where Theorem 2 holds, both do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import optimize

from weightclip_studies.tables._theorem import (
    ConvexProblem,
    FrobeniusBall,
    SpectralBall,
    TheoremRow,
    default_problems,
    diagonal_problem,
    plot_theorem,
    reference_optimum,
    run_variant,
    theorem_check,
)

RESCALE, SPHERE, PROJECTION, BJORCK = "rescale (paper)", "sphere (Fix-Lip)", "projection", "Björck"


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, str], TheoremRow]:
    return {(row.problem, row.strategy): row for row in theorem_check()}


def rescale(weight: torch.Tensor, C: float, norm: Callable[[torch.Tensor], torch.Tensor]) -> None:
    weight.mul_((C / norm(weight)).clamp_max(1.0))


def test_the_instance_of_the_design_notes(rows: dict[tuple[str, str], TheoremRow]) -> None:
    name = diagonal_problem().name
    assert rows[name, RESCALE].singular_values == pytest.approx((1, 1 / 6), abs=1e-6)  # diag(1, .167)
    assert rows[name, SPHERE].singular_values == pytest.approx((1, 1 / 6), abs=1e-6)
    assert rows[name, PROJECTION].singular_values == pytest.approx((1, 0.5), abs=1e-6)
    assert rows[name, PROJECTION].optimal_singular_values == pytest.approx((1, 0.5), abs=1e-9)
    assert rows[name, BJORCK].singular_values == pytest.approx((1, 1), abs=1e-3)
    assert rows[name, RESCALE].excess == pytest.approx(1 / 9, abs=1e-6)  # (.5 - 1/6)^2


@pytest.mark.parametrize("relative_step", [0.05, 0.5, 1.0])
def test_the_resting_point_of_rescaling_does_not_depend_on_the_step(relative_step: float) -> None:
    W = run_variant(diagonal_problem(), rescale, relative_step=relative_step, steps=400)[-1]
    torch.testing.assert_close(W, torch.diag(torch.tensor([1, 1 / 6], dtype=torch.double)), atol=1e-6, rtol=0)


def test_at_rest_the_gradient_is_radial() -> None:
    """The condition of the paper's proof, which is not the spectral ball's: gradient and weights are parallel."""
    problem = default_problems()[1]
    W = run_variant(problem, rescale, steps=800)[-1]
    g = problem.gradient(W)
    assert float((g * W).sum() / (g.norm() * W.norm())) == pytest.approx(-1, abs=1e-9)
    assert problem.gap(W) > 0.1


def test_every_run_converged_within_the_ball(rows: dict[tuple[str, str], TheoremRow]) -> None:
    assert all(row.converged and row.norm <= 1 + 1e-6 for row in rows.values())
    assert all(row.reference_gap < 1e-9 and row.excess > -1e-9 for row in rows.values())


@pytest.mark.parametrize("problem", ["diag(3, .5)", "regression", "3-class softmax"])
def test_theorem_2_fails_on_the_spectral_ball(problem: str, rows: dict[tuple[str, str], TheoremRow]) -> None:
    assert rows[problem, PROJECTION].optimal
    for strategy in (RESCALE, SPHERE, BJORCK):
        assert not rows[problem, strategy].optimal and rows[problem, strategy].excess > 5e-3


@pytest.mark.parametrize(
    "problem", ["logistic, one row", "regression, Frobenius ball", "3-class softmax, Frobenius ball"]
)
def test_theorem_2_holds_where_rescaling_is_the_projection(
    problem: str, rows: dict[tuple[str, str], TheoremRow]
) -> None:
    row = rows[problem, RESCALE]
    assert row.optimal and row.norm == pytest.approx(1, abs=1e-6)  # the constraint binds


def test_an_optimum_inside_needs_no_sphere(rows: dict[tuple[str, str], TheoremRow]) -> None:
    name = "regression, optimum inside"
    assert rows[name, RESCALE].optimal and rows[name, PROJECTION].optimal
    assert not rows[name, SPHERE].optimal and not rows[name, BJORCK].optimal


@pytest.mark.parametrize("ball", [SpectralBall(), FrobeniusBall()])
def test_balls_project_and_support(ball: SpectralBall | FrobeniusBall) -> None:
    g = torch.Generator().manual_seed(0)
    for _ in range(20):
        W, V = (torch.randn(3, 4, generator=g, dtype=torch.double) for _ in range(2))
        nearest, member = ball.project(W, 0.7), ball.project(V, 0.7)
        assert float(ball.norm(nearest)) <= 0.7 + 1e-12
        assert float(((W - nearest) * (member - nearest)).sum()) <= 1e-12  # what makes it the projection
        assert float((W * member).sum()) <= 0.7 * float(ball.dual(W)) + 1e-12


def test_reference_agrees_with_an_independent_solver() -> None:
    """SLSQP on the one-row problem, where the spectral ball is the ordinary l2 ball and the constraint is smooth."""
    problem = default_problems()[4]
    best = reference_optimum(problem)

    def objective(w: np.ndarray) -> float:
        return float(problem.objective(torch.as_tensor(w)[None]))

    def gradient(w: np.ndarray) -> np.ndarray:
        return problem.gradient(torch.as_tensor(w)[None])[0].numpy()

    ball = {"type": "ineq", "fun": lambda w: problem.radius**2 - w @ w, "jac": lambda w: -2 * w}
    found = optimize.minimize(objective, np.full(5, 0.1), jac=gradient, method="SLSQP", constraints=[ball], tol=1e-12)
    np.testing.assert_allclose(best[0].numpy(), found.x, atol=1e-5)
    assert float(problem.objective(best)) == pytest.approx(found.fun, abs=1e-9)


def test_reference_says_when_it_fails() -> None:
    hard = ConvexProblem("hard", lambda W: W.square().sum() + W.sum(), (2, 2), 9.0, 2e6, SpectralBall())
    with pytest.raises(RuntimeError, match="'hard': duality gap"):
        reference_optimum(hard, limit=60)


def test_plot_is_written(tmp_path: Path, rows: dict[tuple[str, str], TheoremRow]) -> None:
    assert plot_theorem(tmp_path / "theorem.png", list(rows.values())).stat().st_size > 20_000
