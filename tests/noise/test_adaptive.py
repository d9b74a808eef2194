"""Limits that follow private quantiles: sensitivity of the counts, the joint budget, convergence, mutants."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weightclip as wc
from weightclip.errors import WeightclipError
from weightclip.noise._adaptive import Counter, Quantiles
from weightclip.noise._mechanisms import combine


class Twice(nn.Module):
    """One layer used twice, a convolution, an affine norm, an embedding-free head: every counted kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv1d(1, 2, 3, padding=1), wc.nn.SafeGroupNorm(1, 2, affine=True)
        self.shared, self.head = nn.Linear(12, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x[:, None])).flatten(1)
        return self.head(torch.tanh(self.shared(torch.relu(self.shared(x)))))


def _counts(engine) -> torch.Tensor:
    quantiles = engine.training.quantiles
    return torch.stack([quantiles.modules[p]._wc_counter.sums[i] for p, i in quantiles.queries])


def engine_for(model: nn.Module, x: Tensor, y: Tensor, bounds: wc.Bounds, sigma: float = 0.0, b: float = 8, **settings):
    engine = wc.PrivacyEngine()
    parts = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), noise_multiplier=sigma, bounds=bounds,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x)), criterion=nn.CrossEntropyLoss(),
        expected_batch_size=b, generator=torch.Generator().manual_seed(5), **settings,
    )  # fmt: skip
    return engine, *parts


def backward(engine, model, optimizer, loader, loss, views: int = 1) -> Tensor:
    """The counts after one backward pass, before the step."""
    x, y = next(iter(loader))
    optimizer.zero_grad()
    loss(model(x.repeat_interleave(views, 0)), y).backward()
    return torch.stack(
        [engine.training.quantiles.modules[p]._wc_counter.sums[i] for p, i in engine.training.quantiles.queries]
    )


def steps(engine, model, optimizer, loader, loss, count: int) -> None:
    for _ in range(count):
        for x, y in loader:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()


GENERATOR = torch.Generator().manual_seed(2)
X, Y = torch.randn(8, 6, generator=GENERATOR) * torch.logspace(-1, 1, 8)[:, None], torch.arange(8) % 3
ALL = wc.Bounds(layer_radius=2.0, cotangent_radius=0.2, layer_cap=0.3, adaptive=wc.Adaptive())


@pytest.mark.parametrize("views", [1, 3])
def test_one_record_moves_every_count_by_at_most_one_half(views):
    settings = {"augmentation_multiplicity": views}
    everyone = backward(*engine_for(Twice(), X, Y, ALL, **settings), views=views)
    assert len(everyone) == 4 * 3  # four layers, three limits each
    moved = torch.zeros_like(everyone)
    for i in range(0, 8, 2 if views > 1 else 1):
        keep = torch.arange(8) != i
        fewer = backward(*engine_for(Twice(), X[keep], Y[keep], ALL, **settings), views=views)
        assert float((everyone - fewer).abs().max()) <= 0.5 + 1e-12
        moved = torch.maximum(moved, (everyone - fewer).abs())
    assert float(moved.max()) == 0.5 and float(moved.mean()) > 0.3  # every query hears its records
    assert float(everyone.abs().max()) <= 4.0


def test_padding_and_silent_records_count_nothing():
    whole = backward(*engine_for(Twice(), X, Y, ALL))
    engine, model, optimizer, loader, loss = engine_for(Twice(), X, Y, ALL, max_physical_batch_size=5)
    for x, y in loader:  # two pieces, the second one padded
        optimizer.zero_grad()
        loss(model(x), y).backward()
    sums = torch.stack(
        [engine.training.quantiles.modules[p]._wc_counter.sums[i] for p, i in engine.training.quantiles.queries]
    )
    torch.testing.assert_close(sums, whole)
    counter = Counter(1, 1, torch.device("cpu"))
    counter.add(0, torch.tensor([True, True, False, True]), torch.tensor([0.0, math.nan, math.inf, 1.0]))
    assert counter.sums.tolist() == [0.5, 0.0, 0.0]


def test_other_backward_passes_are_refused_and_count_nothing():
    engine, model, optimizer, loader, loss = engine_for(Twice(), X, Y, ALL)
    x, y = next(iter(loader))
    hidden = model.shared(model.norm(model.conv(x[:, None])).flatten(1))  # type: ignore[union-attr, operator]
    with pytest.raises(wc.ContractError, match="outside the private loss"):
        hidden.square().sum().backward()
    sums = torch.stack(
        [engine.training.quantiles.modules[p]._wc_counter.sums[i] for p, i in engine.training.quantiles.queries]
    )
    assert not sums.any()


@pytest.mark.parametrize("z", [0.7, 3.0])
def test_gradients_and_queries_together_cost_what_is_accounted(z):
    bounds = wc.Bounds(layer_radius=1.0, cotangent_radius=0.2, adaptive=wc.Adaptive(noise=25.0))
    engine, *_ = engine_for(Twice(), X, Y, bounds, sigma=z)
    report = engine.report()
    adaptive = report["adaptive"]
    assert adaptive["queries_per_step"] == 8 and adaptive["noise"] == 25.0
    expected = (z**-2 - 8 * 50.0**-2) ** -0.5
    assert adaptive["gradient_multiplier"] == pytest.approx(expected, rel=1e-6)
    # from the noise that is really added: joint multiplier of all layers and all queries
    layers = [layer["noise"] / layer["sensitivity"] for layer in report["layers"]]
    assert combine([*layers, *[2 * 25.0] * 8]) == pytest.approx(z, rel=1e-6)
    assert report["joint_multiplier"] == pytest.approx(z, rel=1e-6)
    unpaid = combine([*(v * z / expected for v in layers), *[2 * 25.0] * 8])
    assert unpaid < z * (1 - 1e-4)  # the mutant that does not pay for its queries
    uncentred = combine([*layers, *[25.0] * 8])
    assert uncentred < z * (1 - 1e-4)  # the mutant whose indicators are 0 and 1: they move by 1, not by 1/2


def test_default_noise_is_a_twentieth_of_the_batch_and_cheap():
    """The example of the design: four queries, sigma_b = b/20, b = 256, z = 1 cost 0.3%."""
    bounds = wc.Bounds(layer_radius=1.0, cotangent_radius=0.2, adaptive=wc.Adaptive())
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    engine, *_ = engine_for(model, X, Y, bounds, sigma=1.0, b=256)
    assert engine.training.quantiles is not None
    assert engine.training.quantiles.sigma_b == 256 / 20
    assert engine.training.quantiles.gradient_sigma == pytest.approx(1.003, abs=5e-4)


def test_the_answers_carry_their_noise():
    """Without records that speak, limits move by the noise alone, with the announced standard deviation."""
    bounds = wc.Bounds(layer_radius=1.0, cotangent_radius=0.2, adaptive=wc.Adaptive(rate=1.0, noise=40.0))
    model = nn.Sequential(*[nn.Linear(6, 6, bias=False) for _ in range(20)])
    x = torch.zeros(8, 6)
    engine, model, optimizer, loader, loss = engine_for(model, x, torch.zeros(8, dtype=torch.long), bounds, sigma=1.0)
    model[0].weight.data.zero_()
    before = {k: torch.tensor(v) for k, v in engine.training.quantiles.state().items()}
    counts = backward(engine, model, optimizer, loader, loss)
    optimizer.step()
    after = engine.training.quantiles.state()
    moves = torch.stack(
        [(torch.tensor(after[p])[i] / before[p][i]).log() for p, i in engine.training.quantiles.queries]
    )
    noise = 8 * (-moves.double() + 0.5 - 0.5) - counts  # share - quantile = sum/b
    assert 0.6 * 40 < float(noise.std()) < 1.5 * 40


@pytest.mark.parametrize("quantile", [0.3, 0.8])
def test_limits_converge_to_the_quantile_on_fixed_data(quantile):
    torch.manual_seed(0)
    x, y = torch.randn(200, 6) * torch.rand(200, 1) * 5, torch.randint(0, 3, (200,))
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    bounds = wc.Bounds(layer_radius=0.3, cotangent_radius=5.0, adaptive=wc.Adaptive(quantile, rate=0.3))
    parts = engine_for(model, x, y, bounds, b=200)
    engine, model = parts[0], parts[1]
    steps(*parts, count=60)
    norms = (x.square().sum(1) + 1).sqrt()  # the weights stand still: the first layer's inputs are known
    reached = float((norms <= engine.training.quantiles.state()["0"][0]).double().mean())
    assert reached == pytest.approx(quantile, abs=0.03)
    logits = model(x).detach()
    residual = (torch.softmax(logits, 1) - nn.functional.one_hot(y, 3)).norm(dim=1)
    reached = float((residual <= engine.training.quantiles.state()["2"][1]).double().mean())
    assert reached == pytest.approx(quantile, abs=0.03)


def test_the_certificate_follows_and_stays_true():
    """After limits have moved, one record still moves the sum by at most the certified bound."""
    bounds = wc.Bounds(layer_radius=5.0, cotangent_radius=2.0, adaptive=wc.Adaptive(0.5, rate=0.5))
    engine, *rest = engine_for(Twice(), X, Y, bounds)
    start = engine.certificate().sensitivities
    steps(engine, *rest, count=6)
    limits, later = engine.training.quantiles.state(), engine.certificate().sensitivities
    assert later["head"] < start["head"]
    assert later["head"] == pytest.approx(limits["head"][0] * limits["head"][1], rel=1e-3)

    def sums(keep: Tensor) -> list[Tensor]:
        other, model, optimizer, loader, loss = engine_for(Twice(), X[keep], Y[keep], bounds)
        other.training.quantiles.load_state(limits)
        steps(other, model, optimizer, loader, loss, count=1)
        return [p.grad * 8 for p in model.parameters()]

    names = [k.rsplit(".", 1)[0] for k, _ in Twice().named_parameters()]
    whole = sums(torch.arange(8) >= 0)
    for i in (0, 3, 7):
        fewer = sums(torch.arange(8) != i)
        for layer, bound in later.items():
            square = sum(
                float((a - b).square().sum()) for n, a, b in zip(names, whole, fewer, strict=True) if n == layer
            )
            assert math.sqrt(square) <= bound


def test_refusals():
    model, batch = nn.Linear(6, 3), (X, Y)
    with pytest.raises(WeightclipError, match="nothing to adapt"):
        engine_for(model, *batch, wc.Bounds(input_radius=1.0, adaptive=wc.Adaptive()))
    with pytest.raises(WeightclipError, match="quantile queries"):
        engine_for(nn.Linear(6, 3), *batch, wc.Bounds(layer_cap=1.0, adaptive=wc.Adaptive(noise=0.1)), sigma=1.0)
    with pytest.raises(WeightclipError, match="joint_cap"):
        engine_for(nn.Linear(6, 3), *batch, wc.Bounds(joint_cap=1.0, adaptive=wc.Adaptive()))
    for wrong in ({"quantile": 0.0}, {"quantile": 1.0}, {"rate": 0.0}, {"noise": -1.0}, {"noise": math.inf}):
        with pytest.raises(WeightclipError, match="Adaptive"):
            wc.Adaptive(**wrong)


def test_quantiles_are_private_to_their_engine():
    """Copies of the model leave the counters behind."""
    import copy

    engine, model, *_ = engine_for(Twice(), X, Y, ALL)
    assert isinstance(engine.training.quantiles, Quantiles)
    assert copy.deepcopy(model).head._wc_counter is None
