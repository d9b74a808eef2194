"""The B-Lipschitz envelope of cross-entropy: the p of SOUNDNESS Theorem 20, from which it and its gradient follow.

With a multiplier t for the ball ||p − y||₂ ≤ B and λ for the simplex the optimality condition is
log p + t·p = z + t·y − λ,  that is t·p = ω(log t + z + t·y − λ), ω the Wright omega function. For a given t, Σp is
convex and decreasing in λ: Newton converges from any start. ||p(t) − y|| falls in t, and its inverse is nearly a
straight line beyond the solution, so a bracketed Newton on 1/||p − y|| finds t in a few steps.

For an index label j there is one unknown only. With κ = log t − λ the entries w_c = t·p_c = ω(z_c + κ), c ≠ j, do not
involve t; the ball gives t = ||(Σw, w)||₂/B, and p_j = 1 − Σw/t turns the condition at j into

    R(κ) = log(t − Σw) − Σw − z_j − κ = 0,

which, with all wrong classes tied, is linear in x = ω(κ): a bracketed Newton in x is all it takes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_OUTER, _INNER, _FIRST, _INDEX = 14, 4, 8, 10  # fixed counts: running time must not depend on the data


def constrained_softmax(v: Tensor, y: Tensor, radius: Tensor, one_hot: bool = False) -> Tensor:
    """Maximise <p, v> + H(p) over the simplex within l2 distance `radius` of `y`.

    Args:
        v: logits, classes on the last dimension, float64.
        y: points of the simplex, like `v`.
        radius: distance allowed for each row, shape (..., 1).
        one_hot: every row of `y` is a unit vector and every radius that binds is at most 1 (about six times faster).

    Returns:
        p like `v`, equal to softmax(v) where that is already within the radius. Rows are independent. Nothing that
        touches privacy relies on convergence: the caller projects p − y on the ball once more.
    """
    plain = torch.softmax(v, -1)
    distance = torch.linalg.vector_norm(plain - y, dim=-1, keepdim=True)
    if v.shape[-1] == 2:  # a segment: the constraint simply stops p on the way from y
        return y + (plain - y) * (radius / distance).clamp(max=1)
    with torch.no_grad():
        p = _index_solution(v, y, radius) if one_hot else _solution(v, y, radius)
        p = p / _sum(p)
    return torch.where(distance <= radius, plain, p)


def _index_solution(v: Tensor, y: Tensor, B: Tensor) -> Tensor:
    own = y > 0
    v = v - torch.where(own, -math.inf, v).amax(-1, keepdim=True)
    v_j = _sum(y * v)
    v = torch.where(own, -math.inf, v)
    e = torch.exp(v)
    tiny = torch.finfo(v.dtype).tiny
    start = torch.log((_length(e) / B - _sum(e)).clamp(min=tiny)) - v_j  # R at κ = −∞, positive where B binds
    x = (start / 2).clamp(min=1e-12)  # the solution for one wrong class
    lo, hi = torch.zeros_like(x), torch.full_like(x, math.inf)
    w = e
    for _ in range(_INDEX):
        kappa = x + torch.log(x)
        w = _omega(v + kappa)
        dw = w / (1 + w)
        total, length, dtotal = _sum(w), _length(w), _sum(dw)
        rest = length / B - total  # ≥ 0 for B ≤ 1
        residual = torch.log(rest.clamp(min=tiny)) - total - v_j - kappa
        slope = ((total * dtotal + _sum(w * dw)) / (length * B) - dtotal) / rest - dtotal - 1
        lo, hi = torch.where(residual > 0, x, lo), torch.where(residual > 0, hi, x)
        new = x - residual / (slope * (1 + 1 / x))
        inside = (new >= lo) & (new <= hi) & (new > 0)
        x = torch.where(inside, new, torch.where(hi < math.inf, (lo + hi) / 2, 2 * x))
    p = w * (B / length)
    return torch.where(own, 1 - _sum(p), p)


def _length(w: Tensor) -> Tensor:
    return (_sum(w) ** 2 + _sum(w**2)).sqrt()


def _solution(v: Tensor, y: Tensor, B: Tensor) -> Tensor:
    v = v - v.amax(-1, keepdim=True)
    excess = _sum(torch.xlogy(y, y) - y * v) + torch.logsumexp(v, -1, keepdim=True)  # l(v) − min l
    t = hi = (excess / B**2).clamp(min=1e-12)  # t·B² = B·||z − u|| ≤ l(z) − l(u)
    lo = torch.zeros_like(hi)
    lam = (v + t * y).amax(-1, keepdim=True) - t
    p = y
    for step in range(_OUTER):
        a = v + t * y
        # 1/C ≤ max p ≤ 1 brackets λ.
        top = a.amax(-1, keepdim=True)
        lam_lo, lam_hi = top - t, top + math.log(v.shape[-1]) - t / v.shape[-1]
        a = a + torch.log(t)
        for _ in range(_FIRST if step == 0 else _INNER):
            lam = lam.clamp(lam_lo, lam_hi)
            p = _omega(a - lam) / t
            s = p / (1 + t * p)  # −∂p/∂λ
            total, mass = _sum(s), _sum(p) - 1
            lam = lam + mass / total
        g = p - y
        n = torch.linalg.vector_norm(g, dim=-1, keepdim=True)
        sg = _sum(s * g)
        slope = (_sum(s * g * g) - sg**2 / total) / n  # −∂n/∂t
        solved = mass.abs() < 1e-6
        lo = torch.where(solved & (n > B), torch.maximum(lo, t), lo)
        hi = torch.where(solved & (n < B), torch.minimum(hi, t), hi)
        new = t - n**2 / slope * (1 / n - 1 / B)  # Newton on 1/n
        inside = (new >= lo * (1 - 1e-12)) & (new <= hi * (1 + 1e-12))
        new = torch.where(inside, new, torch.where(lo > 0, (lo * hi).sqrt(), t / 8))
        new = torch.where(solved, new, t)
        lam = lam - sg / total * (new - t)
        t = new
    return p


def _sum(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True)


def _omega(x: Tensor) -> Tensor:
    """Wright omega function: the w with w + log w = x. Two steps of a fourth-order iteration on a rough start."""
    small = torch.exp(torch.minimum(x, (x - 1) * (2 / 3)).clamp(max=1))
    w = torch.where(x > 1, x - torch.log(x.clamp(min=1)), small).clamp(min=1e-300)
    for _ in range(2):
        r = x - w - torch.log(w)
        q = 1 + w
        s = 2 * q * (q + 2 / 3 * r)
        w = w * (1 + r / q * (s - r) / (s - 2 * r))
    return torch.where(x < -40, torch.exp(x), w)
