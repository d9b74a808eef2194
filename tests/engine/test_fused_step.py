"""A fused step is the ordinary loop in one call (its CUDA graphs: tests/engine/test_cuda.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engine_kit import mlp, private, same_bits, table
from torch import nn

import weightclip as wc
from weightclip.engine._fused_step import _Inputs, _Optimizer, _rounded
from weightclip.sampling._loader import BatchInfo

FACTORS = wc.Bounds(layer_radius=1.0, cotangent_radius=0.5)


@pytest.mark.parametrize("settings", [{}, {"max_physical_batch_size": 3}, {"mechanism": wc.KNorm(2)}])
def test_one_call_is_the_ordinary_loop(settings) -> None:
    runs = [private(mlp(), table(24), sigma=1.0, batch=8, **settings) for _ in range(2)]
    step, losses = runs[0].engine.fused_step(), ([], [])
    for x, y in runs[0].loader:
        losses[0].append(step(x, y))
    for x, y in runs[1].loader:
        runs[1].optimizer.zero_grad()
        loss = runs[1].criterion(runs[1].model(x), y)
        loss.backward()
        runs[1].optimizer.step()
        losses[1].append(loss.detach())
    assert same_bits(runs[0].weights(), runs[1].weights())
    assert runs[0].engine.steps == runs[1].engine.steps == 3
    assert torch.equal(torch.stack(losses[0]), torch.stack(losses[1])) and not losses[0][0].requires_grad


def test_no_model_no_step() -> None:
    with pytest.raises(wc.ContractError, match="make_private"):
        wc.PrivacyEngine().fused_step()


def test_a_spent_batch_is_refused() -> None:
    run = private(mlp(), table(24), bounds=FACTORS, sigma=1.0, batch=8)
    step = run.engine.fused_step()
    x, y = next(iter(run.loader))
    step(x, y)
    with pytest.raises(wc.ContractError, match="new batch"):
        step(x, y)


@pytest.mark.parametrize("batch", [1, 40, 256, 1000, 4096])
def test_sizes_are_few_and_never_too_small(batch: int) -> None:
    spread = int(4 * batch**0.5) + 1
    sizes = {rows: _rounded(rows, batch) for rows in range(max(1, batch - spread), batch + spread)}
    assert all(size >= rows for rows, size in sizes.items())
    assert len(set(sizes.values())) <= 12
    assert _rounded(256, 256) == 256 and _rounded(1, 256) == 16


def test_the_places_of_a_batch_hold_nothing_of_the_one_before() -> None:
    x, y = torch.randn(6, 2), torch.arange(3) + 1
    places = _Inputs.like(x, y, rows=4, views=2, per_view=1, device=torch.device("cpu"))
    places.fill(x, y, BatchInfo(0, 0, True, None, 3), 2, 1)
    assert torch.equal(places.x[:6], x) and not places.x[6:].any()
    assert places.mask.tolist() == [True, True, True, False] and places.y.tolist() == [1, 2, 3, 0]
    places.fill(x[:2], y[:1], BatchInfo(1, 0, True, torch.tensor([False]), 1), 2, 1)
    assert not places.x[2:].any() and places.y.tolist() == [1, 0, 0, 0] and not places.mask.any()


def recordable(**settings: Any) -> tuple[torch.optim.Adam, _Optimizer]:
    """An optimiser with the engine's two hooks, seen often enough to be recorded."""
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(2))], capturable=True, **settings)
    optimizer.register_step_pre_hook(lambda *_: None)
    optimizer.register_step_post_hook(lambda *_: None)
    optimizer.state[optimizer.param_groups[0]["params"][0]] = {"step": 1, "exp_avg": torch.zeros(2)}
    found = _Optimizer(optimizer)
    assert found.fixed() is None and found.fixed() is None and found.fixed() is not None
    return optimizer, found


@pytest.mark.parametrize(
    "change",
    [
        lambda o: o.param_groups[0].update(lr=0.5),
        lambda o: o.param_groups[0]["lr"].fill_(0.5),  # of the host: a graph would have read the old one
        lambda o: next(iter(o.state.values())).update(step=2),
        lambda o: next(iter(o.state.values())).update(exp_avg=torch.ones(2)),
        lambda o: o.add_param_group({"params": [nn.Parameter(torch.zeros(1))]}),
        lambda o: setattr(o, "step", lambda: None),
        lambda o: o.param_groups[0].update(capturable=False),
        lambda o: o.register_step_post_hook(lambda *_: None),
        lambda o: o.param_groups[0].update(notes={}),  # may change unseen
    ],
)
def test_a_changed_optimizer_is_not_taken_from_a_graph(change: Any) -> None:
    optimizer, found = recordable(lr=torch.tensor(1e-2))
    before = found.fixed()
    change(optimizer)
    assert found.fixed() is None
    for _ in range(3):
        assert found.fixed() != before


def test_an_optimizer_counts_by_its_numbers() -> None:
    optimizer, found = recordable(lr=1e-2, betas=(0.9, 0.99))
    before = found.fixed()
    optimizer.param_groups[0]["betas"] = (0.9, 0.99)
    assert before is not None and found.fixed() == before
    found.on = False  # after a recording that failed
    assert found.fixed() is None
    assert _Optimizer(torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)).fixed() is None
