"""Two-dimensional Morlet filters in the Fourier domain, and the exact gain of a subsampled filter bank.

Definitions: Bruna & Mallat, "Invariant Scattering Convolution Networks" (2013), sections 2.1 and 2.3. The constants
(bandwidth 0.8 * 2^j, centre frequency 3 pi / 4 / 2^j, slant 4 / L) are the customary ones of the scattering literature.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

BANDWIDTH = 0.8
CENTRE = 3 * math.pi / 4
# Customary implementations round pi in the mass of the Gaussian; so do we, to agree with them to float32 precision.
TWO_PI = 2 * 3.1415


def gabor(shape: tuple[int, int], sigma: float, theta: float, xi: float, slant: float) -> Tensor:
    """Gaussian envelope times a plane wave, periodised on a ``shape`` torus: complex, of unit mass for xi = 0."""
    tiles = range(-2, 3)
    cos, sin = math.cos(theta), math.sin(theta)
    total = torch.zeros(shape, dtype=torch.complex128)
    for tile_u in tiles:
        for tile_v in tiles:
            u = torch.arange(shape[0], dtype=torch.float64).unsqueeze(1) + tile_u * shape[0]
            v = torch.arange(shape[1], dtype=torch.float64).unsqueeze(0) + tile_v * shape[1]
            along, across = u * cos + v * sin, v * cos - u * sin
            envelope = torch.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2))
            total += torch.polar(envelope, xi * along)
    return total * (slant / (TWO_PI * sigma**2))


def low_pass(shape: tuple[int, int], scale: int) -> Tensor:
    """Transfer function (real, ``shape``) of the Gaussian that averages at 2^scale."""
    return torch.fft.fft2(gabor(shape, BANDWIDTH * 2 ** (scale - 1), 0.0, 0.0, 1.0)).real


def morlet(shape: tuple[int, int], scale: int, angle: int, angles: int) -> Tensor:
    """Transfer function (real, ``shape``) of the zero-mean oriented wavelet at octave ``scale``."""
    theta = math.pi * (int(angles / 2 - 1) - angle) / angles  # orientations of the half circle, in the usual order
    sigma, xi, slant = BANDWIDTH * 2**scale, CENTRE / 2**scale, 4 / angles
    wave = gabor(shape, sigma, theta, xi, slant)
    envelope = gabor(shape, sigma, theta, 0.0, slant)
    return torch.fft.fft2(wave - envelope * (wave.sum() / envelope.sum())).real


def restrict(transfer: Tensor, octaves: int) -> Tensor:
    """The same filter on the grid subsampled by 2^octaves: its transfer function at the frequencies that remain.

    The band is [-n/2, n/2) of the coarse grid, and the coarse grid reads it modulo n.
    """
    for dim in (-2, -1):
        size = transfer.shape[dim]
        kept = size >> octaves
        index = torch.arange(kept)
        index = torch.where(index < (kept + 1) // 2, index, index + size - kept)
        transfer = transfer.index_select(dim, index)
    return transfer


def alias(spectrum: Tensor, factor: int) -> Tensor:
    """Spectrum of the image subsampled by ``factor``: the mean over the frequencies that fall together."""
    if factor == 1:
        return spectrum
    rows, columns = spectrum.shape[-2] // factor, spectrum.shape[-1] // factor
    return spectrum.unflatten(-2, (factor, rows)).unflatten(-1, (factor, columns)).mean((-4, -2))


def bank_gain(filters: Sequence[tuple[Tensor, int, float]]) -> float:
    """Exact l2 gain, over real images, of x -> (weight * subsample(x * filter, factor)) for a list of filters.

    Frequencies that differ by a multiple of the coarsest output grid are mixed by the subsampling and by nothing else,
    so the operator is block diagonal over such classes: the squared gain is the largest eigenvalue of small Gram
    matrices. For a real image the spectra at w and -w are conjugate, so the Gram matrices of the two are averaged.

    Args:
        filters: (real transfer function, subsampling factor, weight) with powers of two as factors.
    """
    rows, columns = filters[0][0].shape
    coarsest = max(factor for _, factor, _ in filters)
    m, n = rows // coarsest, columns // coarsest
    # m x n classes of coarsest^2 frequencies each
    frequency = torch.arange(rows * columns).view(coarsest, m, coarsest, n).permute(1, 3, 0, 2).flatten(2)
    a, b = frequency // columns, frequency % columns
    gram = torch.zeros(m, n, coarsest**2, coarsest**2, dtype=torch.float64)
    for transfer, factor, weight in filters:
        h = transfer.double().flatten()[frequency]
        # Two frequencies meet in the output if they agree modulo its grid; unitary normalisation leaves 1 / factor.
        meet = (a.unsqueeze(-1) - a.unsqueeze(-2)) % (rows // factor) == 0
        meet &= (b.unsqueeze(-1) - b.unsqueeze(-2)) % (columns // factor) == 0
        gram += (weight / factor) ** 2 * meet * h.unsqueeze(-1) * h.unsqueeze(-2)
    # The class of -w: where each -w sits among the classes, as (class, place).
    place = torch.empty(rows * columns, dtype=torch.long)
    place[frequency.flatten()] = torch.arange(rows * columns)
    mirror = place[((-a) % rows) * columns + (-b) % columns]  # m x n x class, flat positions
    size = coarsest**2
    mirrored = gram.flatten(0, 1)[mirror[..., :1] // size, mirror % size]  # rows of the mirrored class
    mirrored = torch.gather(mirrored, -1, (mirror % size).unsqueeze(-2).expand_as(mirrored))
    largest = torch.linalg.eigvalsh((gram + mirrored) / 2)[..., -1].max().item()
    return math.sqrt(max(largest, 0.0)) * (1 + 1e-6)  # filters are used in float32
