"""ClipWeights after every step, and certified norms between refreshes."""

from __future__ import annotations

import math

import pytest
import torch
from tests.engine_kit import cnn, mlp, pictures, private, residual, same_bits, table
from torch import nn

import weightclip as wc
from weightclip.certificate import build_plan
from weightclip.certificate._gains import Gains
from weightclip.losses import CrossEntropy

MODELS = {"mlp": (mlp, table), "cnn": (cnn, pictures), "residual": (residual, table)}


def norms(run, p: float = 2) -> dict[str, float]:
    return {
        k: wc.operator_norm_bound(m, p) for k, m in run.model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))
    }


@pytest.mark.parametrize("spectral", [True, False])
@pytest.mark.parametrize("p", [1, 2, math.inf])
@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_weights_are_clipped_at_make_private_and_after_every_step(kind: str, p: float, spectral: bool) -> None:
    make, draw = MODELS[kind]
    c = 0.4
    run = private(make(), draw(8), sigma=2.0, bounds=wc.Bounds(input_radius=1.0, weight_norm=c, p=p, spectral=spectral))
    for _ in range(4):
        assert all(v <= c * (1 + 1e-6) for v in norms(run, p).values())
        run.train()
    assert all(v <= c * (1 + 1e-6) for v in norms(run, p).values())
    assert max(norms(run, p).values()) > 0.99 * c  # noise of this size reaches the bound


def test_sphere_keeps_the_norm_equal() -> None:
    run = private(mlp(), table(8), sigma=0.1, bounds=wc.Bounds(input_radius=1.0, weight_norm=0.7, clip=wc.Sphere()))
    for _ in range(3):
        assert all(v == pytest.approx(0.7, rel=1e-5) and v <= 0.7 * (1 + 1e-6) for v in norms(run).values())
        run.train()


@pytest.mark.parametrize(
    "clip", [wc.Rescale(), wc.Sphere(), wc.SpectralProjection(), wc.Bjorck()], ids=lambda c: type(c).__name__
)
def test_every_strategy_holds_after_steps_and_per_layer(clip) -> None:
    limits = {"0": 0.3, "2": 1.5}
    run = private(mlp(), table(8), sigma=2.0, bounds=wc.Bounds(input_radius=1.0, weight_norm=limits, clip=clip)).train(
        3
    )
    for name, limit in limits.items():
        assert norms(run)[name] <= limit * (1 + 1e-6)
    only = private(
        mlp(), table(8), sigma=50.0, bounds=wc.Bounds(input_radius=1.0, weight_norm={"2": 0.5}, clip=clip)
    ).train(2)
    assert norms(only)["2"] <= 0.5 * (1 + 1e-6) < norms(only)["0"]


def test_without_a_weight_norm_weights_are_the_optimisers() -> None:
    run = private(mlp(), table(8), optimizer=lambda p: torch.optim.SGD(p, lr=0.5))
    before = run.weights()
    run.train()
    for name, g in run.grads().items():
        torch.testing.assert_close(run.weights()[name], before[name] - 0.5 * g)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("refresh", [2, 5])
def test_between_refreshes_sensitivities_never_fall_below_fresh_ones(kind: str, refresh: int) -> None:
    make, draw = MODELS[kind]
    run = private(make(), draw(8), sigma=0.5, bounds=wc.Bounds(input_radius=1.0, refresh=refresh),
                  optimizer=lambda p: torch.optim.SGD(p, lr=0.3))  # fmt: skip
    fresh = private(make(), draw(8), bounds=wc.Bounds(input_radius=1.0))
    equal = 0
    for step in range(7):
        x, y = next(iter(run.loader))
        run.criterion(run.model(x), y).backward()
        fresh.model.load_state_dict(run.model.state_dict())
        lazy, exact = run.layers(), fresh.layers()
        for name in exact:
            assert lazy[name]["sensitivity"] >= exact[name]["sensitivity"] * (1 - 1e-12)
        close = all(lazy[n]["sensitivity"] <= exact[n]["sensitivity"] * (1 + 1e-9) for n in exact)
        if step % refresh == 0:
            assert close  # just refreshed
            equal += 1
        run.engine.report()  # looking must not move the schedule
        run.optimizer.step()
    assert equal == math.ceil(7 / refresh)


@pytest.mark.parametrize("spectral", [True, False])
def test_weights_are_clipped_at_refreshes_and_certified_as_they_are_in_between(spectral: bool) -> None:
    settings = {"input_radius": 1.0, "weight_norm": 0.5, "spectral": spectral}
    run = private(mlp(), table(8), sigma=5.0, bounds=wc.Bounds(refresh=3, **settings))  # type: ignore[arg-type]
    fresh = private(mlp(), table(8), bounds=wc.Bounds(**settings))  # type: ignore[arg-type]
    largest = []
    for _ in range(7):
        x, y = next(iter(run.loader))
        run.criterion(run.model(x), y).backward()
        fresh.model.load_state_dict(run.model.state_dict())
        lazy, exact = run.layers(), fresh.layers()
        assert all(lazy[n]["sensitivity"] >= exact[n]["sensitivity"] * (1 - 1e-12) for n in exact)
        run.optimizer.step()
        largest.append(
            max(float(torch.linalg.matrix_norm(p.detach(), 2)) for p in run.model.parameters() if p.dim() == 2)
        )
    assert [norm <= 0.5 * (1 + 1e-5) for norm in largest] == [False, False, True] * 2 + [False]


def test_refresh_holds_under_autocast_too() -> None:
    bounds = wc.Bounds(input_radius=1.0, refresh=4)
    run = private(mlp(), table(8), sigma=0.5, bounds=bounds, optimizer=lambda p: torch.optim.SGD(p, lr=0.3))
    fresh = private(mlp(), table(8), bounds=wc.Bounds(input_radius=1.0), optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    for _ in range(5):
        fresh.model.load_state_dict(run.model.state_dict())
        rows = []
        for each in (run, fresh):
            x, y = next(iter(each.loader))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                each.criterion(each.model(x), y).backward()
            rows.append(each.layers())
            each.optimizer.step() if each is fresh else None
        for name, row in rows[1].items():
            assert rows[0][name]["sensitivity"] >= row["sensitivity"] * (1 - 1e-12)
        run.optimizer.step()


@pytest.mark.parametrize("change", ["in place", "through .data", "new storage", "loaded"])
@pytest.mark.parametrize("spectral", [True, False])
def test_weights_changed_by_the_loop_are_certified_as_they_are(change: str, spectral: bool) -> None:
    bounds = wc.Bounds(input_radius=1.0, weight_norm=0.5, spectral=spectral)
    run = private(mlp(), table(8), sigma=0.1, bounds=bounds).train()
    weight = run.model[2].weight
    if change == "in place":
        with torch.no_grad():
            weight.mul_(20)
    elif change == "through .data":
        weight.data.mul_(20)
    elif change == "new storage":
        weight.data = 20 * weight.data
    else:
        run.model.load_state_dict({k: 20 * v if k == "2.weight" else v for k, v in run.model.state_dict().items()})
    x, y = next(iter(run.loader))
    run.criterion(run.model(x), y).backward()
    rows = run.layers()
    assert rows["2"]["gain"] >= torch.linalg.matrix_norm(weight.detach().double(), 2)
    exact = float(torch.linalg.matrix_norm(weight.detach().double(), 2)) * 2**0.5 * 2**0.5
    assert rows["0"]["sensitivity"] >= exact * (1 - 1e-6)
    run.optimizer.step()
    assert norms(run)["2"] <= 0.5 * (1 + 1e-6)  # and clipped again after the step


def test_models_without_dense_or_convolutional_layers_train_without_the_dft_bound() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Flatten())
    ids, labels = torch.arange(8)[:, None] % 5, torch.arange(8) % 3
    run = private(model, (ids, labels), sigma=1.0, bounds=wc.Bounds(spectral=False)).train(2)
    assert run.engine.steps == 2


def test_a_weight_just_below_its_limit_is_bounded_by_the_limit_once_it_was_rounded() -> None:
    """Scaled by 1 - 2^-24, every entry of (1, 2) loses 2^-23: with more negative ones than positive the norm grows."""
    n, g = 127, torch.Generator().manual_seed(0)
    signs = torch.where(torch.arange(n) < 57, 1.0, -1.0)[torch.randperm(n, generator=g)]
    row = torch.where(signs > 0, 1.999, -1.001)
    first = nn.Linear(n, n)
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(n, 3))
    with torch.no_grad():
        first.weight.copy_(torch.stack([row.roll(i) for i in range(n)]))  # circulant: constants are singular vectors
    bounds = wc.Bounds(input_radius=1.0, spectral=False)
    gains = Gains(build_plan(model, CrossEntropy(), bounds, (torch.zeros(2, n),)), bounds)
    assert gains.bank is not None
    before = float(gains.bank.vector()[list(gains.bank.layers).index("0")])
    room = 1 - 2.0**-24 * (2 + math.sqrt(n))
    with torch.no_grad():
        gains.clip({"0": before * (1 - 2.0**-24) / room})
    true = float(torch.linalg.matrix_norm(first.weight.detach().double(), 2))
    assert true > before * (1 + 1e-9), "not a case"
    assert gains._clipped is not None and float(gains._clipped.norms[0]) >= true  # inflation for products not counted


@pytest.mark.parametrize("spectral", [True, False])
def test_what_clipping_moves_before_the_first_step_is_no_drift(spectral: bool) -> None:
    """The model arrives with other norms than it is trained under."""
    settings = {"input_radius": 1.0, "weight_norm": 0.3, "spectral": spectral}
    lazy, fresh = (
        private(mlp(), table(8), sigma=1.0, bounds=wc.Bounds(refresh=r, **settings)).layers()  # type: ignore[arg-type]
        for r in (16, 1)
    )
    for name in fresh:
        assert lazy[name]["sensitivity"] == pytest.approx(fresh[name]["sensitivity"], rel=1e-6)


def test_an_exact_resume_right_after_weights_were_clipped(tmp_path) -> None:
    def started():
        bounds = wc.Bounds(input_radius=1.0, weight_norm=0.5, spectral=False, refresh=3)
        return private(mlp(), table(8), sigma=1.0, bounds=bounds)

    whole, first = started().train(7), started().train(6)
    first.engine.save(tmp_path / "run")
    second = started()
    with pytest.warns(UserWarning, match="resumed without a ledger"):
        second.engine.load(tmp_path / "run", exact=True)
    second.train(1)
    assert same_bits(whole.weights(), second.weights())
