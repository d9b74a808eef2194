"""Two-dimensional scattering transform: a fixed feature map of known gain, from Morlet filters in the Fourier domain.

Definitions: Bruna & Mallat, "Invariant Scattering Convolution Networks" (2013), sections 2.1 and 2.3. The constants
(bandwidth 0.8 * 2^j, centre frequency 3 pi / 4 / 2^j, slant 4 / L) are the customary ones of the scattering literature.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from weightclip.errors import WeightclipError
from weightclip.nn._norm import wide

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


def _reflection(size: int, padded: int) -> Tensor:
    """For each row of the padded image, the row of the image it mirrors (the edge itself is not repeated)."""
    position = torch.arange(padded) - (padded - size) // 2
    period = 2 * (size - 1)
    return (size - 1) - ((position % period) - (size - 1)).abs()


class Scattering2d(nn.Module):
    """Scattering coefficients up to order ``max_order``, with Morlet wavelets at ``J`` octaves and ``L`` angles.

    Order 0 is the image averaged at scale 2^J; order 1 the averaged moduli of its wavelet coefficients; order 2 the
    averaged moduli of the wavelet coefficients of those moduli at coarser octaves (Bruna & Mallat, 2013). Images
    (records, planes, H, W) give (records, planes, paths, H // 2^J, W // 2^J), with ``1 + J L + J (J - 1) L^2 / 2``
    paths: 81 for J = 2, L = 8. Values agree with kymatio's. Differentiable; no parameters, nothing in the state dict.

    Formal guarantees:
        ``gain`` is a certified l2 Lipschitz constant of the whole map: the Littlewood-Paley gains of the filter banks
        with their subsampling (`bank_gain`, exact per layer), times ``padding_gain``, the gain of the reflection that
        pads the image (2 in general). It is 0.51 for J = 2: subsampling by 4 x 4 leaves a sixteenth of the values. As
        the map sends 0 to 0, an output's norm is at most ``gain`` times its input's. Records and planes are never
        mixed. Follow it with a `Project` where a radius is needed.

    Args:
        J: number of octaves; images are averaged over 2^J pixels.
        shape: height and width of the images, each larger than 2^J.
        L: number of angles.
        max_order: 1 or 2.

    Example:
        >>> scattering = Scattering2d(J=2, shape=(28, 28))
        >>> scattering(torch.rand(3, 1, 28, 28)).shape
        torch.Size([3, 1, 81, 7, 7])
        >>> scattering.gain <= 2.0
        True
    """

    def __init__(self, J: int = 2, shape: tuple[int, int] = (32, 32), L: int = 8, max_order: int = 2) -> None:
        super().__init__()
        if J < 1 or L < 1 or max_order not in (1, 2):
            raise WeightclipError(f"Scattering2d: needs J >= 1, L >= 1, max_order 1 or 2; got {J}, {L}, {max_order}")
        if min(shape) <= 2**J:
            raise WeightclipError(
                f"Scattering2d: images of {shape} are too small for J={J}, which needs more than {2**J}"
            )
        self.J, self.L, self.max_order = J, L, max_order
        self.shape = (int(shape[0]), int(shape[1]))
        # One output pixel of margin on each side, so that the torus does not bring opposite edges together.
        padded = (((self.shape[0] >> J) + 2) << J, ((self.shape[1] >> J) + 2) << J)
        rows, columns = _reflection(self.shape[0], padded[0]), _reflection(self.shape[1], padded[1])
        self.padding_gain: float = math.sqrt(rows.bincount().max().item() * columns.bincount().max().item())
        self.register_buffer("_rows", rows, persistent=False)
        self.register_buffer("_columns", columns, persistent=False)
        averaging = low_pass(padded, J)
        for octaves in range(J):
            self.register_buffer(f"_phi{octaves}", restrict(averaging, octaves).float(), persistent=False)
        for j in range(J):
            wavelets = torch.stack([morlet(padded, j, angle, L) for angle in range(L)])
            for octaves in range(j + 1 if max_order > 1 else 1):
                if octaves < j or octaves == 0:
                    self.register_buffer(f"_psi{j}_{octaves}", restrict(wavelets, octaves).float(), persistent=False)
        self.gain: float = self.padding_gain * self._filter_gain(0, -1, max_order)

    @property
    def paths(self) -> int:
        """Coefficients per plane and position."""
        second = self.J * (self.J - 1) // 2 * self.L**2 if self.max_order > 1 else 0
        return 1 + self.J * self.L + second

    def _phi(self, octaves: int) -> Tensor:
        return self.get_buffer(f"_phi{octaves}")

    def _psi(self, j: int, octaves: int) -> Tensor:
        return self.get_buffer(f"_psi{j}_{octaves}")

    def _filter_gain(self, octaves: int, last: int, orders: int) -> float:
        """Gain from one map at resolution 2^-octaves to all coefficients below it; the modulus has gain 1."""
        filters = [(self._phi(octaves), 2 ** (self.J - octaves), 1.0)]
        if orders > 0:
            for j in range(last + 1, self.J):
                below = self._filter_gain(j, j, orders - 1)
                filters += [(psi, 2 ** (j - octaves), below) for psi in self._psi(j, octaves)]
        return bank_gain(filters)

    def _average(self, spectrum: Tensor, octaves: int) -> Tensor:
        """Low-pass filtering, subsampling to 2^-J, and removal of the margin."""
        low = alias(spectrum * self._phi(octaves), 2 ** (self.J - octaves))
        return torch.fft.ifft2(low).real[..., 1:-1, 1:-1]

    def _modulus(self, spectrum: Tensor, j: int, octaves: int) -> Tensor:
        """Spectrum of the moduli of the wavelet coefficients at octave j, over all angles."""
        filtered = alias(spectrum.unsqueeze(-3) * self._psi(j, octaves), 2 ** (j - octaves))
        return torch.fft.fft2(torch.fft.ifft2(filtered).abs())  # ... x angles x rows x columns

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim < 3 or tuple(x.shape[-2:]) != self.shape:
            raise WeightclipError(
                f"Scattering2d expects (records, ..., {self.shape[0]}, {self.shape[1]}), got shape {tuple(x.shape)}"
            )
        if x.numel() == 0:  # FFT libraries refuse empty batches
            return x.new_zeros((*x.shape[:-2], self.paths, self.shape[0] >> self.J, self.shape[1] >> self.J))
        padded = wide(x).index_select(-2, self.get_buffer("_rows")).index_select(-1, self.get_buffer("_columns"))
        spectrum = torch.fft.fft2(padded)
        zeroth, first, second = [self._average(spectrum, 0).unsqueeze(-3)], [], []
        for j1 in range(self.J):
            moduli = self._modulus(spectrum, j1, 0)
            first.append(self._average(moduli, j1))
            if self.max_order < 2 or j1 == self.J - 1:
                continue
            for one in moduli.unbind(-3):  # one angle at a time: L times less memory
                second += [self._average(self._modulus(one, j2, j1), j2) for j2 in range(j1 + 1, self.J)]
        return torch.cat(zeroth + first + second, dim=-3).to(x.dtype)

    def extra_repr(self) -> str:
        return f"J={self.J}, shape={self.shape}, L={self.L}, max_order={self.max_order}"
