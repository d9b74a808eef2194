"""Norms of float32 matrices from 16-bit products, with what they round (SOUNDNESS Theorem 11).

Meant for how far weights have moved: of that a bound within a small factor is enough, but every step needs one. It is
much nearer to the norm than the Frobenius norm is, and takes what tensor cores take for products in 16 bits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from weightclip.errors import CertificationError

_U32 = 2.0**-24
_SUMS = 2.0**-22  # an addition of a tensor core, which truncates, and twice that
_CUT = 2.0**-11 * (1.0 + 2.0**-10)  # share of an entry that two roundings take: of its scaling, and to 11 bits
_LEAST = 1.01 * 2.0**-25  # what a number below float16's smallest normal one is off by, and one below float32's
_SIZE = 128.0  # Frobenius norm of what is multiplied: no product of it is beyond 2^14, or too small to matter
_ROW = 1 << 20  # terms of a row for which a float32 norm has a margin


def row_frobenius(matrix: Tensor) -> Tensor:
    """Upper bound of the Frobenius norm of a real matrix, float64: squares of a row are added in float32.

    That takes a third of the memory traffic of a sum in float64. A float32 sum of c squares is at least (1 − γ) times
    the exact one, γ = (c + 2)u/(1 − (c + 2)u), in any order, but for squares that are below float32: those of a row are
    together at most c·2⁻¹²⁶, which gives the last term. Squares beyond float32 give inf.
    """
    matrix = matrix.detach()
    rows, terms = matrix.shape
    wide = matrix.dtype == torch.float64 or terms > _ROW
    norms = torch.linalg.vector_norm(matrix, dim=1, dtype=torch.float64 if wide else torch.float32)
    total = torch.linalg.vector_norm(norms, dtype=torch.float64)
    share = (terms + 8) * (2.0**-53 if wide else _U32) + (rows + 8) * 2.0**-53
    return total * (1.0 + share) + math.sqrt(rows * terms) * (1e-150 if wide else 2.0**-62)


def narrow_norm(matrix: Tensor, products: int = 2, size: Tensor | None = None) -> Tensor:
    """Upper bound of ‖A‖₂ from a few products of 16-bit matrices; it waits for nobody.

    With A = B₀, and A_j the matrix s_j·B_j rounded to float16, B_{j+1} = fl(A_jᵀA_j) in float32. Rounding to float16
    moves s_j·B_j by a matrix of Frobenius norm e_j; products of 11-bit numbers are exact in float32, and their sums
    over k terms are off by at most γ|A_j|ᵀ|A_j| entrywise, γ = (k + 8)·2⁻²²/(1 − (k + 8)·2⁻²²). So
    s_j‖B_j‖₂ ≤ √(‖B_{j+1}‖₂ + γ‖A_j‖_F²) + e_j, which is carried back from ‖B_J‖₂ ≤ ‖B_J‖_F. The scales s_j may be any
    numbers; those taken make ‖A_j‖_F about 128.

    Args:
        matrix: ``(m, n)``, float32 (or narrower).
        products: J. The excess of exact products is at most the factor n^(1/2^(J+1)), n the smaller side.
        size: ``row_frobenius(matrix)``, where it is known.

    Returns:
        0-dim float64 tensor. A NaN entry gives NaN, an infinite one NaN or inf.

    Formal guarantees:
        At least the largest singular value of the stored entries, where products of float16 matrices (their subnormal
        numbers included, as on CUDA) are added in float32, in whatever order and whether sums round or truncate. The
        Frobenius norm may be smaller still.
    """
    if matrix.dim() != 2 or matrix.dtype == torch.float64 or matrix.is_complex():
        raise CertificationError(f"narrow_norm of {matrix.dtype}, {matrix.dim()}-D: expected a real float32 matrix")
    b = matrix.detach().float()
    b = b if b.shape[0] >= b.shape[1] else b.mT
    if b.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=b.device)
    levels: list[tuple[Tensor, Tensor, Tensor, float]] = []
    norm = row_frobenius(b) if size is None else size
    for _ in range(products):
        scale = (_SIZE / norm.clamp_min(1e-30)).float()
        a = (b * scale).half()
        scaled = norm * scale.double()  # of s·B
        off = scaled * _CUT + math.sqrt(b.numel()) * _LEAST
        terms = (b.shape[0] + 8) * _SUMS
        levels.append((scale.double(), off, scaled + off, terms / (1.0 - terms)))
        b = _product(a)
        norm = row_frobenius(b)
    for scale, off, whole, gamma in reversed(levels):
        norm = ((norm + gamma * whole * whole).sqrt() + off) * (1.0 + 2.0**-48) / scale
    return norm


def _product(a: Tensor) -> Tensor:
    """AᵀA of a float16 matrix, in float32: the type of the result leaves a library none to add in that is narrower."""
    if a.shape[0] * _SUMS > 0.25:
        raise CertificationError(f"narrow_norm over {a.shape[0]} terms has no margin")
    if a.device.type == "cuda":
        with torch.autocast("cuda", enabled=False):
            return torch.mm(a.mT, a, out_dtype=torch.float32)
    wide = a.double()  # no device to win time on: exact, and never rounded to bfloat16 by a setting
    return (wide.mT @ wide).float()
