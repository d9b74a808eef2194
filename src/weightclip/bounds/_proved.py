"""The largest eigenvalue of a wide Gram matrix on a device, guessed and then proved (SOUNDNESS Theorem 11).

Gram iteration of a matrix of order n takes ten products of n x n matrices in float64. Here it is one, beside a Cholesky
factorisation in float32, whose result need not be trusted: how far it is from a factor is measured in float64. The
price is that the host waits, so that nothing of this can be part of a recorded CUDA graph.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from weightclip.bounds._operator_norms import frobenius, lanczos

_U64 = 2.0**-53
_EXCESS = (1e-4, 1e-3, 1e-2)  # of the guess over the largest eigenvalue: what float32 can factorise


def proved_eigenvalue(gram: Tensor) -> float | None:
    """Upper bound of the largest eigenvalue of a symmetric positive semidefinite matrix; None where none was proved.

    Args:
        gram: ``(n, n)``, float64, symmetric but for rounding.

    Returns:
        A number at most 2% above a lower estimate of that eigenvalue; None if the matrix is zero, not finite, very
        large or very small (1e±140), or if the guess was too small to be proved. Waits for the device.

    Formal guarantees:
        λ_max(S) of any symmetric matrix S is at most the result plus ‖S − gram‖₂. Neither the guess nor the
        factorisation is trusted.
    """
    guess = lanczos(gram)
    if not 1e-140 < guess < 1e140:
        return None
    scale = 2.0 ** -math.frexp(guess)[1]  # a power of two: exact, and float32 holds what comes out
    scaled, guess = gram * scale, guess * scale
    for excess in _EXCESS:
        mu = guess * (1.0 + excess)
        shifted = -scaled
        shifted.diagonal().add_(mu)
        factor = torch.linalg.cholesky_ex(shifted.float()).L  # where it breaks off, what it left fails below
        found = residual_bound(scaled, mu, factor.double())
        if found <= mu * (1.0 + excess):  # a NaN is not
            return found / scale
    return None


def residual_bound(gram: Tensor, mu: float, factor: Tensor) -> float:
    """Upper bound μ + ‖μI − G − LLᵀ‖ of the largest eigenvalue of G, whatever the numbers μ > 0 and L are.

    For a unit vector x, xᵀGx = μ − ‖Lᵀx‖² − xᵀ(μI − G − LLᵀ)x. Rounding: the product P = fl(LLᵀ) is off by at most
    γ_n|L||L|ᵀ entrywise in any order of its sums, of 2-norm at most γ_n‖L‖_F²; P + G − μI is off by u of each of its
    computed entries, on the diagonal by u(μ + entries) more. γ_n is taken with 2u for u, as for all products here.
    """
    n = gram.shape[-1]
    residual = _square(factor)
    residual += gram
    residual.diagonal().sub_(mu)
    gamma = (n + 8) * 2.0 * _U64 / (1.0 - (n + 8) * 2.0 * _U64)
    size, off = torch.stack([frobenius(factor), frobenius(residual)]).tolist()
    return (mu + off * (1.0 + 8.0 * _U64) + gamma * size * size * (1.0 + 8.0 * _U64) + 8.0 * _U64 * mu) * (
        1.0 + 8.0 * _U64
    )


def _square(factor: Tensor) -> Tensor:
    return factor @ factor.mT
