"""Averaging of released weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from weightclip.errors import WeightclipError
from weightclip.nn import ParameterAverage


def _walk(model: nn.Linear, steps: int) -> Iterator[torch.Tensor]:
    for _ in range(steps):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
        yield model.weight.detach().clone()


def test_exponential_average():
    model = nn.Linear(3, 2).double()
    average = ParameterAverage(model, decay=0.9)
    expected = None
    for weight in _walk(model, 20):
        average.update()
        expected = weight if expected is None else 0.9 * expected + 0.1 * weight
    with average.apply():
        torch.testing.assert_close(model.weight.data, expected)


def test_uniform_average():
    model = nn.Linear(3, 2).double()
    average = ParameterAverage(model, polyak=True)
    trail = []
    for weight in _walk(model, 20):
        average.update()
        trail.append(weight)
    with average.apply():
        torch.testing.assert_close(model.weight.data, torch.stack(trail).mean(0))


def test_warmup_forgets_faster():
    model = nn.Linear(1, 1, bias=False)
    slow, fast = ParameterAverage(model, 0.999), ParameterAverage(model, 0.999, warmup=True)
    for value in (0.0, 1.0):
        nn.init.constant_(model.weight, value)
        slow.update(), fast.update()
    assert slow.state_dict()["average"]["weight"].item() == pytest.approx(0.001, rel=1e-3)
    assert fast.state_dict()["average"]["weight"].item() == pytest.approx(1 - 2 / 11)


def test_apply_restores_also_after_an_error_and_keeps_the_parameter_objects():
    model = nn.Linear(3, 2)
    average = ParameterAverage(model)
    average.update()
    before = copy.deepcopy(model.state_dict())
    nn.init.constant_(model.weight, 7.0)
    ids = [id(p) for p in model.parameters()]
    with pytest.raises(KeyError), average.apply():
        assert torch.equal(model.weight, before["weight"])
        model(torch.ones(1, 3)).sum().backward()  # gradients work inside
        assert model.weight.grad is not None
        with pytest.raises(WeightclipError, match="already"), average.apply():
            pass
        with pytest.raises(WeightclipError, match="leave"):
            average.update()
        raise KeyError
    assert (model.weight == 7.0).all()
    assert ids == [id(p) for p in model.parameters()]
    average.update()


def test_state_dict_round_trip():
    model = nn.Linear(3, 2)
    one = ParameterAverage(model, 0.5)
    for _ in _walk(model, 3):
        one.update()
    two = ParameterAverage(model, 0.5)
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    for _ in _walk(model, 1):
        one.update(), two.update()
    assert one.steps == two.steps == 4
    for a, b in zip(one.state_dict()["average"].values(), two.state_dict()["average"].values(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(WeightclipError, match="names"):
        ParameterAverage(nn.Linear(3, 2, bias=False)).load_state_dict(one.state_dict())
    with pytest.raises(WeightclipError, match="shape"):
        ParameterAverage(nn.Linear(4, 2)).load_state_dict(one.state_dict())


def test_bfloat16_weights_are_averaged_in_float32():
    model = nn.Linear(1, 1, bias=False).bfloat16()
    average = ParameterAverage(model, 0.999)
    nn.init.constant_(model.weight, 1.0)
    average.update()
    nn.init.constant_(model.weight, 1.0625)
    for _ in range(10):
        average.update()
    value = average.state_dict()["average"]["weight"]
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(1 + 0.0625 * (1 - 0.999**10), rel=1e-5)


def test_averages_stay_in_the_norm_ball():
    model = nn.Linear(4, 4, bias=False).double()
    average = ParameterAverage(model, 0.8)
    for _ in range(10):
        nn.init.orthogonal_(model.weight)
        average.update()
    assert torch.linalg.matrix_norm(average.state_dict()["average"]["weight"], 2) <= 1 + 1e-12


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_errors(decay):
    with pytest.raises(WeightclipError, match="decay"):
        ParameterAverage(nn.Linear(1, 1), decay)
