"""Scattering: agreement with kymatio, gain, record independence.

The reference file holds float32 images and kymatio 0.3's coefficients for them (J=2, L=8, order 2; J=3, L=4, order 1).
"""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from weightclip.errors import WeightclipError
from weightclip.nn import Scattering2d

REFERENCE = Path(__file__).parent / "data" / "scattering_reference.npz"


@pytest.mark.parametrize(("name", "J", "L", "order"), [("grey", 2, 8, 2), ("colour", 2, 8, 2), ("coarse", 3, 4, 1)])
def test_agrees_with_the_stored_reference(name, J, L, order):
    with np.load(REFERENCE) as stored:
        x, expected = torch.from_numpy(stored[f"{name}_x"]), torch.from_numpy(stored[f"{name}_y"])
    y = Scattering2d(J, tuple(x.shape[-2:]), L, order)(x)
    assert y.shape == expected.shape
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("J", "shape", "L", "order"),
    [(2, (28, 28), 8, 2), (2, (32, 32), 8, 2), (2, (30, 37), 5, 2), (3, (40, 32), 4, 2), (1, (8, 8), 8, 1)],
)
def test_agrees_with_kymatio(J, shape, L, order):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            frontend = importlib.import_module("kymatio.scattering2d.frontend.torch_frontend")
        except ImportError:
            pytest.skip("kymatio is not installed")
        x = torch.randn(3, 2, *shape)
        expected = frontend.ScatteringTorch2D(J, shape, L=L, max_order=order).scattering(x)
    torch.testing.assert_close(Scattering2d(J, shape, L, order)(x), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("J", "L", "order"), [(1, 4, 1), (2, 3, 1), (2, 3, 2)])
def test_gain_bounds_the_jacobian(J, L, order, gain):
    layer = Scattering2d(J, (8, 9), L, order).double()
    for x in (torch.randn(8, 9), torch.ones(8, 9), torch.eye(8, 9), torch.zeros(8, 9)):
        assert gain(layer, x.double() + 1e-3 * torch.randn(8, 9).double()) <= layer.gain
    # Not vacuous: a constant image is averaged to itself on the coarse grid.
    assert layer.gain <= 2.05 * layer.padding_gain * 2.0**-J


@pytest.mark.parametrize("shape", [(28, 28), (32, 32)])
def test_non_expansive_between_records(shape):
    layer = Scattering2d(2, shape)
    x, y = torch.randn(2, 16, 1, *shape)
    y[:8] = x[:8] + 1e-2 * y[:8]
    moved = (layer(x) - layer(y)).flatten(1).norm(dim=1)
    assert layer.padding_gain == 2.0
    assert layer.gain < 0.52
    assert (moved <= layer.gain * (x - y).flatten(1).norm(dim=1)).all()
    assert (layer(x).flatten(1).norm(dim=1) <= layer.gain * x.flatten(1).norm(dim=1)).all()


def test_number_of_paths():
    assert Scattering2d(2, (32, 32), 8).paths == 81
    assert Scattering2d(2, (32, 32), 8, max_order=1).paths == 17
    layer = Scattering2d(3, (16, 24), 4)
    assert layer.paths == 1 + 12 + 48
    assert layer(torch.rand(2, 3, 16, 24)).shape == (2, 3, 61, 2, 3)
    assert not layer.state_dict() and not list(layer.parameters())


def test_planes_are_transformed_alone():
    layer, x = Scattering2d(2, (12, 12), 4), torch.rand(2, 3, 12, 12)
    torch.testing.assert_close(layer(x)[:, 1], layer(x[:, 1]))


def test_plain_module(records_independent, finite_at_degenerate, plain_module):
    layer = Scattering2d(2, (12, 12), 2)
    records_independent(layer, torch.randn(3, 2, 12, 12))
    finite_at_degenerate(layer, (1, 12, 12))
    plain_module(layer, torch.randn(3, 2, 12, 12))


def test_errors():
    with pytest.raises(WeightclipError, match="max_order"):
        Scattering2d(2, (28, 28), max_order=3)
    with pytest.raises(WeightclipError, match="too small"):
        Scattering2d(3, (8, 8))
    with pytest.raises(WeightclipError, match="expects"):
        Scattering2d(2, (28, 28))(torch.zeros(1, 1, 32, 32))
