"""A proved eigenvalue is never below the largest, and close to it; what a factorisation left is not trusted."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from weightclip.bounds import _proved
from weightclip.bounds._proved import proved_eigenvalue, residual_bound


def grams() -> Iterator[tuple[str, Tensor]]:
    """Gram matrices of random shapes, and those whose largest eigenvalue is hard to find or to separate."""
    g = torch.Generator().manual_seed(0)
    for n, k in ((2, 2), (5, 40), (40, 5), (96, 96), (130, 700)):
        w = torch.randn(n, k, generator=g, dtype=torch.float64)
        yield f"{n} x {k}", w @ w.T
        for scale in (1e-30, 1e30):
            yield f"{n} x {k}, {scale}", (w @ w.T) * scale
    n = 120
    q = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=g))[0]
    for name, values in {
        "near-equal": 1 - 1e-9 * torch.arange(n).double(),
        "equal": torch.ones(n).double(),
        "ill-conditioned": 10.0 ** -torch.linspace(0, 30, n).double(),
        "rank one": torch.eye(n)[0].double(),
    }.items():
        yield name, (q * values) @ q.T
    yield "all ones", torch.ones(n, n, dtype=torch.float64)
    yield "diagonal", torch.diag(torch.arange(1.0, n + 1).double())


def blind(n: int = 96) -> Tensor:
    """λ_max is 6 and belongs to a vector that the start of the guess is orthogonal to; the guess is 1."""
    places = torch.arange(n, dtype=torch.float64)
    start = torch.cos(places * places * 0.37) + 1.3
    other = torch.zeros(n, dtype=torch.float64)
    other[0], other[1] = start[1], -start[0]
    return torch.eye(n, dtype=torch.float64) + 5 * torch.outer(other, other) / other.square().sum()


def check_proofs() -> None:
    proved = 0
    for name, gram in grams():
        truth, found = float(torch.linalg.eigvalsh(gram)[-1]), proved_eigenvalue(gram)
        assert found is not None, name
        assert truth * (1 - 1e-13) <= found <= truth * (1 + 2e-2), name
        proved += found <= truth * (1 + 2e-4)
    assert proved >= 15  # nearly all with the smallest excess


def test_proved_eigenvalues_are_upper_bounds_and_tight() -> None:
    check_proofs()


def check_blind() -> None:
    found = proved_eigenvalue(blind())
    assert found is None or found >= 6 * (1 - 1e-14)


def test_a_guess_that_is_too_small_is_not_proved() -> None:
    check_blind()
    assert proved_eigenvalue(blind()) is None  # the caller takes another way


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf, 1e-200, 1e200])
def test_what_has_no_proof_is_refused(value: float) -> None:
    assert proved_eigenvalue(torch.full((20, 20), value, dtype=torch.float64)) is None
    one = torch.eye(20, dtype=torch.float64)
    one[7, 7] = value
    found = proved_eigenvalue(one)
    assert found is None or (math.isfinite(value) and found >= max(1.0, value))


def test_any_numbers_give_a_bound() -> None:
    """Neither μ nor L has to have anything to do with the matrix, and it need not be quite symmetric."""
    g = torch.Generator().manual_seed(1)
    for n in (1, 2, 7, 30):
        for _ in range(20):
            w = torch.randn(n, n, dtype=torch.float64, generator=g)
            gram = w @ w.T + 1e-3 * torch.randn(n, n, dtype=torch.float64, generator=g)
            symmetric = (gram + gram.T) / 2
            mu = float(torch.rand((), generator=g)) * 3 * n
            truth = float(torch.linalg.eigvalsh(symmetric)[-1])
            assert residual_bound(gram, mu, torch.randn(n, n, dtype=torch.float64, generator=g)) >= truth
            close = torch.linalg.cholesky_ex(mu * torch.eye(n).double() - symmetric).L
            assert residual_bound(gram, mu, close) >= truth - float((gram - symmetric).norm())


def check_rounding() -> None:
    """Sums err as much as they may (with a coarse unit), all in the direction that hides what is missing."""
    n, mu, c, u = 8, 4.0, 1.0, 2.0**-12
    signs = torch.tensor([1.0, -1.0] * (n // 2), dtype=torch.float64)
    factor = torch.zeros(n, n, dtype=torch.float64)
    factor[:, 0] = c * signs
    gamma = n * u / (1 - n * u)
    wrong = factor @ factor.T - gamma * factor.abs() @ factor.abs().T
    gram = mu * torch.eye(n, dtype=torch.float64) - wrong
    truth = float(torch.linalg.eigvalsh(gram)[-1])
    assert truth > mu * (1 + 1e-3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_proved, "_U64", u)
        patch.setattr(_proved, "_square", lambda _: wrong.clone())
        assert residual_bound(gram, mu, factor) >= truth
    exact = residual_bound(gram, mu, factor)  # as sums really are: the residual says it
    assert truth <= exact <= mu + 1.01 * gamma * n * c * c


def test_a_product_that_errs_as_much_as_it_may_is_covered() -> None:
    check_rounding()


def test_a_guess_is_a_lower_estimate() -> None:
    for name, gram in grams():
        truth = float(torch.linalg.eigvalsh(gram)[-1])
        assert 0.99 * truth <= _proved.lanczos(gram) <= truth * (1 + 1e-12), name
