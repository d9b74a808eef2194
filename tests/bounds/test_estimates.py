"""Power iteration estimates from below: that is why it certifies nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weightclip.bounds._estimates import power_iteration_estimate
from weightclip.bounds._layer_norms import operator_norm_bound
from weightclip.errors import CertificationError


def test_five_iterations_stay_below_the_truth() -> None:
    """Trap: clipping by the estimate leaves a norm above C."""
    generator = torch.Generator().manual_seed(0)
    deepest = 1.0
    for seed in range(30):
        w = torch.randn(64, 64, generator=generator, dtype=torch.float64)
        truth = float(torch.linalg.matrix_norm(w, 2))
        estimates = [float(power_iteration_estimate(w, i, seed=seed)) for i in (0, 1, 5, 20)]
        assert estimates == sorted(estimates) and estimates[-1] <= truth * (1 + 1e-12)
        deepest = min(deepest, estimates[2] / truth)
        assert operator_norm_bound(w) >= truth
    print(f"after 5 iterations: {deepest:.3f} of the truth, so a norm of {1 / deepest:.3f} C remains")
    assert deepest < 1 / 1.05


def test_it_converges_to_the_norm_of_layers_without_their_bias() -> None:
    torch.manual_seed(0)
    dense = nn.Linear(5, 3).double()
    assert float(power_iteration_estimate(dense, 500)) == pytest.approx(operator_norm_bound(dense), rel=1e-6)
    conv = nn.Conv2d(2, 3, 3, stride=2, padding=1).double()
    basis = torch.eye(2 * 16, dtype=torch.float64).reshape(32, 2, 4, 4)
    truth = float(torch.linalg.matrix_norm((conv(basis) - conv(torch.zeros_like(basis))).flatten(1).detach(), 2))
    assert float(power_iteration_estimate(conv, 500, (4, 4))) == pytest.approx(truth, rel=1e-6)
    assert truth <= operator_norm_bound(conv, input_size=4) <= 1.5 * truth
    upscale = nn.ConvTranspose1d(2, 2, 3).double()
    assert float(power_iteration_estimate(upscale, 300, 6)) <= operator_norm_bound(upscale, input_size=6)


def test_it_leaves_gradients_and_random_state_alone() -> None:
    layer = nn.Linear(4, 4)
    state = torch.get_rng_state()
    with torch.no_grad():
        estimate = power_iteration_estimate(layer, 3)
    assert not estimate.requires_grad and layer.weight.grad is None
    assert torch.equal(state, torch.get_rng_state())
    assert float(power_iteration_estimate(torch.zeros(3, 3), 3)) == 0.0


def test_refusals() -> None:
    for call, says in (
        (lambda: power_iteration_estimate(nn.Conv1d(1, 1, 3), 3), "input_size"),
        (lambda: power_iteration_estimate(nn.ReLU(), 3), "ReLU"),
        (lambda: power_iteration_estimate(torch.ones(3), 3), "1-D"),
    ):
        with pytest.raises(CertificationError, match=says):
            call()
