"""Whitening of channels by public pictures, and unit vectors: what all feature maps share."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Whitening(nn.Module):
    """x -> (C + ridge I)^(-1/2) (x - mean) over channels, mean and C from synthetic pictures."""

    mean: Tensor
    matrix: Tensor

    def __init__(self, x: Tensor, ridge: float) -> None:
        super().__init__()
        rows = x.movedim(1, -1).flatten(0, -2).double()  # (records, positions) x channels
        mean = rows.mean(0)
        covariance = (rows - mean).t() @ (rows - mean) / len(rows)
        values, vectors = torch.linalg.eigh(covariance)
        floor = ridge * values.mean()
        self.register_buffer("mean", mean.float())
        self.register_buffer("matrix", ((vectors * (values.clamp_min(0) + floor).rsqrt()) @ vectors.t()).float())

    def forward(self, x: Tensor) -> Tensor:
        shape = (1, -1, *(1,) * (x.dim() - 2))
        return torch.einsum("oc,nc...->no...", self.matrix, x - self.mean.view(shape))


def unit(x: Tensor) -> Tensor:
    """Each record divided by its norm."""
    size = row_sums(x.flatten(1).square()).clamp_min(1e-12).rsqrt()
    return x * size.view(-1, *(1,) * (x.dim() - 1))


def row_sums(x: Tensor) -> Tensor:
    """Sums over the last dimension, whose rounding does not depend on a row's number.

    A GPU adds four numbers at a time from the first address that is a multiple of 16 bytes. Where a row's length is no
    multiple of four that address differs from row to row, and with it the order of the sum; rows are padded by zeros.
    """
    return nn.functional.pad(x, (0, -x.shape[-1] % 8)).sum(-1)


def normalised(x: Tensor, alpha: float) -> Tensor:
    """``(x - mean) / max(alpha, std)`` over the last dimension, as `weightclip.nn.safe_normalise`, by `row_sums`."""
    count = x.shape[-1]
    centred = x - row_sums(x).unsqueeze(-1) / count
    variance = row_sums(centred.square()).unsqueeze(-1) / count
    return centred * variance.clamp_min(alpha * alpha).rsqrt()


def tamed(maps: Tensor, power: float, smooth: int) -> Tensor:
    """Sizes to a power, signs kept; then each cell gets the mean of its 3 x 3 neighbourhood, ``smooth`` times."""
    if power != 1:
        maps = maps.sign() * maps.abs() ** power
    for _ in range(smooth):
        maps = maps + nn.functional.avg_pool2d(maps, 3, 1, 1)
    return maps
