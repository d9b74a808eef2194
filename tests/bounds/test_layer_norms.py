"""From layers to norms: the right weight, the right geometry, and refusals that say what to do."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from weightclip.bounds._layer_norms import ConvNorm, DenseNorm, layer_norm_tensor, norm_function, operator_norm_bound
from weightclip.errors import CertificationError

LAYERS = [
    (nn.Linear(5, 3), ()),
    (nn.Conv1d(2, 4, 3, stride=2, padding=1, groups=2), (7,)),
    (nn.Conv2d(2, 3, 3, padding="same", dilation=2), (5, 4)),
    (nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular", stride=2), (4, 6)),
    (nn.Conv3d(1, 2, 2), (3, 3, 2)),
    (nn.ConvTranspose1d(2, 4, 3, stride=2, output_padding=1, groups=2), (5,)),
    (nn.ConvTranspose2d(2, 1, 3, padding=1), (4, 3)),
    (nn.ConvTranspose3d(1, 2, 2, stride=2), (2, 2, 2)),
]


def matrix_of(layer: nn.Module, size: tuple[int, ...]) -> Tensor:
    channels = cast(int, layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels)
    count = channels * math.prod(size)
    basis = torch.eye(count).reshape(count, channels, *size)
    with torch.no_grad():
        return (layer(basis) - layer(torch.zeros_like(basis))).flatten(1).T.double()


@pytest.mark.parametrize("p", [1, 2, math.inf])
@pytest.mark.parametrize(("layer", "size"), LAYERS, ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else "")
def test_every_kind_of_layer(layer: nn.Module, size: tuple[int, ...], p: float) -> None:
    truth = float(torch.linalg.matrix_norm(matrix_of(layer, size), p))
    bound = operator_norm_bound(layer, p, input_size=size or None)
    assert isinstance(bound, float)
    assert truth * (1 - 1e-5) <= bound <= 2 * truth  # the reference layer computes in float32
    tensor = layer_norm_tensor(layer, p, size or None)
    assert tensor.shape == () and tensor.dtype == torch.float64 and float(tensor) == bound


def test_matrices() -> None:
    w = torch.tensor([[3.0, 0.0], [0.0, -4.0]])
    assert operator_norm_bound(w) == pytest.approx(4, rel=1e-12)
    assert operator_norm_bound(nn.Parameter(w), 1) == pytest.approx(4, rel=1e-12)
    assert math.isnan(operator_norm_bound(w * math.nan))


def test_an_int_is_a_size_on_every_axis_and_dft_can_be_left_out() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 4, 3, padding=1)
    sized = operator_norm_bound(conv, input_size=8)
    assert sized == operator_norm_bound(conv, input_size=(8, 8)) < operator_norm_bound(conv)
    assert float(layer_norm_tensor(conv, 2, 8, use_dft=False)) == operator_norm_bound(conv)


def test_cast_weights_have_their_own_norm() -> None:
    layer = nn.Linear(64, 64)
    with torch.no_grad():
        layer.weight.fill_(1.0 + 2.0**-8 + 2.0**-12)
    assert float(layer_norm_tensor(layer, dtype=torch.bfloat16)) > 1.003 * operator_norm_bound(layer)


def test_effective_weights() -> None:
    torch.manual_seed(0)
    layer: Any = parametrizations.weight_norm(nn.Linear(4, 4))
    with torch.no_grad():
        layer.parametrizations.weight.original0.mul_(3)
    truth = float(torch.linalg.matrix_norm(layer.weight.detach().double(), 2))
    assert truth <= operator_norm_bound(layer) <= truth * (1 + 1e-9)

    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return nn.functional.linear(input, 2 * self.weight, self.bias)

    class Named(Doubled):
        def effective_weight(self) -> Tensor:
            return 2 * self.weight

    class Swapped(nn.Linear):
        _wc_native = nn.Linear

        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input)

    with pytest.raises(CertificationError, match="effective_weight"):
        operator_norm_bound(Doubled(3, 3))
    named = Named(3, 3)
    assert operator_norm_bound(named) == pytest.approx(2 * operator_norm_bound(named.weight), rel=1e-12)
    assert operator_norm_bound(Swapped(3, 3)) > 0


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_refusals_are_one_line() -> None:
    hooked = nn.utils.weight_norm(nn.Linear(3, 3))
    for layer, says in (
        (nn.ReLU(), "ReLU"),
        (nn.Bilinear(2, 2, 2), "Bilinear"),
        (torch.ones(3), "1-D"),
        (torch.ones(2, 2, 2), "3-D"),
        (nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect"), "reflect"),
        (nn.LazyLinear(3), "no shape yet"),
        (hooked, "stale"),
        (parametrizations.spectral_norm(nn.Linear(3, 3)), "eval"),
    ):
        with pytest.raises(CertificationError, match=says) as error:
            operator_norm_bound(layer)
        assert "\n" not in str(error.value)
    assert operator_norm_bound(parametrizations.spectral_norm(nn.Linear(3, 3)).eval()) > 0


def test_norm_functions_compare_by_geometry() -> None:
    assert norm_function(nn.Linear(2, 3)) == norm_function(nn.Linear(5, 5)) == DenseNorm(2)
    assert norm_function(nn.Conv1d(1, 1, 3)) == norm_function(nn.Conv1d(2, 2, 5))
    conv = norm_function(nn.Conv1d(2, 4, 5, stride=2, groups=2), input_size=9)
    assert isinstance(conv, ConvNorm) and conv.input_size == (9,)
    weight = torch.ones(4, 1, 5)
    assert conv.overlap(weight) == 3 and conv.matrices(weight).shape == (2, 2, 5)
