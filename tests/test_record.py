"""The recorder's rules, with a stand-in for CUDA graphs (the real ones need a GPU)."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import weightclip as wc
from weightclip._gains import Gains
from weightclip._record import Recorder
from weightclip.bounds import Numerics
from weightclip.certificate import build_plan
from weightclip.losses import CrossEntropy


class Graph:
    """Counts its replays."""

    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


@pytest.fixture
def fake(monkeypatch):
    made: list[Graph] = []

    def new() -> Graph:
        made.append(Graph())
        return made[-1]

    monkeypatch.setattr(torch.cuda, "CUDAGraph", new)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, capture_error_mode: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return made


def test_elsewhere_the_function_just_runs():
    runs = []
    recorder = Recorder(torch.device("cpu"))
    for _ in range(5):
        recorder("key", lambda: runs.append(1))
    assert len(runs) == 5


def test_two_plain_runs_then_a_recording_then_replays_for_each_key(fake):
    runs = []
    recorder = Recorder(torch.device("cuda"))
    for _ in range(6):
        recorder("a", lambda: runs.append("a"))
    assert runs == ["a"] * 3 and fake[0].replays == 4  # recording computes nothing, so the first replay follows it
    for _ in range(3):
        recorder("b", lambda: runs.append("b"))
    assert runs == ["a"] * 3 + ["b"] * 3 and fake[1].replays == 1
    recorder("a", lambda: runs.append("a"))
    assert fake[0].replays == 5


def test_old_graphs_go_when_keys_keep_changing(fake):
    recorder = Recorder(torch.device("cuda"))
    for key in range(40):
        for _ in range(3):
            recorder(key, lambda: None)
    assert len(recorder._graphs) <= 8 and len(recorder._runs) <= 64


def test_work_that_cannot_be_recorded_runs_plainly_with_a_warning(fake, monkeypatch):
    @contextlib.contextmanager
    def broken(graph, capture_error_mode):
        yield
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(torch.cuda, "graph", broken)
    recorder = Recorder(torch.device("cuda"))
    recorder("a", lambda: 1)
    recorder("a", lambda: 1)
    with pytest.warns(UserWarning, match="CUDA graphs are off"):
        assert recorder("a", lambda: 7) == 7
    assert not recorder.on and recorder("a", lambda: 8) == 8


BOUNDS = [
    wc.Bounds(layer_radius=1.0, cotangent_radius=0.1), wc.Bounds(joint_cap=1.0), wc.Bounds(input_radius=1.0),
    wc.Bounds(input_radius=1.0, weight_norm=1.0),
]  # fmt: skip


def models() -> dict[str, nn.Module]:
    return {
        "dense": nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)),
        "norm": nn.Sequential(nn.Linear(12, 8), wc.nn.SafeLayerNorm(8), nn.Linear(8, 3)),
        "bare norm": nn.Sequential(nn.Linear(12, 8), wc.nn.SafeGroupNorm(2, 8, affine=False), nn.Linear(8, 3)),
    }


@pytest.mark.parametrize("name", list(models()))
@pytest.mark.parametrize("bounds", BOUNDS)
def test_weightless_bounds_do_not_move_with_weights_or_biases(name, bounds):
    model = models()[name]
    plan = build_plan(model, CrossEntropy(), bounds, torch.zeros(2, 12))
    gains = Gains(plan, bounds)
    if not gains.weightless:
        assert bounds.layer_radius is None and bounds.joint_cap is None or name == "norm"
        return
    before = [e.sensitivity for e in plan.evaluate(Numerics(), gains.current(Numerics(), 0)).values()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(7.0).add_(3.0)
    assert [e.sensitivity for e in plan.evaluate(Numerics(), gains.current(Numerics(), 1)).values()] == before


def test_dense_networks_with_bounded_factors_are_weightless():
    bounds = wc.Bounds(layer_radius=1.0, cotangent_radius=0.1)
    plan = build_plan(models()["dense"], CrossEntropy(), bounds, torch.zeros(2, 12))
    assert Gains(plan, bounds).weightless
