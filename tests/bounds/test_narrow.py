"""Norms from 16-bit products are never below the truth, whatever tensor cores make of sums, and small for wide ones."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from weightclip.bounds import _narrow
from weightclip.bounds._narrow import narrow_norm, row_frobenius
from weightclip.errors import CertificationError


def matrices() -> Iterator[tuple[str, Tensor]]:
    g = torch.Generator().manual_seed(0)
    for m, n in ((1, 1), (1, 9), (9, 1), (5, 3), (3, 50), (64, 64), (200, 90)):
        w = torch.randn(m, n, generator=g, dtype=torch.float64)
        u, s, vh = torch.linalg.svd(w, full_matrices=False)
        for name, values in {
            "random": s,
            "flat": torch.ones_like(s),
            "near-equal": 1 - 1e-7 * torch.arange(len(s)).double(),
            "ill-conditioned": 10.0 ** -torch.linspace(0, 20, len(s)).double(),
            "rank one": torch.eye(len(s))[0].double(),
        }.items():
            for scale in (1.0, 1e-6, 1e6):
                yield f"{name} {m} x {n} {scale}", ((u * values) @ vh * scale).float()
    # scaled, every entry is cut by nearly half a unit of float16, and a matrix of rank one is measured exactly
    yield "constant", torch.ones(49, 49)


def exact(w: Tensor) -> float:
    return float(torch.linalg.matrix_norm(w.double(), 2))


@pytest.mark.parametrize("products", [1, 2, 3])
def test_narrow_norms_are_upper_bounds_and_close(products: int) -> None:
    check_narrow(products)


def check_narrow(products: int = 2) -> None:
    for name, w in matrices():
        truth, found, n = exact(w), float(narrow_norm(w, products)), min(w.shape)
        assert found >= truth * (1 - 1e-14), name
        assert found <= truth * n ** (0.5 ** (products + 1)) * (1 + 2.0**-10 * (1 + math.sqrt(n))), name


def test_it_is_much_nearer_to_the_norm_than_the_frobenius_norm_is() -> None:
    w = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    assert float(narrow_norm(w)) < 1.75 * exact(w) < 0.12 * float(row_frobenius(w))


def check_sums() -> None:
    """Every sum is off by what a truncating adder may take: (k + 1) 2^-23 of the sum of absolute values."""

    def product(a: Tensor) -> Tensor:
        wide = a.double()
        lost = (a.shape[0] + 1) * 2.0**-23 * (wide.abs().mT @ wide.abs())
        return (wide.mT @ wide - lost).float()

    g = torch.Generator().manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_narrow, "_product", product)
        for w in (torch.ones(4096, 8), torch.rand(3000, 30, generator=g), torch.ones(1 << 18, 2)):
            for products in (1, 2, 3):
                assert float(narrow_norm(w, products)) >= exact(w) * (1 - 1e-14)


def test_sums_that_truncate_are_covered() -> None:
    check_sums()


def check_rows() -> None:
    g = torch.Generator().manual_seed(0)
    cases = [torch.randn(m, n, generator=g) * s for m, n in ((1, 1), (7, 300), (3, 5000)) for s in (1.0, 1e-25, 1e15)]
    cases += [torch.full((2, 100_000), 1 / 3), torch.full((3, 3), 1e-30), torch.full((3, 3), 1e-44)]
    for w in cases:
        truth = float(w.double().norm())
        assert truth <= float(row_frobenius(w)) <= truth * (1 + 7e-3) + 1e-15
        assert truth <= float(row_frobenius(w.double())) <= truth * (1 + 1e-10) + 1e-140


def test_row_sums_in_float32_are_upper_bounds() -> None:
    check_rows()


def test_strange_matrices() -> None:
    assert 0 <= float(narrow_norm(torch.zeros(5, 3))) < 1e-15 and float(narrow_norm(torch.zeros(0, 3))) == 0
    for bad in (math.nan, math.inf, -math.inf):
        w = torch.ones(6, 6)
        w[2, 3] = bad
        assert not math.isfinite(float(narrow_norm(w))) and not math.isfinite(float(row_frobenius(w)))
    for size in (1e30, 3e38):  # squares beyond float32 are refused, not guessed
        assert not float(narrow_norm(torch.full((6, 6), size))) < 6 * size
    assert float(narrow_norm(torch.ones(6, 6, dtype=torch.bfloat16))) >= 6
    for wrong in (torch.ones(3), torch.ones(3, 3).double(), torch.ones(3, 3, dtype=torch.complex64)):
        with pytest.raises(CertificationError, match="expected a real float32 matrix"):
            narrow_norm(wrong)
    with pytest.raises(CertificationError, match="no margin"):
        narrow_norm(torch.ones(1 << 21, 1))


def test_entries_far_below_the_largest_are_not_lost() -> None:
    """Float16 flushes them: the margin counts what that takes."""
    w = torch.full((300, 300), 1e-7)
    w[0, 0] = 1.0
    assert float(narrow_norm(w)) >= exact(w)
