"""The printed Lip-DP-SGD, Fix-Lip-DP-SGD and DP-SGD, in stacks for the tables. Their ε is *claimed*, nothing more."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from weightclip_studies.printed import stacked_clip_weights, stacked_dpsgd_step, stacked_lip_step, stacked_poisson

from ._stacked import GroupNorm, normalise


@dataclass(frozen=True)
class PrintedSettings:
    """One run of Algorithm 1, or of Algorithm 2 where ``clip`` is given.

    Attributes:
        width: Hidden units.
        batch: Expected batch size s.
        steps: T.
        lr: Learning rate of Adam at the first step.
        final_lr: At the end, as a part of ``lr``.
        averaging: Decay of the average of the weights.
        weight_norm: C.
        sigma: Claimed noise multiplier.
        fixed: Fix-Lip-DP-SGD.
        norm: Group normalisation, whose gain the paper counts as 1.
        clip: Of each layer's gradient, for Algorithm 2: weights are then left alone.
    """

    width: int
    batch: int
    steps: int
    lr: float
    weight_norm: float
    sigma: float
    final_lr: float = 1.0
    averaging: float = 0.0
    fixed: bool = False
    norm: GroupNorm | None = None
    clip: float | None = None


def train_printed(
    X: np.ndarray, y: np.ndarray, settings: Sequence[PrintedSettings], seeds: Sequence[int], classes: int
) -> list[list[list[Tensor]]]:
    """Train every setting with every seed; by setting, then seed: W_1, b_1, W_2, b_2.

    Formal guarantees: none; see the flaws listed in `weightclip_studies.printed`.
    """
    stacks: dict[tuple, list[int]] = defaultdict(list)
    for i, s in enumerate(settings):
        stacks[(s.width, s.batch, s.steps, s.fixed, s.norm.groups if s.norm else 0, s.clip is None)].append(i)
    results: list[list[list[Tensor]]] = [[] for _ in settings]
    inputs, labels = torch.as_tensor(X, dtype=torch.float32), torch.as_tensor(y).long()
    for members in stacks.values():
        chosen = [settings[i] for i in members]
        average = _stack(inputs, labels, chosen, seeds, classes)
        for place, i in enumerate(members):
            results[i] = [[p[s * len(chosen) + place] for p in average] for s in range(len(seeds))]
    return results


def _stack(
    X: Tensor, y: Tensor, settings: Sequence[PrintedSettings], seeds: Sequence[int], classes: int
) -> list[Tensor]:
    """Runs ordered by seed, then setting. A seed's settings share start and batches; noise is drawn for all at once."""
    first, each, features = settings[0], len(settings), X.shape[1]
    draws = [torch.Generator().manual_seed(7919 * seed + 17) for seed in seeds]
    generator = torch.Generator().manual_seed(hash((tuple(seeds), each)) % 2**63)
    runs = len(seeds) * each
    settings = [*settings] * len(seeds)

    def vector(values) -> Tensor:
        return torch.tensor(list(values), dtype=torch.float32)

    def spread(by_seed: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(by_seed)).repeat_interleave(each, 0)

    shapes = [(first.width, features), (first.width,), (classes, first.width), (classes,)]
    fans = [features, features, first.width, first.width]
    params = [
        spread([(2 * torch.rand(shape, generator=g) - 1) / math.sqrt(fan) for g in draws])
        for shape, fan in zip(shapes, fans, strict=True)
    ]
    weights, biases = params[0::2], params[1::2]
    sigma = vector(s.sigma for s in settings)
    C = vector(s.weight_norm if s.clip is None else s.clip for s in settings)
    lr, final = vector(s.lr for s in settings), vector(s.final_lr for s in settings)
    keep = vector(s.averaging for s in settings)
    alpha = vector(s.norm.alpha if s.norm else 1.0 for s in settings)[:, None, None, None]

    def between(z: Tensor) -> Tensor:
        if first.norm is None:
            return torch.relu(z)
        return normalise(z.view(runs, -1, z.shape[1]), first.norm.groups, alpha)[0].relu().flatten(0, 1)

    def clip() -> Tensor:
        if first.clip is not None:
            return C
        return stacked_clip_weights(weights, biases, C, fixed=first.fixed, generator=generator)

    gains = clip()
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in params]
    average = [p.clone() for p in params]
    rate = torch.full((1,), min(1.0, first.batch / len(X)))
    for t in range(first.steps):
        batches = [stacked_poisson(len(X), rate, g)[0][0] for g in draws]
        size = max(len(batch) for batch in batches)
        index = spread([F.pad(batch, (0, size - len(batch))) for batch in batches])
        mask = spread([torch.arange(size) < len(batch) for batch in batches])
        batch = (weights, biases, X[index], y[index], mask)
        if first.clip is None:
            gw, gb = stacked_lip_step(*batch, gains=gains, tau=math.sqrt(2), noise_multiplier=sigma, between=between,
                                      generator=generator)  # fmt: skip
        else:
            gw, gb = stacked_dpsgd_step(*batch, max_gradient_norm=C, noise_multiplier=sigma, between=between,
                                        generator=generator)  # fmt: skip
        step = lr * (1 - (1 - final) * t / first.steps)
        for p, (m, v), g in zip(params, moments, _interleave(gw, gb), strict=True):
            shape = (-1,) + (1,) * (p.dim() - 1)
            m.lerp_(g, 0.1)
            v.mul_(0.999).addcmul_(g, g, value=0.001)
            root = (v / (1 - 0.999 ** (t + 1))).sqrt_().add_(1e-8)
            p -= step.view(shape) * (m / (1 - 0.9 ** (t + 1)) / root)
        gains = clip()
        for p, mean in zip(params, average, strict=True):
            past = torch.zeros_like(keep) if t == 0 else keep
            mean.lerp_(p, (1 - past).view((-1,) + (1,) * (p.dim() - 1)).expand_as(p))
    return average


def _interleave(first: Sequence[Tensor], second: Sequence[Tensor]) -> list[Tensor]:
    return [g for pair in zip(first, second, strict=True) for g in pair]


def printed_logits(params: Sequence[Tensor], norm: GroupNorm | None, X: np.ndarray) -> Tensor:
    """Outputs of one trained network.  # records x classes"""
    w1, b1, w2, b2 = params
    z = F.linear(torch.as_tensor(X, dtype=torch.float32), w1, b1)
    if norm is not None:
        z = normalise(z, norm.groups, norm.alpha)[0]
    return F.linear(z.relu(), w2, b2)
