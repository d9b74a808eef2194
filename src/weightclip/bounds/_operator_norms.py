"""Certified upper bounds of ‖W‖_p for dense matrices (SOUNDNESS, section 3, "Certified ‖W‖₂").

Every function is pure, works on ``(..., m, n)`` and returns a float64 tensor of the leading shape on the weight's
device. "Certified" means: at least the true norm of the *stored* entries, with the rounding of the computation itself
included. Nothing here reads a value back to the host: on an accelerator the p = 2 norm uses Gram iteration (matrix
products only), because eigenvalue routines report their status through the host; on the CPU it uses ``eigvalsh``, which
is tighter.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from weightclip._device import constant
from weightclip.errors import CertificationError

_U64 = 2.0**-53
_TINY = 2.0**-1000  # divisor in place of 0: a zero matrix stays zero
# Real products accumulate one rounding per term; a complex product does at most four times as much arithmetic.
_COMPLEX = 4.0
_CHOLESKY = 512  # order from which a Cholesky factor proves a bound in a fraction of the time all eigenvalues take


def frobenius(weight: Tensor) -> Tensor:
    """Upper bound of the Frobenius norm over all entries (0-dim float64)."""
    weight = weight.detach()
    norm = torch.linalg.vector_norm(weight, dtype=_wide(weight.dtype))
    return norm * (1.0 + (weight.numel() + 4) * _U64)


def dense_norm(weight: Tensor, p: float = 2) -> Tensor:
    """Certified upper bound of ‖W‖_p, p in {1, 2, inf}, batched over leading dimensions.

    Args:
        weight: ``(..., m, n)``, mapping n to m. Entries are taken as stored: pass the cast weights if the forward
            casts.
        p: 1 (largest column sum), 2 (largest singular value) or ``math.inf`` (largest row sum).

    Returns:
        float64 tensor of the leading shape. A NaN entry gives NaN, an infinite one inf (or NaN), an empty matrix 0.
    """
    weight = weight.detach()
    if weight.dim() < 2:
        raise CertificationError(f"operator norm of a {weight.dim()}-D tensor: expected a matrix (..., m, n)")
    check_p(p)
    if p == 2:
        return spectral_norm(weight)
    if weight.numel() == 0:
        return _zeros(weight)
    summed = -2 if p == 1 else -1
    sums = weight.abs().sum(summed, dtype=torch.float64)
    return sums.amax(-1) * (1.0 + (weight.shape[summed] + 4) * _U64)


def spectral_norm(weight: Tensor) -> Tensor:
    """Certified upper bound of the largest singular value: ``eigvalsh`` on the CPU, Gram iteration elsewhere."""
    if weight.numel() == 0:
        return _zeros(weight)
    if weight.device.type != "cpu":
        return gram_iteration(weight)
    one = _by_numbers(weight)
    return _by_eigenvalues(weight) if one is None else torch.tensor(one, dtype=torch.float64)


def spectral_number(matrix: Tensor) -> float:
    """:func:`spectral_norm` of one matrix as a plain number; on a device this waits."""
    one = _by_numbers(matrix) if matrix.device.type == "cpu" else None
    return float(spectral_norm(matrix)) if one is None else one


def gram_iteration(
    weight: Tensor, iterations: int | None = None, dtype: torch.dtype = torch.float64, moderate: bool = False
) -> Tensor:
    """Certified upper bound of the largest singular value by Gram iteration: matrix products only, batched.

    A₀ = W, A_{j+1} = A_jᴴA_j has ‖A_{j+1}‖₂ = ‖A_j‖₂², so ‖W‖₂ = ‖A_J‖₂^(1/2^J) ≤ ‖A_J‖_F^(1/2^J), which approaches
    ‖W‖₂ from above: the excess is at most the factor n^(1/2^(J+1)), n the smaller side. Each A_j is rescaled to
    Frobenius norm 1, so nothing overflows. With rounding, ‖Â_j‖₂² ≤ ‖fl(Â_jᴴÂ_j)‖₂ + γ‖Â_j‖_F²; running that recursion
    backwards from ‖Â_J‖₂ ≤ ‖Â_J‖_F makes the result an upper bound in either precision.

    Args:
        weight: ``(..., m, n)``, real or complex.
        iterations: number J of products; None takes as many as bring the excess below 1e-4.
        dtype: float64, or float32 (faster; the margin is then of order rank · n · 2⁻²⁴).
        moderate: matrices are float64, known to have entries between 1e-100 and 1e100 (or zero, but not all). They are
            not scaled first, and the recursion is closed to a product: a third of the launches.

    Returns:
        float64 tensor of the leading shape.
    """
    if dtype not in (torch.float64, torch.float32):
        raise CertificationError(f"gram_iteration in {dtype}: only float64 and float32 have a rounding margin here")
    if dtype == torch.float32 and torch.is_autocast_enabled(weight.device.type):  # it would round what is multiplied
        with torch.autocast(weight.device.type, enabled=False):
            return gram_iteration(weight, iterations, dtype)
    weight = weight.detach()
    if weight.numel() == 0:
        return _zeros(weight)
    if weight.shape[-2] < weight.shape[-1]:
        weight = weight.mH
    k, n = weight.shape[-2:]
    if iterations is None:
        iterations = max(1, math.ceil(math.log2(max(math.log(n), 1e-4) / 1e-4)) - 1)
    if iterations < 1:
        raise CertificationError(f"gram_iteration needs at least 1 iteration, got {iterations}")

    u, operand = _roundoff(dtype, weight.device)
    factor = _COMPLEX if weight.is_complex() else 1.0
    if 2.0 * (k + 8) * u > 1.0:
        raise CertificationError(f"gram_iteration over {k} terms has no margin in {dtype}: use dtype=torch.float64")
    if moderate and weight.dtype == dtype == torch.float64:
        return _by_products(weight, iterations, factor)
    a, largest = _scaled(weight)
    f_0 = _fro(a)
    f = f_0
    scales = []
    for j in range(iterations):
        a = a / f.clamp_min(_TINY)[..., None, None]
        if j == 0:
            a = a.to(dtype.to_complex() if a.is_complex() else dtype)
        a = a.mH @ a
        f = _fro(a)
        scales.append(f)
    b = f * (1.0 + (n * n + 4) * _U64)  # ‖fl(Â_{J-1}ᴴÂ_{J-1})‖₂ ≤ its Frobenius norm
    for j in range(iterations - 1, -1, -1):
        terms = (k if j == 0 else n) + 8
        gamma = factor * (2.0 * operand + terms * u / (1.0 - terms * u)) * (1.0 + operand) * (1.0 + 8.0 * u)
        # 8u: the rounding of A_j/f, at most u in a matrix of Frobenius norm 1; (√x + 2u)² ≤ x + 8u.
        b = (b + (gamma + 8.0 * u)).sqrt() * (f_0 if j == 0 else scales[j - 1])
    return _finish(b * (1.0 + (k * n + 64) * _U64), largest, f_0)


def _by_products(a: Tensor, iterations: int, factor: float) -> Tensor:
    """The recursion of :func:`gram_iteration` closed to f_0 f_1^e_1 f_2^e_2 …, in few launches.

    With Â of Frobenius norm 1, B = fl(ÂᴴÂ) and g the rounding of one product and one division, ‖Â‖₂² ≤ ‖B‖₂ + g. As
    ‖Â‖₂² ≥ 1/n, ‖B‖₂ ≥ 1/(2n), and √(b + g) ≤ √b (1 + gn). A second product C = fl(BᴴB), without scaling B first, has
    ‖B‖₂² ≤ ‖C‖₂ + 2g (‖B‖_F² ≤ 2) and ‖C‖₂ ≥ 1/(8n²) while 16gn² ≤ 1: √(c + 2g) ≤ √c (1 + 8gn²). Both together:
    ‖Â‖₂ ≤ ‖C‖₂^¼ (1 + 6gn²). Exponents fall by ½ (by ¼), so that all margins are at most the first one squared.
    """
    k, n = a.shape[-2:]
    terms = max(k, n) + 8
    g = factor * terms * _U64 / (1.0 - terms * _U64) * (1.0 + 8.0 * _U64) + 8.0 * _U64
    if 4.0 * g * n > 1.0:
        raise CertificationError(f"gram_iteration over {k} x {n} has no margin: the matrix is too large")
    pairs = 12.0 * g * n * n < 1e-5  # two products between scalings
    f, exponents = [_fro(a)], [1.0]
    a = a / f[0][..., None, None]
    for j in range(1, iterations + 1):
        a = a.mH @ a
        if j % 2 and pairs and j < iterations:
            continue
        f.append(_fro(a))
        exponents.append(2.0**-j)
        if j < iterations:
            a = a / f[-1][..., None, None]
    total = (torch.stack(f, -1).log() * constant(tuple(exponents), a.device)).sum(-1)
    # f_0 lies in float64's range, the others in [1/(8n²), 2]: |total| < 800, and log, sum and exp err by less than
    # 800·2⁻⁴⁸ < 1e-11 together. A matrix that is not finite has an f_0 that is not, and the result is NaN.
    margin = (1.0 + (6.0 * g * n * n if pairs else g * n)) ** 2
    return total.exp() * (margin * (1.0 + (k * n + n * n + 64) * _U64 + 1e-11))


def check_p(p: float) -> None:
    """Refuse exponents other than 1, 2 and inf."""
    if p not in (1, 2, math.inf):
        raise CertificationError(f"operator norm for p={p!r}: only p = 1, 2 and math.inf have certified bounds")


def _by_numbers(weight: Tensor) -> float | None:
    """As :func:`_by_eigenvalues`, where one real matrix of float32 or narrower is finite: the usual case of a step.

    Plain floats take a third of the time of tensors. ‖G‖_F is at most the trace, but for rounding.
    """
    if weight.dim() != 2 or weight.dtype == torch.float64 or weight.is_complex() or weight.numel() == 0:
        return None
    a = weight.detach().double()
    gram = a @ a.t() if a.shape[0] < a.shape[1] else a.t() @ a
    of_trace, of_gram = _error(a.shape[0], a.shape[1])
    if gram.shape[0] == 2:
        (p, q), (_, r) = gram.tolist()
        total, top = p + r, (p + r) / 2 + math.hypot((p - r) / 2, q)
    else:
        total = float(gram.trace())
        top = _top(gram) if math.isfinite(total) else 0.0  # LAPACK raises on NaN
    if not math.isfinite(total):
        return None
    return math.sqrt(top + (of_trace + of_gram) * total * (1.0 + 1e-9)) * (1.0 + 8.0 * _U64)


def _error(rows: int, columns: int, factor: float = 1.0) -> tuple[float, float]:
    """Error of the largest eigenvalue of the smaller Gram matrix, as shares of its trace and of its Frobenius norm.

    Product: |error| ≤ γ_k |A|ᴴ|A|, of 2-norm ≤ γ_k ‖A‖_F². Eigenvalues: n Householder steps, each γ_n‖G‖_F backward
    error, and as many sweeps of rotations: c·n²·u·‖G‖_F.
    """
    k, n = max(rows, columns), min(rows, columns)
    return factor * _U64 * (k + 8), factor * _U64 * 8.0 * n * n


def _by_eigenvalues(weight: Tensor) -> Tensor:
    """Square root of the largest eigenvalue of the smaller Gram matrix, in float64, plus its error bounds."""
    a, largest = _scaled(weight)
    if a.shape[-2] < a.shape[-1]:
        a = a.mH
    gram = a.mH @ a
    of_trace, of_gram = _error(a.shape[-2], a.shape[-1], _COMPLEX if a.is_complex() else 1.0)
    trace = gram.diagonal(dim1=-2, dim2=-1).real.sum(-1)  # ‖W‖_F², and not finite exactly when an entry is not
    # eigvalsh raises on NaN, which would be an error that depends on values: hand it zeros, and put the NaN back below.
    gram = torch.where(trace.isfinite()[..., None, None], gram, torch.zeros_like(gram))
    top = torch.linalg.eigvalsh(gram)[..., -1].clamp_min(0.0)
    error = of_trace * trace + of_gram * _fro(gram)
    return _finish((top + error).sqrt() * (1.0 + 8.0 * _U64), largest, trace)


def largest_eigenvalues(gram: Tensor) -> Tensor:
    """Certified upper bounds of the largest eigenvalues of symmetric matrices (..., n, n), float64 on the CPU.

    Only the lower triangle counts. A matrix that is not finite gives NaN or inf.
    """
    n = gram.shape[-1]
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1) + gram.abs().amax((-2, -1)) * 0.0  # not finite if an entry is not
    gram = torch.where(trace.isfinite()[..., None, None], gram, torch.zeros_like(gram))
    tops = [_top(matrix) for matrix in gram.reshape(-1, n, n)]
    top = torch.tensor(tops, dtype=torch.float64).reshape(trace.shape)
    return torch.where(trace.isfinite(), top + _U64 * 8.0 * n * n * _fro(gram), trace)


def _top(gram: Tensor) -> float:
    """The largest eigenvalue of a symmetric matrix as LAPACK finds it; of a large one an upper bound.

    If the Cholesky factorisation of A = μI − G runs to its end, the computed factor has RᵀR = A + E with
    ‖E‖₂ ≤ γ‖R‖_F² ≤ γ·tr A/(1 − γ), γ = (n + 1)u/(1 − (n + 1)u), whatever the order of its sums (Higham, Accuracy and
    Stability, theorem 10.3); forming the diagonal of A adds uμ. RᵀR is positive semidefinite, so
    λ_max(G) ≤ μ + ‖E‖₂ + 2uμ, and tr A ≤ nμ for G with a nonnegative trace. The guess of μ needs no proof.
    """
    n = gram.shape[-1]
    if n >= _CHOLESKY and float(gram.trace()) > 0:
        guess = lanczos(gram)
        for excess in (1e-6, 1e-5, 1e-4, 1e-3):
            mu = guess * (1.0 + excess)
            shifted = -gram
            shifted.diagonal().add_(mu)
            if mu > 0 and int(torch.linalg.cholesky_ex(shifted).info) == 0:
                return mu * (1.0 + (n * (n + 2) + 8) * _U64 * (1.0 + 1e-6))
    return max(0.0, float(torch.linalg.eigvalsh(gram)[-1]))


def lanczos(gram: Tensor, steps: int = 48) -> float:
    """A lower estimate of the largest eigenvalue, from a fixed starting vector; one number is read back, at the end."""
    n = gram.shape[-1]
    places = torch.arange(n, dtype=torch.float64, device=gram.device)
    basis = torch.zeros(steps + 1, n, dtype=torch.float64, device=gram.device)
    start = torch.cos(places * places * 0.37) + 1.3
    basis[0] = start / start.norm()
    diagonal, beside = [], []
    for j in range(steps):
        w = gram @ basis[j]
        diagonal.append(w @ basis[j])
        for _ in range(2):  # twice is enough to keep the basis orthogonal
            w = w - basis[: j + 1].T @ (basis[: j + 1] @ w)
        size = w.norm()
        usable = size > 1e-13 * diagonal[0].abs()  # else the space is complete: zeros from here on
        beside.append(torch.where(usable, size, torch.zeros_like(size)))
        basis[j + 1] = torch.where(usable, w / size, torch.zeros_like(w))
    small = torch.diag(torch.stack(diagonal))
    off = torch.stack(beside[:-1])
    numbers = (small + torch.diag(off, 1) + torch.diag(off, -1)).cpu()
    if not bool(numbers.isfinite().all()):  # LAPACK raises on NaN
        return math.nan
    return float(torch.linalg.eigvalsh(numbers)[-1])


def _finish(bound: Tensor, largest: Tensor | None, total: Tensor) -> Tensor:
    """Undo the scaling, and let non-finite entries through: the bound is never a guess."""
    if largest is not None:
        bound = bound * largest * (1.0 + 8.0 * _U64)
        total = total + largest
    return torch.where(total.isfinite(), bound, total)


def _scaled(weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """Cast to float64; float64 entries are divided by the largest, so that squares neither overflow nor vanish."""
    a = weight.to(_wide(weight.dtype))
    if weight.dtype != a.dtype:
        return a, None  # squares of float32 and narrower are far inside float64's range
    largest = a.abs().amax((-2, -1))
    return a / torch.where(largest > 0, largest, torch.ones_like(largest))[..., None, None], largest


def _fro(a: Tensor) -> Tensor:
    return torch.linalg.vector_norm(a, dim=(-2, -1), dtype=_wide(a.dtype)).real


def _zeros(weight: Tensor) -> Tensor:
    return torch.zeros(weight.shape[:-2], dtype=torch.float64, device=weight.device)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def _roundoff(dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """(unit roundoff of sums, relative rounding of operands) of a matrix product in this dtype on this device."""
    if dtype == torch.float64:
        return _U64, 0.0
    precision = torch.get_float32_matmul_precision()
    if precision == "medium":
        return 2.0**-22, 2.0**-7  # operands may become bfloat16
    if precision == "high" or device.type != "cpu":
        return 2.0**-22, 2.0**-10  # operands may become TF32, by truncation at worst
    return 2.0**-24, 0.0
