"""What only a GPU can show: recorded bounds and kernels give the numbers of the plain path, and nothing waits."""

from __future__ import annotations

import pytest
import torch
from tests.engine_kit import pin
from torch import Tensor, nn

import weightclip as wc
import weightclip.factors._conv as conv
import weightclip.factors._dense as dense
from weightclip._device import Recorder
from weightclip.factors.kernels._products import dense_gradient
from weightclip.sampling._loader import BatchInfo

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

BOUNDS = {
    "weights": wc.Bounds(input_radius=1.0, weight_norm=1.0, spectral=False),
    "spectral": wc.Bounds(input_radius=1.0, weight_norm=1.0),
    "factors": wc.Bounds(layer_radius=1.0, cotangent_radius=0.1),
    "both": wc.Bounds(input_radius=1.0, weight_norm=1.0, spectral=False, layer_radius=1.0, cotangent_radius=0.1),
    "joint": wc.Bounds(joint_cap=1.0),
}


def train(bounds: wc.Bounds, steps: int, half: bool = False) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 20, 3, padding=1), nn.ReLU(), nn.Conv2d(20, 24, 3, stride=2), wc.nn.SafeGroupNorm(4, 24),
        nn.Flatten(), nn.Linear(24 * 7 * 7, 5),
    ).cuda()  # fmt: skip
    x, y = torch.randn(33, 3, 16, 16, device="cuda"), torch.randint(0, 5, (33,), device="cuda")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    engine = wc.PrivacyEngine()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=33)
    engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, criterion=nn.CrossEntropyLoss(), noise_multiplier=1.0,
        bounds=bounds, sample_rate=0.01, expected_batch_size=33,
    )  # fmt: skip
    pin(engine, 3)
    found = []
    for step in range(steps):
        engine.training.hand_out(BatchInfo(step + 1, 0, True, None, 33))
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            loss = engine.criterion(model(x), y)
        loss.backward()
        optimizer.step()
        found.append(engine.training.sensitivity.values.cpu().clone())
    return torch.cat([p.detach().flatten() for p in model.parameters()]).cpu(), found


@pytest.mark.parametrize("name", list(BOUNDS))
def test_recorded_steps_and_kernels_change_nothing(name, monkeypatch):
    weights, sensitivities = train(BOUNDS[name], 7)
    monkeypatch.setattr(Recorder, "__call__", lambda self, key, work: work())
    for module in (conv, dense):
        monkeypatch.setattr(module, "fits", lambda *_: False)
        monkeypatch.setattr(module, "fits_scale", lambda *_: False)
    plain_weights, plain = train(BOUNDS[name], 7)
    torch.testing.assert_close(weights, plain_weights, rtol=1e-5, atol=1e-6)
    for a, b in zip(sensitivities, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0.0)


def standardized() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(wc.nn.StandardizedConv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 5))


def fused(
    bounds: wc.Bounds,
    graphs: bool,
    views: int = 1,
    seed: int | None = 3,
    draws: int = 24,
    make=None,
    half: bool = False,
    capturable: bool = False,
    between=None,
    compiled: bool = False,
):
    """Poisson draws of a real loader by ``fused_step``, or by the ordinary loop on the same padded batches."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 20, 3, padding=1), nn.ReLU(), nn.Conv2d(20, 24, 3, stride=2), wc.nn.SafeGroupNorm(4, 24),
        nn.Flatten(), nn.Linear(24 * 7 * 7, 5),
    )  # fmt: skip
    model = (model if make is None else make()).cuda()
    x, y = torch.randn(900, 3, 16, 16), torch.randint(0, 5, (900,))
    x[5] = float("nan")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, capturable=capturable)
    engine = wc.PrivacyEngine()
    _, _, loader, _ = engine.make_private(
        module=model, optimizer=optimizer, criterion=nn.CrossEntropyLoss(), noise_multiplier=0.5, bounds=bounds,
        data_loader=torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=40),
        augmentation_multiplicity=views,
    )  # fmt: skip
    if seed is not None:
        pin(engine, seed)
    step = engine.fused_step(torch.compile(model) if compiled else None)
    if not graphs:
        step._record = lambda *_: False  # type: ignore[method-assign]
    losses, kept = [], []
    while engine.steps < draws:
        for a, b in loader:
            a = a if views == 1 else torch.stack([a, a.flip(3)], 1).flatten(0, 1)
            with torch.autocast("cuda", torch.bfloat16, enabled=half):
                losses.append(float(step(a, b)))
            kept.append([(p.grad, p.grad.clone()) for p in model.parameters() if p.grad is not None])
            if between is not None:
                between(engine)
            if engine.steps == draws:
                break
    assert all(torch.equal(grad, then) for pairs in kept for grad, then in pairs)  # nothing kept is written to later
    return torch.cat([p.detach().flatten() for p in model.parameters()]).cpu(), losses, step, engine


@pytest.mark.parametrize("name", list(BOUNDS))
def test_a_recorded_step_is_the_ordinary_one(name):
    weights, losses, step, engine = fused(BOUNDS[name], True)
    assert step.on and step._graphs, "nothing was recorded"
    plain, plain_losses, _, _ = fused(BOUNDS[name], False)
    torch.testing.assert_close(weights, plain, rtol=1e-5, atol=1e-6)
    assert losses == pytest.approx(plain_losses, rel=1e-4)
    assert engine.steps == 24 and engine.get_epsilon(1e-5) > 0


@pytest.mark.filterwarnings("ignore")  # of torch's own, in its compiler
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", ["factors", "joint"])
def test_a_compiled_model_is_recorded_too(name, half):
    torch._dynamo.reset()
    weights, losses, step, engine = fused(BOUNDS[name], True, half=half, compiled=True, capturable=True, draws=40)
    assert step.on and any(whole(step)), "nothing was recorded"
    plain, plain_losses, _, _ = fused(BOUNDS[name], False, half=half, draws=40)
    room = 3e-2 if half else 1e-3  # Adam's first steps are signs: where a gradient is nearly zero, rounding decides
    torch.testing.assert_close(weights, plain, rtol=room, atol=room)
    assert losses == pytest.approx(plain_losses, rel=room)
    assert engine.steps == 40


def whole(step) -> list[bool]:
    return [found.whole for found in step._graphs.values()]


def lower_the_rate(engine: wc.PrivacyEngine) -> None:
    if engine.steps == 40:
        engine.optimizer.param_groups[0]["lr"] = 1e-3


def load_the_state(engine: wc.PrivacyEngine) -> None:
    if engine.steps == 40:
        state = engine.optimizer.state_dict()
        for values in state["state"].values():
            values["exp_avg"] = 3 * values["exp_avg"]
        engine.optimizer.load_state_dict(state)


@pytest.mark.parametrize("name", list(BOUNDS))
@pytest.mark.parametrize("between", [None, lower_the_rate, load_the_state])
def test_a_recorded_step_with_its_optimizer_is_the_ordinary_one(name, between):
    weights, losses, step, _ = fused(BOUNDS[name], True, draws=70, capturable=True, between=between)
    assert any(whole(step)), "no optimiser was recorded"
    plain, plain_losses, _, _ = fused(BOUNDS[name], False, draws=70, capturable=True, between=between)
    torch.testing.assert_close(weights, plain, rtol=1e-3, atol=2e-4)  # Adam enlarges differences of rounding
    assert losses == pytest.approx(plain_losses, rel=1e-3)


def test_a_hooked_or_changing_optimizer_runs_as_it_is_written():
    seen = []

    def hook(engine: wc.PrivacyEngine) -> None:
        if engine.steps == 1:
            engine.optimizer.register_step_post_hook(lambda *_: seen.append(1))

    def schedule(engine: wc.PrivacyEngine) -> None:
        engine.optimizer.param_groups[0]["lr"] *= 0.99

    for between in (hook, schedule):
        step = fused(BOUNDS["weights"], True, capturable=True, between=between)[2]
        assert step._graphs and not any(whole(step))
    assert len(seen) == 23


def test_clipped_norms_follow_a_recorded_optimizer():
    """After every step, the norms that serve the next bounds are those of the weights as they are."""

    def check(engine: wc.PrivacyEngine) -> None:
        bank, gains = engine.training.sensitivity.gains.bank, engine.training.sensitivity.gains
        assert bank is not None and gains.clipped
        kept, exact = gains._clipped.norms, bank.vector()
        torch.testing.assert_close(kept, exact, rtol=1e-5, atol=0.0)
        assert bool((kept >= exact * (1 - 1e-9)).all()) and bool((kept <= 1 + 1e-9).all())

    assert any(whole(fused(BOUNDS["weights"], True, draws=30, capturable=True, between=check)[2]))


@pytest.mark.parametrize("name", ["weights", "factors"])
def test_fused_steps_stop_at_weights_that_are_not_finite(name):
    def spoil(engine: wc.PrivacyEngine) -> None:
        if engine.steps == 60:
            with torch.no_grad():
                next(engine.model.parameters())[0].fill_(float("inf"))
        assert engine.steps <= 64

    with pytest.raises(wc.ContractError, match="no longer finite"):
        fused(BOUNDS[name], True, draws=80, capturable=True, between=spoil)


def test_compiled_kernels_are_found_by_size_and_alignment():
    for offset in (0, 0, 1, 1, 4, 0):  # the second call of a kind takes the short way
        memory = torch.randn(2000, device="cuda")
        x, d = memory[offset : offset + 60].view(5, 12), memory[1000 + offset : 1015 + offset].view(5, 3)
        found, sums = dense_gradient(x, d, None, bias=True)
        torch.testing.assert_close(found, d.double().T @ x.double(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(sums, d.double().sum(0), rtol=1e-12, atol=1e-12)


def test_recorded_steps_of_standardized_kernels():
    weights, _, step, _ = fused(BOUNDS["factors"], True, make=standardized)
    assert step._graphs
    plain = fused(BOUNDS["factors"], False, make=standardized)[0]
    torch.testing.assert_close(weights, plain, rtol=1e-5, atol=1e-6)


def test_recorded_steps_under_autocast():
    weights, losses, step, _ = fused(BOUNDS["factors"], True, half=True)
    plain, plain_losses, _, _ = fused(BOUNDS["factors"], False, half=True)
    assert step._graphs
    torch.testing.assert_close(weights, plain, rtol=1e-3, atol=1e-4)
    assert losses == pytest.approx(plain_losses, rel=1e-2)


@pytest.mark.parametrize("name", ["weights", "factors"])
def test_half_precision_kernels_agree_with_the_operators(name, monkeypatch):
    weights, _ = train(BOUNDS[name], 3, half=True)
    for module in (conv, dense):
        monkeypatch.setattr(module, "fits", lambda *_: False)
        monkeypatch.setattr(module, "fits_scale", lambda *_: False)
    plain, _ = train(BOUNDS[name], 3, half=True)
    torch.testing.assert_close(weights, plain, rtol=1e-3, atol=1e-4)


def test_recorded_views_and_secure_noise():
    weights, _, step, _ = fused(BOUNDS["factors"], True, views=2)
    assert step._graphs
    torch.testing.assert_close(weights, fused(BOUNDS["factors"], False, views=2)[0], rtol=1e-5, atol=1e-6)
    first, second = (fused(BOUNDS["factors"], True, seed=None)[0] for _ in range(2))
    assert not torch.equal(first, second)


def noise_of(draws: int, streams: list[torch.cuda.Stream]) -> torch.Tensor:
    """No gradient (every record is padding): what is released is the noise alone, launched on these streams in turn."""
    torch.manual_seed(0)
    model = nn.Linear(400, 50).cuda()
    x, y = torch.randn(256, 400, device="cuda"), torch.zeros(256, dtype=torch.long, device="cuda")
    nobody = torch.zeros(256, dtype=torch.bool, device="cuda")
    engine = wc.PrivacyEngine()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine.make_private(module=model, optimizer=optimizer, data_loader=loader, criterion=nn.CrossEntropyLoss(),
                        noise_multiplier=2.0, bounds=wc.Bounds(layer_radius=1.0, cotangent_radius=0.5))  # fmt: skip
    step, found = engine.fused_step(), []
    torch.cuda.synchronize()
    for draw in range(draws):
        engine.training.hand_out(BatchInfo(draw + 1, 0, True, nobody, 256))
        with torch.cuda.stream(streams[draw % len(streams)]):
            torch.cuda._sleep(10_000_000 if len(streams) > 1 and draw % 2 else 1)  # every other stream is late
            step(x, y)
            found.append(model.weight.grad.flatten().clone())
    torch.cuda.synchronize()
    assert step._graphs
    return torch.stack(found).cpu() * 256


@pytest.mark.parametrize("count", [1, 2])
def test_noise_of_recorded_steps_is_fresh_and_of_the_right_size(count: int):
    streams = [torch.cuda.current_stream()] if count == 1 else [torch.cuda.Stream() for _ in range(count)]
    found = noise_of(40, streams)
    assert float(found.std()) == pytest.approx(1.0, rel=0.01)  # sigma Delta = 2 * 1 * 0.5, one layer
    assert float((torch.corrcoef(found) - torch.eye(40)).abs().max()) < 0.05


def test_batches_of_the_host_are_taken_in_pieces_too():
    x, y = torch.randn(64, 6), torch.randint(0, 3, (64,))
    engine, model = wc.PrivacyEngine(), nn.Linear(6, 3).cuda()
    _, _, loader, _ = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), criterion=nn.CrossEntropyLoss(),
        data_loader=torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16),
        noise_multiplier=1.0, max_physical_batch_size=5,
    )  # fmt: skip
    step = engine.fused_step()
    for a, b in loader:
        step(a, b)
    assert engine.steps == 4


def test_a_fused_step_spends_its_batch_and_its_budget():
    _, _, step, engine = fused(BOUNDS["factors"], True)
    x, y = torch.zeros(40, 3, 16, 16).cuda(), torch.zeros(40, dtype=torch.long).cuda()
    with pytest.raises(wc.ContractError, match="new batch"):
        step(x, y)
    engine.budget = engine.steps
    engine.training.hand_out(BatchInfo(1000, 0, True, None, 40))
    with pytest.raises(wc.BudgetSpent):
        step(x, y)
