"""The recorder's rules, with a stand-in for CUDA graphs (the real ones need a GPU)."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import weightclip as wc
from weightclip._device import Recorder, side_stream
from weightclip.bounds import Numerics
from weightclip.certificate import build_plan
from weightclip.certificate._gains import Gains
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
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, stream, capture_error_mode: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the user's stream")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    yield made
    side_stream.cache_clear()


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
    def broken(graph, stream, capture_error_mode):
        yield
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    back = []
    monkeypatch.setattr(torch.cuda, "set_stream", back.append)
    monkeypatch.setattr(torch.cuda, "graph", broken)
    recorder = Recorder(torch.device("cuda"))
    recorder("a", lambda: 1)
    recorder("a", lambda: 1)
    with pytest.warns(UserWarning, match="CUDA graphs are off"):
        assert recorder("a", lambda: 7) == 7
    assert not recorder.on and recorder("a", lambda: 8) == 8
    assert back == ["the user's stream"]  # torch leaves the recording's stream only where recording succeeds


def test_a_branch_of_a_larger_graph_is_kept_when_recording_is_off(fake, monkeypatch):
    """Noise is drawn on that branch: factors made on another one might not be there yet when it reads them."""
    entered = []

    @contextlib.contextmanager
    def stream(which):
        entered.append(which)
        yield

    monkeypatch.setattr(torch.cuda, "stream", stream)
    recorder = Recorder(torch.device("cuda"))
    recorder.on, recorder.aside = False, "branch"  # type: ignore[assignment]
    assert recorder("key", lambda: list(entered)) == ["branch"]


def test_recording_and_replays_happen_on_the_models_device(fake, monkeypatch):
    """On another device nothing would be recorded: replays would do nothing, and return the numbers of long ago."""
    inside, streams = [], []

    def graph(graph, stream, capture_error_mode):
        streams.append(stream)
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def device(wanted):
        inside.append(wanted)
        yield
        inside.append(None)

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    recorder, seen = Recorder(torch.device("cuda", 1)), []
    for _ in range(3):
        recorder("a", lambda: seen.append(inside[-1]))
    assert seen == [torch.device("cuda", 1)] * 3 and streams == ["stream of cuda:1"]
    fake[0].replay = lambda: seen.append(inside[-1])  # type: ignore[method-assign]
    recorder("a", lambda: None)
    assert seen[-1] == torch.device("cuda", 1)


def test_what_a_recording_reads_outlives_its_tensors(fake):
    """The graph reads addresses: were their memory given back, sensitivities would be made of anything."""
    recorder, weight, cached = Recorder(torch.device("cuda")), torch.ones(3), torch.full((3,), 2.0)
    written = torch.zeros(3)

    def work():
        middle = weight * cached
        written.add_(torch.stack([middle, middle]).sum(0))
        return torch.stack(torch._foreach_norm([weight, middle]))  # pyright: ignore[reportPrivateImportUsage]

    for _ in range(3):
        recorder("a", work)
    kept = {storage.data_ptr() for storage in recorder._graphs["a"][2]}
    assert kept == {t.data_ptr() for t in (weight, cached, written)}


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
