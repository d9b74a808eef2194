"""Morlet filters and the exact gain of a subsampled filter bank."""

from __future__ import annotations

import pytest
import torch

from weightclip.nn._scattering import alias, bank_gain, low_pass, morlet, restrict


def _dense_gain(filters) -> float:
    """The same gain by brute force: the operator as a real matrix, image by image of the canonical basis."""
    shape = filters[0][0].shape
    basis = torch.eye(shape.numel(), dtype=torch.float64).view(-1, *shape)
    blocks = []
    for transfer, factor, weight in filters:
        y = torch.fft.ifft2(torch.fft.fft2(basis) * transfer)[:, ::factor, ::factor].flatten(1) * weight
        blocks += [y.real, y.imag]
    return torch.linalg.matrix_norm(torch.cat(blocks, 1), 2).item()


@pytest.mark.parametrize("shape", [(8, 8), (8, 16), (12, 8)])
def test_bank_gain_equals_brute_force(shape):
    wavelets = [(morlet(shape, j, angle, 3), 2**j, 0.7 + j) for j in range(2) for angle in range(3)]
    random = [(torch.randn(shape, dtype=torch.float64), factor, 1.3) for factor in (1, 2, 4)]
    averaging = (low_pass(shape, 2), 4, 1.0)
    for filters in ([averaging], wavelets, [averaging, *wavelets], random, [*random, averaging]):
        assert bank_gain(filters) == pytest.approx(_dense_gain(filters), rel=3e-6)
        assert bank_gain(filters) >= _dense_gain(filters)


def test_wavelets_have_zero_mean_and_the_average_unit_mass():
    assert low_pass((16, 16), 2)[0, 0].item() == pytest.approx(1.0, abs=1e-4)
    for j in range(2):
        assert abs(morlet((16, 16), j, 1, 8)[0, 0].item()) < 1e-12


def test_alias_is_the_spectrum_of_the_subsampled_image():
    x = torch.randn(2, 12, 8, dtype=torch.float64)
    torch.testing.assert_close(alias(torch.fft.fft2(x), 4), torch.fft.fft2(x[:, ::4, ::4]))
    assert alias(x, 1) is x


def test_restriction_of_a_band_limited_filter_commutes_with_subsampling():
    x = torch.fft.fft2(torch.randn(16, 16, dtype=torch.float64))
    band = torch.zeros(16)
    band[[0, 1, 2, 3, 13, 14, 15]] = 1.0  # frequencies below a quarter of the sampling rate
    mask = torch.outer(band, band)
    h = torch.randn(16, 16, dtype=torch.float64)
    torch.testing.assert_close(restrict(h, 1) * alias(x * mask, 2), alias(h * x * mask, 2))
