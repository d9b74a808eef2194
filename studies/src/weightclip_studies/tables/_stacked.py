"""Stacks of two-layer networks for the study: dense, optionally safe group normalisation, ReLU, dense.

The mechanism (draws, noise, optimiser, ClipWeights, average) is that of `fast_mlp`. Two things are added:
the group normalisation of the paper's detailed table, with its gain 1/α and the free bound √width on what it puts out
(SOUNDNESS section 3), and sums formed in pieces of records that stay in the processor's cache, in float32 while
searching (the choice is not a release) and in float64 for every reported run (SOUNDNESS section 6).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from weightclip.errors import WeightclipError
from weightclip.nn import safe_normalise
from weightclip.noise import Streams
from weightclip_studies.fast_mlp import Budget, Objective, Run, Settings
from weightclip_studies.fast_mlp._bounds import scales
from weightclip_studies.fast_mlp._data import Data
from weightclip_studies.fast_mlp._settings import noise_multiplier
from weightclip_studies.fast_mlp._train import _Stack

_PIECE = 1 << 16  # hidden values per piece of records, over all runs: a quarter of a megabyte in float32


@dataclass(frozen=True)
class GroupNorm:
    """Safe group normalisation of the hidden layer: ``groups`` groups, divisor max(alpha, std)."""

    groups: int
    alpha: float


def normalise(z: Tensor, groups: int, alpha: Tensor | float, dim: int = -1) -> tuple[Tensor, Tensor]:
    """(z - mean)/max(alpha, std) by group along ``dim`` (negative), and the divisor.

    Args:
        z: Values.
        groups: Number of groups.
        alpha: Floor of the divisor, broadcast against z with ``dim`` split into (groups, 1).
        dim: Dimension of the units.
    """
    parts = z.unflatten(dim, (groups, -1))
    centred = parts - parts.mean(dim, keepdim=True)
    divisor = centred.square().mean(dim, keepdim=True).sqrt()
    divisor = torch.maximum(divisor, torch.as_tensor(alpha, dtype=z.dtype))
    return (centred / divisor).flatten(dim - 1, dim), divisor


def normalise_backward(
    g: Tensor, y: Tensor, divisor: Tensor, groups: int, alpha: Tensor | float, dim: int = -1
) -> Tensor:
    """Gradient at the input of :func:`normalise` from the gradient at its output."""
    g, y = g.unflatten(dim, (groups, -1)), y.unflatten(dim, (groups, -1))
    moving = divisor > torch.as_tensor(alpha, dtype=y.dtype)  # at the floor the divisor is a constant
    inner = torch.where(moving, (g * y).mean(dim, keepdim=True), torch.zeros_like(divisor))
    return ((g - g.mean(dim, keepdim=True) - y * inner) / divisor).flatten(dim - 1, dim)


class StudyStack(_Stack):
    """Runs of one architecture, batch size and length: seeds x settings of them.

    Formal guarantees:
        One record's gradient of layer k (weights, and biases times β) has norm at most Δ_k. Without normalisation Δ_k
        is that of the parent class. With it, Δ_2 = min(B, R_2)·min(√(width + β²), X_2) and
        Δ_1 = min(B·||W_2||/α, R_1)·min(√(X² + β²), X_1), because the normalised vector has norm at most √width
        whatever its input and its gain is 1/α. In float32 these hold up to rounding, for which nothing is added:
        use float64 for anything that is reported.
    """

    def __init__(
        self,
        data: Data,
        settings: list[Settings],
        streams: list[Streams],
        objective: Objective,
        norms: Sequence[GroupNorm | None],
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__(data, settings, streams, objective, data.shape[0])
        self.dtype = dtype
        first = norms[0]
        self.groups = 0 if first is None else first.groups
        if self.layers != 2 or (self.groups and self.sizes[1] % self.groups):
            raise WeightclipError("the study's stacks have one hidden layer, whose width the groups divide.")
        self.alpha = self.vector(1.0 if norm is None else norm.alpha for norm in norms)

    def bounds(self) -> tuple[Tensor, Tensor]:
        if self.joint or not self.groups:
            return super().bounds()
        beta2 = self.beta.square()
        a1 = torch.minimum((self.input_radius.square() + beta2).sqrt(), self.layer_radius[:, 0])
        a2 = torch.minimum((self.sizes[1] + beta2).sqrt(), self.layer_radius[:, 1])
        L1 = torch.minimum(self.loss_bound * self.norms[1] / self.alpha, self.cotangent_radius[:, 0])
        L2 = torch.minimum(self.loss_bound, self.cotangent_radius[:, 1]).expand_as(L1)
        delta = self.slack * (1 + 1e-9) * torch.stack([L1 * a1, L2 * a2], -1)
        return delta, scales(delta, self.dims, self.sigma, self.settings[0].allocation)

    def summed(self, index: Tensor, mask: Tensor | None) -> Tensor:
        seeds, rows = index.shape
        runs, width = len(self.settings), self.sizes[1]
        result = torch.zeros(seeds, runs, self.dimension, dtype=torch.float64)
        weights = [(w.to(self.dtype), b.to(self.dtype)) for w, b in self.params]
        size = max(32, _PIECE // (seeds * runs * width))
        for start in range(0, rows, size):
            piece = slice(start, start + size)
            self._add(result, weights, index[:, piece], None if mask is None else mask[:, piece])
        return result

    def _add(self, result: Tensor, weights: list[tuple[Tensor, Tensor]], index: Tensor, mask: Tensor | None) -> None:
        """Adds the gradients of some records; records are the last dimension of everything here."""
        seeds, runs, width = len(self.streams), len(self.settings), self.sizes[1]
        (w1, b1), (w2, b2) = weights
        x = self.data.x.index_select(0, index.flatten()).view(*index.shape, -1).to(self.dtype)
        square = self.data.square[index][:, None, :].to(self.dtype)
        radius = self.input_radius.to(self.dtype)[:, None]
        shrink = (radius / square.sqrt().clamp(min=1e-30)).clamp(max=1.0)  # seeds x runs x records
        z = (w1.reshape(seeds, -1, self.sizes[0]) @ x.mT).view(seeds, runs, width, -1)
        z = z.mul_(shrink[:, :, None]).add_(b1[..., None])
        y = divisor = None
        alpha = self.alpha.to(self.dtype)[:, None, None, None]
        if self.groups:
            z, divisor = normalise(z, self.groups, alpha, -2)
            y = z
        h = z.relu()
        out = w2 @ h + b2[..., None]
        cap, temperature = self.cap.to(self.dtype), self.temperature.to(self.dtype)
        labels = self.data.y[index][:, None, :]
        labels = labels.to(self.dtype) if labels.is_floating_point() else labels
        d2 = self.objective.gradient(out.mT, labels, temperature, cap).mT
        if mask is not None:
            d2 = d2 * mask[:, None, None, :]
        d1 = torch.ops.aten.threshold_backward(w2.mT @ d2, h, 0)
        if y is not None and divisor is not None:
            d1 = normalise_backward(d1, y, divisor, self.groups, alpha, -2)
        beta2 = self.beta.to(self.dtype).square()[:, None]
        x_norms = [(square * shrink.square() + beta2).sqrt(), (h.square().sum(2) + beta2).sqrt()]
        f1, f2 = self._factors([d1, d2], x_norms)
        if not bool((f1 > 0).all() & (f2 > 0).all()):  # 0 times nan would not be zero
            d1, d2 = (torch.where(f[:, :, None] > 0, d, 0.0) for f, d in ((f1, d1), (f2, d2)))
            h = torch.where(f2[:, :, None] > 0, h, 0.0)
        (gw1, gb1), (gw2, gb2) = self.views(result)
        gb1 += (d1 @ f1[..., None])[..., 0]
        d1 = d1.mul_((f1 * shrink)[:, :, None]).view(seeds, runs * width, -1)
        gw1 += (d1 @ x).view_as(gw1)
        d2 = d2 * f2[:, :, None]
        gb2 += d2.sum(-1)
        gw2 += d2 @ h.mT

    def _factors(self, deltas: list[Tensor], x_norms: list[Tensor]) -> list[Tensor]:
        """One number per record and layer that bounds its gradient (SOUNDNESS section 4); 0 if it is not finite."""
        d_norms = [d.square().sum(2).sqrt() for d in deltas]  # vector_norm is slow along this dimension
        total = d_norms[0] * x_norms[0] + d_norms[1] * x_norms[1]
        if self.joint:
            t = self.joint_cap.to(self.dtype)
            parts = [d * x / t[:, k, None] for k, (d, x) in enumerate(zip(d_norms, x_norms, strict=True))]
            found = [(parts[0].square() + parts[1].square()).sqrt().clamp(min=1.0).reciprocal()] * 2
        else:
            X, R = self.layer_radius.to(self.dtype), self.cotangent_radius.to(self.dtype)
            found = [
                (X[:, k, None] / x).clamp(max=1.0) * (R[:, k, None] / d.clamp(min=1e-30)).clamp(max=1.0)
                for k, (d, x) in enumerate(zip(d_norms, x_norms, strict=True))
            ]
        return [torch.where(torch.isfinite(total), f, torch.zeros_like(f)) for f in found]


def train_stacked(
    X: np.ndarray,
    y: np.ndarray,
    settings: Sequence[Settings],
    norms: Sequence[GroupNorm | None],
    seeds: Sequence[int | Streams],
    *,
    objective: Objective,
    noise: float | Budget | Sequence[float],
    dtype: torch.dtype = torch.float64,
) -> list[list[Run]]:
    """`fast_mlp.train_many` for the study's networks: same draws, noise and guarantees; runs by setting."""
    streams = [s if isinstance(s, Streams) else Streams.seeded(s) for s in seeds]
    data = Data(X, y, objective, None, len(streams), torch.device("cpu"))
    stacks: dict[tuple, list[int]] = defaultdict(list)
    for i, (s, norm) in enumerate(zip(settings, norms, strict=True)):
        kind = None if s.joint_cap is not None else s.allocation
        stacks[(s.hidden, s.batch, float(s.epochs), s.optimizer, kind, norm.groups if norm else 0)].append(i)
    runs: list[list[Run]] = [[] for _ in settings]
    for members in stacks.values():
        chosen, own = [settings[i] for i in members], [norms[i] for i in members]
        stack = StudyStack(data, chosen, streams, objective, own, dtype)
        stack.sigma = stack.vector(noise_multiplier(noise, i, stack.q, stack.steps) for i in members)
        stack.noisy = bool((stack.sigma > 0).any())
        stack.start(None)
        for step in range(stack.steps):
            stack.step(step)
        for place, i in enumerate(members):
            runs[i] = [stack.run(place, s) for s in range(len(streams))]
    return runs


def stacked_logits(run: Run, norm: GroupNorm | None, X: np.ndarray) -> Tensor:
    """Outputs of one run divided by its temperature.  # records x outputs"""
    h = torch.as_tensor(X, dtype=torch.float32)
    radius = run.settings.input_radius
    if radius is not None:
        h = h * (radius / torch.linalg.vector_norm(h, dim=1, keepdim=True).clamp(min=radius))
    (w1, b1), (w2, b2) = run.weights
    h = torch.nn.functional.linear(h, w1, b1)
    if norm is not None:
        h = safe_normalise(h.unflatten(1, (norm.groups, -1)), norm.alpha, (2,)).flatten(1)
    return torch.nn.functional.linear(h.relu(), w2, b2) / run.settings.temperature
