"""Safe normalisation: the value, the certified gain and output bound, and behaviour at degenerate inputs."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from weightclip.errors import WeightclipError
from weightclip.nn import SafeGroupNorm, SafeInstanceNorm, SafeLayerNorm

CASES = [
    (lambda a, f: SafeGroupNorm(2, 6, a, f), (6,), 3, 1),
    (lambda a, f: SafeGroupNorm(3, 6, a, f), (6, 4), 8, 4),
    (lambda a, f: SafeGroupNorm(1, 2, a, f), (2, 3, 3), 18, 9),
    (lambda a, f: SafeGroupNorm(2, 2, a, f), (2, 2, 2, 2), 8, 8),
    (lambda a, f: SafeInstanceNorm(3, a, f), (3, 2, 2), 4, 4),
    (lambda a, f: SafeLayerNorm(5, a, f), (3, 5), 5, 3),
    (lambda a, f: SafeLayerNorm((2, 3), a, f), (2, 3), 6, 1),
]


def _randomise(layer: torch.nn.Module) -> None:
    for q in layer.parameters():
        torch.nn.init.normal_(q)


@pytest.mark.parametrize("shape", [(8,), (8, 5), (8, 4, 4), (8, 2, 3, 2)])
def test_equals_group_norm_where_the_floor_is_inactive(shape):
    x = 3 * torch.randn(4, *shape, dtype=torch.float64)
    torch.testing.assert_close(SafeGroupNorm(2, 8, alpha=1e-6)(x), F.group_norm(x, 2, eps=0.0))


def test_formula_on_both_sides_of_the_floor():
    x = torch.tensor([[1.0, 3.0, 10.0, 30.0]], dtype=torch.float64)  # standard deviations 1 and 10
    y = SafeGroupNorm(2, 4, alpha=4.0)(x)
    torch.testing.assert_close(y, torch.tensor([[-0.25, 0.25, -1.0, 1.0]], dtype=torch.float64))


def test_equals_layer_norm_where_the_floor_is_inactive():
    layer = SafeLayerNorm((3, 4), alpha=1e-6, affine=True).double()
    _randomise(layer)
    x = torch.randn(5, 2, 3, 4, dtype=torch.float64)
    torch.testing.assert_close(layer(x), F.layer_norm(x, (3, 4), layer.weight, layer.bias, eps=0.0))


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("alpha", [0.05, 1.0, 7.0])
@pytest.mark.parametrize(("make", "shape", "n_g", "positions"), CASES)
def test_gain_and_output_bounds(make, shape, n_g, positions, alpha, affine, gain):
    layer = make(alpha, affine).double()
    _randomise(layer)
    gamma = layer.weight.abs().max().item() if affine else 1.0
    shift = math.sqrt(positions) * layer.bias.norm().item() if affine else 0.0
    numel = math.prod(shape)
    reached = 0.0
    # From deep inside the floor, over its kink, to far outside; spikes are the worst case in l1 and l-infinity.
    for scale in (0.0, 0.5 * alpha, alpha, 2 * alpha, 1e6):
        for spike in (0.0, 30.0):
            x = scale * torch.randn(shape, dtype=torch.float64)
            x.view(-1)[0] += spike * scale
            assert layer(x.unsqueeze(0)).norm().item() <= (gamma * math.sqrt(numel) + shift) * (1 + 1e-12)
            two = gain(layer, x)
            reached = max(reached, two)
            assert two <= gamma / alpha * (1 + 1e-9)
            for p in (1, math.inf):
                assert gain(layer, x, p) <= gamma * (1 + math.sqrt(n_g)) / (2 * alpha) * (1 + 1e-9)
    if not affine:
        assert reached >= (1 - 1e-9) / alpha  # the bound is attained: a smaller one would be wrong


def test_infinity_gain_is_attained_beyond_one_over_alpha(gain):
    # Centring alone has row sums 2 (1 - 1/n): the l2 gain 1 / alpha would be no bound; n = 4 attains (1 + sqrt 4) / 2.
    x = torch.zeros(4, dtype=torch.float64)
    assert gain(SafeGroupNorm(1, 4), x, math.inf) == pytest.approx(1.5)


@pytest.mark.parametrize("size", [1e-20, 1e4, 1e8, 1e15])
def test_output_bound_survives_rounding(size):
    layer = SafeGroupNorm(2, 8, alpha=1e-3)
    for offset in (0.0, 1.0, 1e6):
        x = size * (torch.randn(16, 8, 7, 7) + offset)
        assert layer(x).flatten(1).norm(dim=1).max() <= math.sqrt(8 * 49) * (1 + 1e-5)


def test_half_precision_is_normalised_in_single():
    x = (300 * torch.randn(3, 8, 6)).half()  # squares overflow float16
    y = SafeGroupNorm(2, 8)(x)
    assert y.dtype == torch.float16
    torch.testing.assert_close(y.float(), SafeGroupNorm(2, 8)(x.float()), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize(("make", "shape", "n_g", "positions"), CASES)
def test_plain_module(make, shape, n_g, positions, affine, records_independent, finite_at_degenerate, plain_module):
    layer = make(0.3, affine)
    _randomise(layer)
    x = torch.randn(4, *shape)
    records_independent(layer, x)
    finite_at_degenerate(layer, shape)
    plain_module(layer, x)
    assert [name for name, _ in layer.named_parameters()] == (["weight", "bias"] if affine else [])


def test_non_contiguous_input():
    x = torch.randn(2, 5, 5, 4).permute(0, 3, 1, 2)
    torch.testing.assert_close(SafeGroupNorm(2, 4)(x), SafeGroupNorm(2, 4)(x.contiguous()))


def test_affine_parameter_factor():
    """Rule book: the Jacobian in (weight, bias) is at most sqrt(n_g + positions) for group norm."""
    layer = SafeGroupNorm(2, 4, alpha=0.1, affine=True).double()
    worst = 0.0
    for spike in (0.0, 1.0, 100.0):
        x = 1e-9 * torch.randn(1, 4, 3, dtype=torch.float64)
        x[0, 0, 0] += spike
        x[0, 0, 1] -= spike
        rows = []
        for cotangent in torch.eye(12, dtype=torch.float64):
            grads = torch.autograd.grad(layer(x).flatten(), list(layer.parameters()), cotangent)
            rows.append(torch.cat(grads))
        worst = max(worst, torch.linalg.matrix_norm(torch.stack(rows), 2).item())
    assert math.sqrt(6) * (1 - 1e-6) <= worst <= math.sqrt(6 + 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SafeGroupNorm(3, 8), "must divide"),
        (lambda: SafeGroupNorm(0, 8), "must divide"),
        (lambda: SafeGroupNorm(2, 8, alpha=0.0), "alpha"),
        (lambda: SafeLayerNorm(8, alpha=math.nan), "alpha"),
        (lambda: SafeLayerNorm(()), "normalized_shape"),
        (lambda: SafeGroupNorm(2, 8)(torch.zeros(2, 4)), "expects"),
        (lambda: SafeLayerNorm(8)(torch.zeros(8)), "expects"),  # would normalise over the records
        (lambda: SafeInstanceNorm(8)(torch.zeros(2, 8)), "positions"),
    ],
)
def test_errors(call, message):
    with pytest.raises(WeightclipError, match=message):
        call()
