"""Two-dimensional scattering transform: a fixed feature map of known gain."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from weightclip.errors import WeightclipError
from weightclip.nn._morlet import alias, bank_gain, low_pass, morlet, restrict
from weightclip.nn._norm import wide


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
