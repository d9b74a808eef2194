"""How far weights have moved is never understated, and what is added between refreshes covers the worst direction."""

from __future__ import annotations

import math

import pytest
import torch
from tests.engine_kit import private, table
from torch import Tensor, nn

import weightclip as wc
from weightclip.bounds import Numerics, dense_norm, kernel_overlap, layer_rule, register_layer
from weightclip.certificate import Gains, build_plan
from weightclip.certificate import _drift as module_under_test
from weightclip.certificate._drift import drift
from weightclip.losses import CrossEntropy

LAYERS = [nn.Linear(40, 24), nn.Linear(3, 50), nn.Conv2d(4, 12, 3), nn.Conv2d(4, 8, 3, groups=2),
          nn.ConvTranspose2d(6, 4, 3), nn.Conv1d(20, 16, 2)]  # fmt: skip


@pytest.fixture(params=["frobenius", "narrow"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """As on a CPU, and as on a device."""
    if request.param == "narrow":
        monkeypatch.setattr(module_under_test, "_worth", lambda matrix: matrix.dtype == torch.float32)
    return request.param


def exact(module: nn.Module, now: Tensor, then: Tensor) -> float:
    moved = now.double() - then.double()
    groups = 1 if isinstance(module, nn.Linear) else module.groups
    blocks = moved.reshape(groups, moved.shape[0] // groups, -1)
    return max(float(torch.linalg.matrix_norm(block, 2)) for block in blocks)


@pytest.mark.parametrize("module", LAYERS, ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_drift_is_an_upper_bound(way: str, module: nn.Module, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    for scale in (1e-7, 1e-3, 1.0, 1e3):
        then = torch.randn(module.weight.shape, generator=g).to(dtype)
        now = (then + scale * torch.randn(module.weight.shape, generator=g)).to(dtype)
        truth, found = exact(module, now, then), float(drift(module, now, then))
        size = float((now.double() - then.double()).norm())
        assert truth <= found <= size * (1 + 1e-4) + 1e-15
    assert float(drift(module, now, now)) < 1e-15


def test_on_a_device_it_is_smaller_than_the_frobenius_norm(way: str) -> None:
    layer, g = nn.Linear(256, 256), torch.Generator().manual_seed(0)
    then = torch.randn(256, 256, generator=g)
    now = then + 1e-3 * torch.randn(256, 256, generator=g)
    ratio = float(drift(layer, now, then)) / float((now - then).norm())
    assert ratio < 0.2 if way == "narrow" else ratio > 0.999


def test_what_is_not_finite_is_not_hidden(way: str) -> None:
    layer, then = nn.Linear(4, 4), torch.ones(4, 4)
    for bad in (math.nan, math.inf):
        now = then.clone()
        now[1, 2] = bad
        assert not math.isfinite(float(drift(layer, now, then)))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 30), nn.ReLU(), nn.Linear(30, 3))


def made(net: nn.Module, refresh: int, spectral: bool = False) -> Gains:
    bounds = wc.Bounds(input_radius=1.0, spectral=spectral, refresh=refresh)
    return Gains(build_plan(net, CrossEntropy(), bounds, (torch.zeros(2, 2, 6, 6),)), bounds)


def norm(module: nn.Module) -> float:
    """sqrt(m) ‖R‖ for a convolution, which is what the bank certifies."""
    m = 1 if isinstance(module, nn.Linear) else kernel_overlap(module)
    return math.sqrt(m) * float(torch.linalg.matrix_norm(module.weight.detach().flatten(1).double(), 2))


@torch.no_grad()
def grow(net: nn.Sequential, by: float) -> None:
    """Every weight moves along its largest singular vectors: the norm grows by all that it moves."""
    for module in net:
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            u, _, vh = torch.linalg.svd(module.weight.flatten(1).double(), full_matrices=False)
            module.weight += (by * torch.outer(u[:, 0], vh[0])).reshape(module.weight.shape).float()


def check_growth(refresh: int = 4, steps: int = 9, numerics: Numerics = Numerics()) -> None:  # noqa: B008
    net = model()
    gains = made(net, refresh)
    assert gains.bank is not None
    fresh = 0
    for step in range(steps):
        known = gains.current(numerics, step)
        assert set(known) == {"0", "3", "5"}
        for path, found in known.items():
            module = net[int(path)]
            cast = module.weight.detach().to(numerics.weights).float()
            m = 1 if isinstance(module, nn.Linear) else kernel_overlap(module)
            truth = math.sqrt(m) * float(torch.linalg.matrix_norm(cast.flatten(1).double(), 2))
            assert truth <= float(found) <= truth * (1.02 if numerics == Numerics() else 1.6)
            fresh += float(found) <= truth * (1 + 1e-5)
        grow(net, 0.05)
    assert fresh >= 3 * math.ceil(steps / refresh) or numerics != Numerics()


def test_weights_that_move_along_their_largest_singular_vectors_are_covered(way: str) -> None:
    check_growth()


def test_norms_of_cast_weights_are_covered_in_between(way: str) -> None:
    check_growth(numerics=Numerics(torch.bfloat16, 2.0**-8))


def test_a_snapshot_keeps_its_places_and_says_when_it_was_taken() -> None:
    """What is recorded between two snapshots reads them where they lie."""
    net, numerics = model(), Numerics()
    gains = made(net, 3)
    taken, places = [], []
    for step in range(7):
        taken.append(gains.renew(numerics, step))
        assert not gains.renew(numerics, step)  # looking again takes none
        places.append(gains.places)
        grow(net, 0.01)
    assert taken == [True, False, False, True, False, False, True] and len(set(places)) == 1
    assert len(places[0]) == 6
    assert gains.renew(Numerics(torch.bfloat16, 2.0**-8), 6)  # passes round otherwise
    gains.reset()
    assert gains.renew(numerics, 6) and not made(net, 1).renew(numerics, 0)


def check_shared() -> None:
    """At a refresh weights are clipped, and what clipping found serves the snapshot: one certificate for both."""
    net, numerics, calls = model(), Numerics(), []
    gains = made(net, 3)
    bank = gains.bank
    assert bank is not None
    once = bank.numbers
    bank.numbers = lambda *a: calls.append(1) or once(*a)  # type: ignore[method-assign, func-returns-value]
    with torch.no_grad():
        gains.clip({"0": 0.5, "3": 0.4, "5": 0.3})
    known = gains.current(numerics, 0)
    assert len(calls) == 1
    for path, limit in (("0", 0.5), ("3", 0.4), ("5", 0.3)):
        assert norm(net[int(path)]) <= float(known[path]) <= limit * (1 + 1e-4)
    with torch.no_grad():
        gains.clip({"0": 0.5})
    net[3].weight.data.mul_(3)  # no version is counted, and the norms that clipping found are those of others
    assert float(gains.current(numerics, 3)["3"]) >= norm(net[3]) and len(calls) == 3


def test_clipping_and_the_snapshot_share_one_certificate() -> None:
    check_shared()


def test_norms_clipping_found_serve_only_the_weights_it_left() -> None:
    net, numerics = model(), Numerics()
    gains = made(net, 3)
    with torch.no_grad():
        gains.clip({"3": 0.4})
        grow(net, 1.0)
    assert float(gains.current(numerics, 0)["3"]) >= norm(net[3]) > 1.3


@pytest.mark.parametrize("spectral", [True, False])
def test_a_checkpoint_between_snapshots_continues_as_it_was(spectral: bool) -> None:
    net, numerics = model(), Numerics()
    gains = made(net, 4, spectral)
    gains.current(numerics, 0)
    grow(net, 0.1)
    before = {k: float(v) for k, v in gains.current(numerics, 1).items()}
    tensors: dict[str, Tensor] = {}
    state = gains.state(tensors)
    other = made(net, 4, spectral)
    other.restore(state, tensors)
    assert {k: float(v) for k, v in other.current(numerics, 1).items()} == before
    grow(net, 0.1)
    assert all(float(other.current(numerics, 2)[k]) > v for k, v in before.items())


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Collapse(torch.optim.SGD):
    """Writes through ``.data``, which counts no version, and keeps the Frobenius norm of the second layer."""

    def step(self, closure=None):
        weight = self.param_groups[0]["params"][2]
        weight.data.copy_(torch.zeros(8, 8).index_fill_(0, torch.tensor([0]), 1.0))


def check_settled() -> None:
    """Norms that clipping found serve the snapshot after it, and none that follows steps of the optimiser."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        model[2].weight.copy_(torch.eye(8))  # of norm 1; one full row of ones has 2.8
    bounds = wc.Bounds(input_radius=1.0, spectral=False, refresh=16)
    run = private(model, table(8, features=6), sigma=1e-6, optimizer=lambda p: Collapse(p, lr=0.0), bounds=bounds)
    for half in (False, True, False):  # another type asks for a snapshot within the interval
        x, y = next(iter(run.loader))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            run.criterion(run.model(x), y).backward()
        sensitivity = run.engine.training.sensitivity
        least = math.prod(float(torch.linalg.matrix_norm(run.model[i].weight.detach().double(), 2)) for i in (2, 4))
        found = dict(zip(sensitivity.plan.layers, sensitivity.values.tolist(), strict=True))["0"]
        assert found >= sensitivity.plan.loss_bound * least * math.sqrt(2)
        run.optimizer.step()


def test_norms_that_clipping_found_are_used_once() -> None:
    check_settled()


class Tripled(nn.Linear):
    """A layer of the user's own, with a rule of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 3 * nn.functional.linear(x, self.weight, self.bias)


class TripledRule(type(layer_rule(nn.Linear(1, 1)))):  # type: ignore[misc]
    """Three times the gain of a dense layer."""

    def gain(self, module, op, p, numerics):
        return 3 * dense_norm(module.weight, p) * self.inflation(module, numerics)


register_layer(Tripled, TripledRule())


def check_own_rule() -> None:
    """A rule of the user's own is asked for the gain, at every refresh and after every move of the weights."""
    for spectral in (False, True):
        for refresh in (1, 4):
            model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), Tripled(8, 3).requires_grad_(False))
            bounds = wc.Bounds(input_radius=1.0, spectral=spectral, refresh=refresh)
            plan = build_plan(model, CrossEntropy(), bounds, (torch.zeros(2, 6),))
            gains = Gains(plan, bounds)
            for step in range(3):
                norm = float(torch.linalg.matrix_norm(model[2].weight.detach().double(), 2))
                found = plan.evaluate(Numerics(), gains.current(Numerics(), step))["0"].sensitivity
                assert 3 * norm * 2 * 0.9999 <= float(found) <= 3 * norm * 2 * 1.001  # of sqrt(2), twice
                with torch.no_grad():
                    model[2].weight[0, 0] += 1.0


def test_a_rule_of_the_users_own_is_asked() -> None:
    check_own_rule()


@cuda
@pytest.mark.parametrize("shape", [(64, 64), (10, 4096), (1000, 300), (4096, 4096)])
def test_drift_on_a_device(shape: tuple[int, int]) -> None:
    g = torch.Generator("cuda").manual_seed(0)
    layer = nn.Linear(shape[1], shape[0], device="cuda")
    then = torch.randn(shape, device="cuda", generator=g)
    for moved in (torch.randn(shape, device="cuda", generator=g), torch.ones(shape, device="cuda")):
        for scale in (1e-6, 1e-3, 1.0):
            now = then + scale * moved
            truth = float(torch.linalg.matrix_norm(now.double() - then.double(), 2))
            found, size = float(drift(layer, now, then)), float((now - then).norm())
            assert truth <= found <= size * (1 + 1e-3)
    assert float(drift(layer, then + 1e-3 * torch.randn(shape, device="cuda", generator=g), then)) < 3.5 * 1e-3 * (
        math.sqrt(shape[0]) + math.sqrt(shape[1])
    )


@cuda
def test_recorded_drift_follows_the_weights() -> None:
    """Between snapshots bounds are replayed; they are those of the weights as they are."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 2500), nn.ReLU(), nn.Linear(2500, 1500), nn.ReLU(), nn.Linear(1500, 3)).cuda()
    bounds = wc.Bounds(input_radius=1.0, weight_norm=1.0, spectral=False, refresh=8)
    adam = lambda p: torch.optim.Adam(p, lr=1e-3)  # noqa: E731
    run = private(net, table(64, features=20), sigma=1.0, optimizer=adam, bounds=bounds, batch=16, seed=None)
    done = 0
    while done < 27:
        for x, y in run.loader:
            run.optimizer.zero_grad()
            run.criterion(run.model(x.cuda()), y.cuda()).backward()
            known = run.engine.training.sensitivity.gains.current(Numerics(), run.engine.steps)
            for path, found in known.items():
                assert float(found) >= float(torch.linalg.matrix_norm(net[int(path)].weight.detach().double(), 2))
            again = run.engine.training.sensitivity
            fresh = again.release.sensitivities(again.evaluate())
            torch.testing.assert_close(again.values, fresh, rtol=1e-6, atol=0.0)  # what was recorded is what is
            run.optimizer.step()
            done += 1
