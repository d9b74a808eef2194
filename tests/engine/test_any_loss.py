"""Any loss that has one value for each record trains where every layer is limited; elsewhere a bound is asked for."""

from __future__ import annotations

import pytest
import torch
from tests.engine_kit import layer_norms, mlp, private, table
from torch import Tensor, nn

import weightclip as wc

LIMITED = {
    "default": wc.Bounds(),
    "layer caps": wc.Bounds(layer_cap=0.5),
    "radii": wc.Bounds(layer_radius=1.0, cotangent_radius=0.5),
}


def regression(n: int = 8) -> tuple[Tensor, Tensor]:
    return table(n)[0], 5 * table(n, seed=1, features=3)[0]


def quartic(z: Tensor, y: Tensor) -> Tensor:
    """One value for each record, with no bounded gradient."""
    return (z - y).pow(4).sum(1)


class SoftLabels(nn.Module):
    """A loss of the user's own with torch's reductions."""

    reduction = "mean"

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        values = -(y.softmax(1) * z.log_softmax(1)).sum(1)
        return values if self.reduction == "none" else values.mean()


@pytest.mark.parametrize("bounds", LIMITED)
@pytest.mark.parametrize("criterion", [nn.MSELoss(), nn.MSELoss(reduction="sum"), nn.PoissonNLLLoss(), quartic,
                                       SoftLabels()], ids=["mse", "sum", "poisson", "quartic", "soft"])  # fmt: skip
def test_it_trains_and_one_record_stays_within_the_limit(criterion, bounds: str) -> None:
    x, y = regression(9)
    x[8], y[8] = 1e3 * x[8], 1e4 * y[8]
    sums = []
    for n in (8, 9):
        run = private(mlp(), (x[:n], y[:n]), bounds=LIMITED[bounds], criterion=criterion, batch=8, sample_rate=1.0,
                      optimizer=lambda p: torch.optim.SGD(p, lr=0.0))  # fmt: skip
        run.train()
        sums.append({k: 8 * g for k, g in run.grads().items()})
        limits = {path: row["sensitivity"] for path, row in run.layers().items()}
    assert any(bool(g.any()) for g in sums[0].values())
    for path, moved in layer_norms({k: sums[1][k] - sums[0][k] for k in sums[0]}).items():
        assert moved <= limits[path] * (1 + 1e-4)


def test_small_gradients_are_those_of_the_loss() -> None:
    x, y = regression()
    run = private(mlp(), (x, 0.01 * y), bounds=wc.Bounds(max_grad_norm=1e3), criterion=nn.MSELoss()).train()
    plain = mlp()
    nn.functional.mse_loss(plain(x), 0.01 * y).backward()
    for name, p in plain.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(run.grads()[name], p.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "bounds", [wc.Bounds(weight_norm=1.0, input_radius=1.0), wc.Bounds(joint_cap={"0": 1.0}, input_radius=1.0)]
)
def test_where_a_certificate_needs_the_loss_its_bound_is_asked_for(bounds: wc.Bounds) -> None:
    for criterion in (nn.MSELoss(), quartic):
        with pytest.raises(wc.ContractError, match="criterion"):
            private(mlp(), regression(), bounds=bounds, criterion=criterion)
    with pytest.raises(wc.WeightclipError):
        private(mlp(), regression(), bounds=bounds, criterion=wc.PerRecordLoss(quartic))


def test_losses_that_mix_records_or_return_one_number_are_refused() -> None:
    for criterion in (lambda z, y: (z - z.mean(0)).square().sum(1), lambda z, y: (z - y).square().mean()):
        run = private(mlp(), regression(), bounds=wc.Bounds(), criterion=criterion)
        with pytest.raises(wc.ContractError):
            run.train()
