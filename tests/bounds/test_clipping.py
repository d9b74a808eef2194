"""After clipping, certified and exact norms of the stored weights are at most C, for every strategy and dtype."""

from __future__ import annotations

import copy
import math
import random
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from weightclip.bounds._clipping import Bjorck, Rescale, SpectralProjection, Sphere, Strategy, clip_weights_
from weightclip.bounds._layer_norms import norm_function, operator_norm_bound
from weightclip.errors import CertificationError

STRATEGIES = [Rescale(), Sphere(), SpectralProjection(), Bjorck(), Bjorck(4, order=3)]
IDS = ["rescale", "sphere", "project", "bjorck", "bjorck3"]


def exact_norm(layer: nn.Module, size: tuple[int, ...], p: float = 2) -> float:
    """Norm of the linear part, from the explicit matrix in float64."""
    layer = copy.deepcopy(layer).double()
    channels = cast(int, layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels)
    count = channels * math.prod(size)
    basis = torch.eye(count, dtype=torch.float64).reshape(count, channels, *size)
    with torch.no_grad():
        matrix = (layer(basis) - layer(torch.zeros_like(basis))).flatten(1).T
    return float(torch.linalg.matrix_norm(matrix, p))


def layers(seed: int) -> list[tuple[Any, tuple[int, ...]]]:
    """Dense and convolutional layers of random geometry, with weights from far inside to far outside the ball."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    found: list[tuple[Any, tuple[int, ...]]] = [
        (nn.Linear(rng.randint(1, 40), rng.randint(1, 40)), ()),
        (
            nn.Conv1d(
                4, 6, rng.randint(1, 4), stride=rng.randint(1, 3), dilation=rng.randint(1, 2), padding=3, groups=2
            ),
            (7,),
        ),
        (nn.Conv2d(2, 3, (3, 2), stride=rng.randint(1, 2), padding=1), (4, 5)),
        (nn.ConvTranspose1d(4, 2, 3, stride=rng.randint(1, 3), groups=2), (5,)),
        (nn.Conv3d(1, 2, 2), (3, 2, 3)),
    ]
    for layer, _ in found:
        with torch.no_grad():
            layer.weight.mul_(10.0 ** rng.uniform(-3, 3))
    return found


@pytest.mark.parametrize("strategy", STRATEGIES, ids=IDS)
@pytest.mark.parametrize("p", [1, 2, math.inf])
def test_norms_are_at_most_c_afterwards(strategy: Strategy, p: float) -> None:
    highest = 0.0
    for seed in range(8):
        for layer, size in layers(seed):
            C = random.Random(seed).choice((0.1, 1.0, 7.0))
            bound = clip_weights_(layer, C, strategy, p)[""]
            assert bound.dtype == torch.float64 and bound.shape == ()
            truth = exact_norm(layer, size, p)
            assert truth <= float(bound) <= C, layer
            assert operator_norm_bound(layer, p) <= C * (1 + 1e-6), layer
            highest = max(highest, truth / C)
    print(f"{strategy} p={p}: exact norm up to {highest:.6f} C")
    assert highest > 0.99


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=IDS)
def test_rounding_to_the_stored_type_never_exceeds(strategy: Strategy, dtype: torch.dtype) -> None:
    """Adversarial for rounding: constant and sign-structured entries, whose rounding errors all point the same way."""
    generator = torch.Generator().manual_seed(0)
    highest = 0.0
    for trial in range(20):
        n = 3 + trial
        w = torch.full((n, n), 1.0, dtype=torch.float64)
        if trial % 2:
            w = torch.randn(n, n, generator=generator, dtype=torch.float64)
        layer = nn.Linear(n, n, bias=False).to(dtype)
        with torch.no_grad():
            layer.weight.copy_(w * (1.0 + 0.37 * trial))
        C = 0.9 + 0.013 * trial
        bound = float(clip_weights_(layer, C, strategy)[""])
        truth = exact_norm(layer, ())
        assert truth <= bound <= C
        assert operator_norm_bound(layer) <= C * (1 + 1e-6)
        highest = max(highest, truth / C)
    print(f"{strategy} {dtype}: {highest:.6f} C")
    assert highest > (0.95 if dtype in (torch.bfloat16, torch.float16) else 1 - 1e-5)


def test_naive_rescaling_in_bfloat16_exceeds() -> None:
    """Trap: multiplying by C/‖W‖ and rounding leaves a norm above C."""
    w = torch.ones(32, 32, dtype=torch.bfloat16)
    C = 32.0 * (0.5 + 2.0**-9 + 2.0**-12)  # the scaled entry lies above the middle of two bfloat16 numbers
    naive = (w.double() * (C / 32.0)).bfloat16()
    assert float(torch.linalg.matrix_norm(naive.double(), 2)) > C
    layer = nn.Linear(32, 32, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(w)
    assert float(clip_weights_(layer, C)[""]) <= C
    assert exact_norm(layer, ()) <= C


def test_rescale_leaves_weights_inside_alone_and_is_idempotent() -> None:
    for strategy in (Rescale(), SpectralProjection()):
        for seed in range(6):
            for layer, _ in layers(seed):
                before = layer.weight.clone()
                clip_weights_(layer, 1e9, strategy)
                assert torch.equal(layer.weight, before)
                clip_weights_(layer, 0.5, strategy)
                once = layer.weight.clone()
                clip_weights_(layer, 0.5, strategy)
                assert torch.equal(layer.weight, once)


def test_rescale_keeps_the_direction_and_projection_is_nearest() -> None:
    """Section 2: radial rescaling of diag(3, .5) gives diag(1, .167), the projection diag(1, .5)."""
    w = torch.diag(torch.tensor([3.0, 0.5]))
    results = {}
    for name, strategy in (("rescale", Rescale()), ("project", SpectralProjection()), ("sphere", Sphere())):
        layer = nn.Linear(2, 2)
        with torch.no_grad():
            layer.weight.copy_(w)
        clip_weights_(layer, 1.0, strategy)
        results[name] = layer.weight.detach()
    torch.testing.assert_close(results["rescale"], w / 3, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(results["project"], torch.diag(torch.tensor([1.0, 0.5])), rtol=1e-6, atol=1e-6)
    generator = torch.Generator().manual_seed(0)
    distance = float((results["project"] - w).norm())
    for _ in range(200):
        other = torch.randn(2, 2, generator=generator)
        other = other / max(1.0, float(torch.linalg.matrix_norm(other, 2)))
        assert float((other - w).norm()) >= distance - 1e-5


def test_sphere_grows_small_weights_and_leaves_zero() -> None:
    layer = nn.Linear(3, 3)
    with torch.no_grad():
        layer.weight.copy_(1e-6 * torch.eye(3))
    assert float(clip_weights_(layer, 2.0, Sphere())[""]) == pytest.approx(2.0, rel=1e-6)
    assert exact_norm(layer, ()) == pytest.approx(2.0, rel=1e-6)
    for strategy in STRATEGIES:
        with torch.no_grad():
            layer.weight.zero_()
        assert float(clip_weights_(layer, 2.0, strategy)[""]) == 0.0
        assert torch.equal(layer.weight, torch.zeros(3, 3))


def test_bjorck_makes_singular_values_equal_and_matches_conv_bound() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(8, 5)
    clip_weights_(layer, 3.0, Bjorck(40))
    values = torch.linalg.svdvals(layer.weight.detach().double())
    torch.testing.assert_close(values, torch.full((5,), 3.0, dtype=torch.float64), rtol=1e-5, atol=0)
    conv = nn.Conv2d(2, 4, 3)
    clip_weights_(conv, 3.0, Bjorck(40))
    values = torch.linalg.svdvals(conv.weight.detach().double().flatten(1))
    torch.testing.assert_close(values, torch.full((4,), 1.0, dtype=torch.float64), rtol=1e-5, atol=0)  # 3/√9
    with pytest.raises(CertificationError, match="at least 1"):
        Bjorck(0)


def test_input_size_buys_a_larger_kernel() -> None:
    torch.manual_seed(0)
    loose, tight = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
    tight.load_state_dict(loose.state_dict())
    clip_weights_(loose, 0.1)
    clip_weights_(tight, 0.1, input_sizes={"": 6})
    assert float(tight.weight.detach().norm()) > 1.2 * float(loose.weight.detach().norm())
    assert exact_norm(tight, (6, 6)) <= 0.1
    assert operator_norm_bound(tight, input_size=6) <= 0.1 * (1 + 1e-6)


def test_names_follow_named_modules() -> None:
    first = nn.Linear(4, 4)
    model = nn.Sequential(first, nn.ReLU(), nn.Sequential(nn.Conv1d(1, 2, 3), nn.Tanh()))
    assert set(clip_weights_(model, 0.5)) == {"0", "2.0"}
    before = first.weight.clone()
    bounds = clip_weights_(model, {"2.0": 0.1})
    assert set(bounds) == {"2.0"} and float(bounds["2.0"]) <= 0.1
    assert torch.equal(first.weight, before)
    for C, says in (({"1": 1.0}, "'1'"), ({"x": 1.0}, "'x'"), (0.0, "positive"), (math.nan, "positive")):
        with pytest.raises(CertificationError, match=says) as error:
            clip_weights_(model, C)
        assert "\n" not in str(error.value)
    with pytest.raises(CertificationError, match="input_sizes"):
        clip_weights_(model, 1.0, input_sizes={"nowhere": 3})


def test_shared_weights_need_one_bound() -> None:
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    b.weight = a.weight
    model = nn.Sequential(a, b)
    bounds = clip_weights_(model, 0.3, Sphere())
    assert bounds["0"] is bounds["1"]
    with pytest.raises(CertificationError, match="share one weight"):
        clip_weights_(model, {"0": 1.0, "1": 2.0})


def test_reparametrised_weights_are_refused() -> None:
    with pytest.raises(CertificationError, match="does not bound it"):
        clip_weights_(parametrizations.weight_norm(nn.Linear(3, 3)), 1.0)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=IDS)
def test_a_weight_that_is_not_finite_gives_no_finite_bound(strategy: Strategy) -> None:
    for bad in (math.nan, math.inf):
        layer = nn.Linear(3, 2)
        with torch.no_grad():
            layer.weight[0, 0] = bad
        assert not math.isfinite(float(clip_weights_(layer, 1.0, strategy)[""]))


def test_strategies_take_any_certified_norm() -> None:
    """A norm function of unknown geometry gets the largest overlap there is."""
    conv = nn.Conv1d(2, 2, 3, stride=2)
    known = norm_function(conv)
    with torch.no_grad():
        conv.weight.mul_(100)
    for strategy in STRATEGIES:

        def plain(weight: Tensor) -> Tensor:
            return known(weight)

        assert float(strategy(conv.weight, 1.5, plain)) <= 1.5
        assert operator_norm_bound(conv) <= 1.5 * (1 + 1e-6)
