"""Dense norms are upper bounds of the float64 singular values, and near to them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from weightclip.bounds import _operator_norms
from weightclip.bounds._operator_norms import dense_norm, frobenius, gram_iteration, largest_eigenvalues, spectral_norm
from weightclip.errors import CertificationError


def matrices(dtype: torch.dtype = torch.float32) -> Iterator[Tensor]:
    """Shapes and spectra that stress a norm: flat, decaying, rank one, repeated, tiny, large, singular."""
    generator = torch.Generator().manual_seed(0)
    for m, n in ((1, 1), (1, 7), (7, 1), (2, 2), (5, 3), (3, 5), (30, 30), (64, 10), (10, 200)):
        w = torch.randn(m, n, generator=generator, dtype=torch.float64)
        u, _, vh = torch.linalg.svd(w, full_matrices=False)
        yield w.to(dtype)
        yield (u @ vh).to(dtype)  # all singular values 1: the worst case of ‖·‖_F
        yield (u @ torch.diag(0.5 ** torch.arange(min(m, n), dtype=torch.float64)) @ vh).to(dtype)
        yield (u[:, :1] @ vh[:1]).to(dtype)
        yield torch.ones(m, n, dtype=dtype)
        yield (w * 1e-30).to(dtype)
        yield (w * 1e30).to(dtype)


def exact(w: Tensor) -> float:
    """Largest singular value by a float64 SVD of the entries scaled to order one."""
    w = w.double()
    scale = float(w.abs().max())
    return float(torch.linalg.svdvals(w / scale)[0]) * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_two_norm_is_an_upper_bound_and_tight(dtype: torch.dtype) -> None:
    worst, best = 1.0, 0.0
    for w in matrices(dtype):
        bound = dense_norm(w)
        assert bound.dtype == torch.float64 and bound.shape == ()
        truth = exact(w)
        assert float(bound) >= truth * (1 - 1e-15)  # the SVD of the reference rounds as well
        worst, best = max(worst, float(bound) / truth), max(best, truth / float(bound))
    print(f"bound/truth at most 1 + {worst - 1:.1e}")
    assert worst < 1 + 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gram_iteration_is_an_upper_bound_at_every_depth(dtype: torch.dtype) -> None:
    flat = 0.0
    for w in matrices(torch.float64):
        truth, n = exact(w), min(w.shape)
        for iterations in (1, 2, 3, 6, 12, 20):
            bound = float(gram_iteration(w, iterations, dtype))
            assert bound >= truth * (1 - 1e-15), (w.shape, iterations)
            excess = n ** (0.5 ** (iterations + 1))
            assert bound <= truth * excess * (1 + (1e-11 if dtype == torch.float64 else 1e-2))
            flat = max(flat, bound / truth / excess)
    assert flat > 0.999  # orthogonal matrices attain the factor, so it cannot be smaller


def test_the_closed_recursion_is_an_upper_bound_at_every_depth() -> None:
    for w in matrices(torch.float64):
        truth, n = exact(w), min(w.shape)
        for iterations in (1, 2, 3, 6, 9, 20):
            bound = float(gram_iteration(w, iterations, moderate=True))
            assert bound >= truth * (1 - 1e-15), (w.shape, iterations)
            assert bound <= truth * n ** (0.5 ** (iterations + 1)) * (1 + 1e-9)
    w = torch.randn(3, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for scale in (1e90, 1e-90):
        torch.testing.assert_close(
            gram_iteration(w * scale, 9, moderate=True), gram_iteration(w, 9) * scale, rtol=1e-10, atol=0.0
        )
    for bad in (math.nan, math.inf):
        w = torch.tensor([[1.0, bad], [0.0, 1.0]], dtype=torch.float64)
        assert not math.isfinite(float(gram_iteration(w, 9, moderate=True)))


def test_default_depth_is_within_one_in_ten_thousand() -> None:
    for w in matrices():
        assert float(gram_iteration(w)) <= exact(w) * (1 + 1.1e-4)


def test_exponent_on_sigma_one_half() -> None:
    """Trap: ‖A_J‖_F^(1/2^J); an exponent off by one gives 0.25 or 0.707 here."""
    for iterations in range(1, 9):
        assert float(gram_iteration(torch.tensor([[0.5]]), iterations)) == pytest.approx(0.5, rel=1e-12)
        assert float(gram_iteration(torch.diag(torch.tensor([0.5, 0.01])), iterations)) == pytest.approx(0.5, rel=1e-3)


def naive_float32(w: Tensor, iterations: int) -> float:
    """Gram iteration in float32 without a margin."""
    a, log = w.float(), 0.0
    for j in range(iterations):
        f = a.norm()
        log += float(f.log()) / 2**j
        a = a / f
        a = a.T @ a
    return math.exp(log + math.log(float(a.norm())) / 2**iterations)


def test_float32_gram_iteration_without_margin_falls_below() -> None:
    """Trap: float32 falls below the truth; with the margin it does not."""
    generator = torch.Generator().manual_seed(0)
    deepest = 1.0
    for _ in range(100):
        w = torch.randn(40, 20, generator=generator)
        truth = exact(w)
        deepest = min(deepest, naive_float32(w, 14) / truth)
        assert float(gram_iteration(w, 14, torch.float32)) >= truth
    print(f"naive float32: 1 - {1 - deepest:.1e}")
    assert deepest < 1 - 1e-8


def test_lower_matmul_precision_widens_the_margin() -> None:
    w = torch.randn(30, 30, generator=torch.Generator().manual_seed(0))
    before = torch.get_float32_matmul_precision()
    bounds = []
    try:
        for precision in ("highest", "high", "medium"):
            torch.set_float32_matmul_precision(precision)
            bounds.append(float(gram_iteration(w, 10, torch.float32)))
    finally:
        torch.set_float32_matmul_precision(before)
    assert exact(w) <= bounds[0] < bounds[1] < bounds[2] < 2 * exact(w)


def test_one_and_infinity_norms() -> None:
    for w in matrices():
        for p, dim in ((1, 0), (math.inf, 1)):
            truth = float(w.double().abs().sum(dim).max())
            assert truth <= float(dense_norm(w, p)) <= truth * (1 + 1e-12)
    w = torch.tensor([[1.0, -2.0, 3.0], [0.0, 0.0, 1.0]])
    assert float(dense_norm(w, 1)) == pytest.approx(4) and float(dense_norm(w, math.inf)) == pytest.approx(6)


@pytest.mark.parametrize("p", [1, 2, math.inf])
def test_batches_equal_single_matrices(p: float) -> None:
    stack = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(1))
    stack[0, 1] = 0
    stack[1, 2, 0, 0] = math.nan
    together = dense_norm(stack, p)
    assert together.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(together[i, j], dense_norm(stack[i, j], p), rtol=1e-13, atol=0, equal_nan=True)
    assert math.isnan(float(together[1, 2])) and together[0, 1] == 0
    assert bool(together.isfinite().sum() == 5)  # the NaN stays with its own matrix
    torch.testing.assert_close(gram_iteration(stack)[0, 0], gram_iteration(stack[0, 0]), rtol=1e-13, atol=0)


def test_degenerate_matrices() -> None:
    for norm in (dense_norm, gram_iteration, spectral_norm):
        assert norm(torch.zeros(3, 2)) == 0
        assert norm(torch.zeros(0, 2)) == 0
        assert norm(torch.zeros(4, 0, 2)).tolist() == [0, 0, 0, 0]
        assert float(norm(torch.tensor([[-3.0]]))) == pytest.approx(3, rel=1e-12)
        assert math.isnan(float(norm(torch.tensor([[1.0, math.nan], [0.0, 1.0]]))))
        assert not math.isfinite(float(norm(torch.tensor([[1.0, math.inf], [0.0, 1.0]]))))
        assert not math.isfinite(float(norm(torch.tensor([[1.0, -math.inf]], dtype=torch.float64))))
    for p in (1, math.inf):
        assert dense_norm(torch.zeros(0, 2), p) == 0
        assert math.isnan(float(dense_norm(torch.tensor([[math.nan, 1.0]]), p)))


def test_float64_extremes_neither_overflow_nor_vanish() -> None:
    w = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for scale in (1e250, 1e-250, 1e-308):
        for norm in (dense_norm, gram_iteration, lambda x: dense_norm(x, 1)):
            assert float(norm(w * scale)) == pytest.approx(float(norm(w)) * scale, rel=1e-6)


def test_bound_is_that_of_the_cast_weights() -> None:
    """bfloat16 rounding can make the norm grow: the bound has to follow."""
    w = torch.full((64, 64), 1.0 + 2.0**-8 + 2.0**-12)
    assert float(dense_norm(w.bfloat16())) > 1.003 * float(dense_norm(w))


def test_complex_matrices() -> None:
    w = torch.randn(6, 9, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))
    truth = float(torch.linalg.svdvals(w)[0])
    for bound in (spectral_norm(w), gram_iteration(w), gram_iteration(w, 20, torch.float32)):
        assert truth <= float(bound) <= truth * (1 + 1e-4)


def test_frobenius_and_refusals() -> None:
    w = torch.tensor([[3.0, 4.0]])
    assert 5 <= float(frobenius(w)) <= 5 * (1 + 1e-12)
    for call, says in (
        (lambda: dense_norm(w, 3), "p=3"),
        (lambda: dense_norm(w[0]), "1-D"),
        (lambda: gram_iteration(w, 0), "at least 1"),
        (lambda: gram_iteration(w, 3, torch.bfloat16), "bfloat16"),
    ):
        with pytest.raises(CertificationError, match=says):
            call()


def test_norms_leave_no_graph_behind() -> None:
    w = torch.randn(3, 3, requires_grad=True)
    for bound in (dense_norm(w), dense_norm(w, 1), gram_iteration(w), frobenius(w)):
        assert not bound.requires_grad


def spectra(n: int) -> dict[str, Tensor]:
    """Eigenvalues that are hard to find or to separate."""
    g = torch.Generator().manual_seed(n)
    flat = torch.rand(n, dtype=torch.float64, generator=g)
    close = 1 - 1e-9 * torch.arange(n, dtype=torch.float64)
    spike = torch.full((n,), 1e-8, dtype=torch.float64)
    spike[0] = 1.0
    half = torch.where(torch.arange(n) < n // 2, 1.0, 0.5).double()
    return {"uniform": flat, "clustered": close, "spike": spike, "two": half, "decay": 0.9 ** torch.arange(n).double()}


@pytest.mark.parametrize("scale", [1.0, 1e-60, 1e60])
def test_large_symmetric_matrices_are_bounded_by_cholesky(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_operator_norms, "_CHOLESKY", 8)
    n = 96
    q = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0]
    for name, values in spectra(n).items():
        gram = (q * values) @ q.T * scale
        found, truth = float(largest_eigenvalues(gram)), float(torch.linalg.eigvalsh(gram)[-1])
        assert truth * (1 - 1e-14) <= found <= truth * (1 + 2e-3), name
    blind = torch.eye(n, dtype=torch.float64)  # the starting vector sees nothing of the largest eigenvalue
    places = torch.arange(n, dtype=torch.float64)
    start = torch.cos(places * places * 0.37) + 1.3
    other = torch.zeros(n, dtype=torch.float64)
    other[0], other[1] = start[1], -start[0]
    blind = (blind + 5 * torch.outer(other, other) / other.square().sum()) * scale
    assert float(largest_eigenvalues(blind)) >= 6 * scale * (1 - 1e-14)


def test_large_eigenvalues_of_degenerate_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_operator_norms, "_CHOLESKY", 2)
    stack = torch.stack([torch.zeros(4, 4), torch.eye(4), torch.full((4, 4), math.nan), torch.ones(4, 4)]).double()
    stack[0, 1, 1] = -1.0
    found = largest_eigenvalues(stack)
    assert 0 <= found[0] < 1e-12 and found[1] == pytest.approx(1, rel=2e-6) and math.isnan(float(found[2]))
    assert 4 <= found[3] <= 4 * (1 + 2e-6)
    w = torch.randn(600, 700, generator=torch.Generator().manual_seed(3))
    truth = exact(w.double())
    assert truth <= float(spectral_norm(w)) <= truth * (1 + 1e-4)
