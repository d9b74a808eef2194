"""Algorithms 1 and 2 as printed, for many dense networks at once: weights stacked over runs, batched products.

Pure functions over tensors whose first dimension counts runs (seeds or settings), so that a search over the printed
algorithm costs little more than one run. They share every flaw listed in :mod:`weightclip_studies.printed`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from weightclip_studies.printed._algorithms import PerRecord, cross_entropy


def stacked_poisson(records: int, rate: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """A Poisson batch per run, empty ones redrawn (flaw 6), padded to the largest.

    Args:
        records: Number of records n.
        rate: Sampling rate of each run (R).
        generator: Source of the draws.

    Returns:
        Indices (R x B; padding points at record 0) and a mask (R x B) of the real ones.
    """
    chosen = torch.rand(len(rate), records, generator=generator) < rate[:, None]
    while (empty := ~chosen.any(1)).any():
        chosen[empty] = torch.rand(int(empty.sum()), records, generator=generator) < rate[empty, None]
    run, index = chosen.nonzero(as_tuple=True)
    size = chosen.sum(1)
    place = torch.arange(len(run)) - (size.cumsum(0) - size)[run]
    indices = torch.zeros(len(rate), int(size.max()), dtype=torch.long)
    indices[run, place] = index
    return indices, torch.arange(indices.shape[1]) < size[:, None]


@torch.no_grad()
def stacked_clip_weights(
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    max_norm: float | Tensor,
    *,
    fixed: bool = False,
    power_iterations: int = 5,
    generator: torch.Generator | None = None,
) -> Tensor:
    """ClipWeights of Algorithm 1 (p = 2, power iteration), in place.

    Args:
        weights: Per layer, R x out x in.
        biases: Per layer, R x out.
        max_norm: C, one for all runs or one each (R).
        fixed: Fix-Lip-DP-SGD.
        power_iterations: Steps of power iteration.
        generator: Source of its random starting vectors.

    Returns:
        ``c_k`` (R x K).
    """
    C = torch.as_tensor(max_norm, dtype=weights[0].dtype).expand(len(weights[0]))
    gains = []
    for W, b in zip(weights, biases, strict=True):
        v = torch.randn(W.shape[0], W.shape[2], 1, generator=generator).to(W)
        for _ in range(power_iterations):
            u = F.normalize(W @ v, dim=1)
            v = F.normalize(W.mT @ u, dim=1)
        norm = (W @ v).norm(dim=(1, 2))
        c_k = C if fixed else torch.minimum(C, norm)
        scale = torch.where(norm > 0, c_k / norm, torch.ones_like(norm))
        W.mul_(scale[:, None, None])
        b.mul_(scale[:, None])
        gains.append(c_k)
    return torch.stack(gains, 1)


def stacked_lip_step(
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    inputs: Tensor,
    targets: Tensor,
    mask: Tensor,
    *,
    gains: Tensor,
    tau: float | Tensor,
    noise_multiplier: float | Tensor,
    between: Callable[[Tensor], Tensor] = torch.relu,
    loss: PerRecord = cross_entropy,
    generator: torch.Generator | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """The noisy gradients of Algorithm 1 for every run, each on its own batch.

    Formal guarantees: none; what the algorithm reports is a *claimed* epsilon.

    Args:
        weights: Per layer, R x out x in.
        biases: Per layer, R x out.
        inputs: R x B x d.
        targets: R x B.
        mask: R x B, false for padding.
        gains: ``c_k`` (R x K), from :func:`stacked_clip_weights`.
        tau: Lipschitz value of the loss, one or one per run.
        noise_multiplier: sigma, one or one per run.
        between: What stands between two dense layers, acting on (records x width); its gain counts as 1 (flaw 9).
        loss: Loss per record.
        generator: Source of the noise.

    Returns:
        Gradients of the weights and of the biases, per layer.
    """
    runs, batch = mask.shape
    Ws, bs = ([p.detach().requires_grad_() for p in group] for group in (weights, biases))
    h, X = inputs, []
    for k, (W, b) in enumerate(zip(Ws, bs, strict=True)):
        if k:
            h = between(h.flatten(0, 1)).view(runs, batch, -1)
        X.append((h.detach().norm(dim=2) * mask).amax(1))  # largest input norm of each run's batch
        h = torch.baddbmm(b[:, None], h, W.mT)
    total = (loss(h.flatten(0, 1), targets.flatten()) * mask.flatten()).sum()
    sums = torch.autograd.grad(total, [*Ws, *bs])
    # Delta_k = tau * prod_{i >= k} c_i
    delta = gains.flip(1).cumprod(1).flip(1) * torch.as_tensor(tau, dtype=gains.dtype).expand(runs)[:, None]
    std = delta * torch.as_tensor(noise_multiplier, dtype=gains.dtype).expand(runs)[:, None]
    size = mask.sum(1)

    def release(k: int, g: Tensor) -> Tensor:
        shape = (runs,) + (1,) * (g.dim() - 1)
        scale = torch.where(X[k] > 0, 1 / X[k], torch.ones_like(X[k]))
        noise = std[:, k].view(shape) * torch.randn(g.shape, generator=generator).to(g)
        return (g * scale.view(shape) + noise) / size.view(shape)

    K = len(Ws)
    return [release(k, sums[k]) for k in range(K)], [release(k, sums[K + k]) for k in range(K)]


def stacked_dpsgd_step(
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    inputs: Tensor,
    targets: Tensor,
    mask: Tensor,
    *,
    max_gradient_norm: Tensor,
    noise_multiplier: Tensor,
    between: Callable[[Tensor], Tensor] = torch.relu,
    loss: PerRecord = cross_entropy,
    generator: torch.Generator | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """The noisy gradients of Algorithm 2 for every run: each *layer* of a record clipped to C, noise sigma C on each.

    A record's gradient of a dense layer is the product of its input (with the bias's 1) and its cotangent, so that its
    norm is the product of theirs and no gradient of a single record is formed.

    Formal guarantees: none; what the algorithm reports is a *claimed* epsilon.

    Args:
        weights: Per layer, R x out x in.
        biases: Per layer, R x out.
        inputs: R x B x d.
        targets: R x B.
        mask: R x B, false for padding.
        max_gradient_norm: C of each run (R).
        noise_multiplier: sigma of each run (R).
        between: What stands between two dense layers, acting on (records x width).
        loss: Loss per record.
        generator: Source of the noise.

    Returns:
        Gradients of the weights and of the biases, per layer.
    """
    runs, batch = mask.shape
    h, seen, outputs = inputs, [], []
    for k, (W, b) in enumerate(zip(weights, biases, strict=True)):
        if k:
            h = between(h.flatten(0, 1)).view(runs, batch, -1)
        seen.append(h.detach())
        h = torch.baddbmm(b.detach()[:, None], h, W.detach().mT)
        if k == 0:
            h.requires_grad_()  # cotangents are asked for from here on
        outputs.append(h)
    total = (loss(h.flatten(0, 1), targets.flatten()) * mask.flatten()).sum()
    cotangents = torch.autograd.grad(total, outputs)
    C, size, std = max_gradient_norm, mask.sum(1), noise_multiplier * max_gradient_norm
    grads_w, grads_b = [], []
    for x, delta in zip(seen, cotangents, strict=True):
        norm = (x.square().sum(2) + 1).sqrt() * delta.norm(dim=2)
        delta = delta * (C[:, None] / norm.clamp_min(1e-30)).clamp_max(1.0)[:, :, None]
        for found, g in ((grads_w, delta.mT @ x), (grads_b, delta.sum(1))):
            shape = (runs,) + (1,) * (g.dim() - 1)
            noise = std.view(shape) * torch.randn(g.shape, generator=generator).to(g)
            found.append((g + noise) / size.view(shape))
    return grads_w, grads_b
