"""The benchmark measures every mode on the same model and writes what others read."""

from __future__ import annotations

import csv
import dataclasses
import sys
from pathlib import Path

import pytest
import torch

import weightclip as wc
from weightclip.errors import WeightclipError
from weightclip.factors import Product
from weightclip_studies import bench as _bench
from weightclip_studies.bench import _step
from weightclip_studies.images import _runtime


def test_rows_for_every_mode(tmp_path: Path) -> None:
    modes = [m for m in _bench.MODES if m != "fastdp"]
    rows = _bench.measure("mlp", 16, modes, torch.device("cpu"), seconds=0.01)
    assert [r.mode for r in rows] == modes
    assert all(r.ms > 0 and r.ratio > 0 for r in rows)
    assert next(r for r in rows if r.mode == "plain").ratio == 1
    _bench.write_csv(rows, tmp_path / "step.csv")
    with (tmp_path / "step.csv").open() as file:
        table = list(csv.DictReader(file))
    assert list(table[0])[:7] == ["device", "model", "batch", "mode", "ms", "ratio", "peak_gib"]
    assert len(table) == len(rows)
    assert _bench.read_csv(tmp_path / "step.csv") == rows
    fast = [dataclasses.replace(rows[1], precision="bf16", compile=1), dataclasses.replace(rows[0], ms=7.0)]
    _bench.write_csv(fast, tmp_path / "step.csv", append=True)
    assert _bench.read_csv(tmp_path / "step.csv") == [*rows[1:], *fast]
    _bench.plot(rows, tmp_path / "step.png")
    assert (tmp_path / "step.png").stat().st_size > 1000


def test_modes_that_would_begin_too_late_are_left_out() -> None:
    rows = _bench.measure("mlp", 8, ["plain", "factors"], torch.device("cpu"), seconds=0.01, within=0.0)
    assert [r.mode for r in rows] == ["plain"]


@pytest.mark.parametrize(
    "mode", ["weights", "factors", "both", "joint-cap", "exact-cap", "exact-joint-cap", "weights-fast"]
)
def test_private_modes_train_the_same_model(mode: str) -> None:
    step = _bench.prepare(mode, "mlp", 8, torch.device("cpu"))
    step()
    step()


LIMITS = ("weight_norm", "input_radius", "layer_radius", "cotangent_radius", "layer_cap", "joint_cap")
CALLED = {
    "weights": {"weight_norm", "input_radius"},
    "weights-refresh": {"weight_norm", "input_radius"},
    "weights-fast": {"weight_norm", "input_radius"},
    "factors": {"layer_radius", "cotangent_radius"},
    "both": {"weight_norm", "input_radius", "layer_radius", "cotangent_radius"},
    "joint-cap": {"joint_cap"},
    "exact-cap": {"layer_cap"},
    "exact-joint-cap": {"joint_cap"},
}


def check_bounds(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """The engine that is timed enforces what the mode is called after."""
    made: list[wc.PrivacyEngine] = []
    monkeypatch.setattr(_step, "PrivacyEngine", lambda: (made.append(wc.PrivacyEngine()), made[-1])[1])
    _bench.prepare(mode, "mlp", 8, torch.device("cpu"))()
    name, bounds = mode.removesuffix("-graph"), made[0].bounds
    assert {limit for limit in LIMITS if getattr(bounds, limit) is not None} == CALLED[name]
    assert (bounds.refresh > 1) == (name == "weights-refresh") and (bounds.caps == wc.CapNorm.FREE) == (
        name == "joint-cap"
    )
    assert (bounds.product == Product.fast()) == (name == "weights-fast")


@pytest.mark.parametrize(
    "mode", [m for m in (*_bench.MODES, *_step.GRAPHED) if "plain" not in m and m not in _bench.OTHERS]
)
def test_every_mode_is_bounded_as_it_is_called(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_bounds(monkeypatch, mode)


@pytest.mark.parametrize(
    "mode,other",
    [
        ("weights", "factors"), ("factors", "weights"), ("exact-cap", "joint-cap"), ("exact-cap", "factors"),
        ("factors", "exact-cap"), ("exact-joint-cap", "exact-cap"), ("weights", "weights-refresh"),
    ],
)  # fmt: skip
def test_a_mode_that_times_another_is_found(mode: str, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = _step.bounds_of
    monkeypatch.setattr(_step, "bounds_of", lambda name: real(other if name == mode else name))
    with pytest.raises(AssertionError):
        check_bounds(monkeypatch, mode)


def test_the_runtime_figure_times_the_mode_it_names() -> None:
    named = {"weightclip": "weights", "weightclip-factors": "factors"}
    assert {k: v.removesuffix("-graph") for k, v in _runtime.MODES.items() if k in named} == named
    for name, mode in _runtime.MODES.items():
        assert mode.endswith("-graph") == name.endswith("-graph")
        assert mode.removesuffix("-graph") == _runtime.MODES[name.removesuffix("-graph")]


@pytest.mark.parametrize("name", ["mlp", "encoder-tiny"])
@pytest.mark.parametrize("mode", ["plain", "factors", "exact-joint-cap"])
def test_bf16_and_poisson_draws(name: str, mode: str) -> None:
    setting = _bench.Setting("bf16", draws=True)
    assert len(set(setting.sizes(16))) > 1
    step = _bench.prepare(mode, name, 16, torch.device("cpu"), setting)
    step()
    step()


def test_the_larger_networks_have_the_sizes_of_the_literature() -> None:
    with torch.device("meta"):
        sizes = {n: sum(p.numel() for p in _bench.models()[n].factory().parameters()) for n in ("resnet18", "resnet50")}
    assert sizes == {"resnet18": 11_689_512, "resnet50": 25_557_032}


def test_a_step_as_one_call_takes_bf16_and_poisson_draws() -> None:
    step = _bench.prepare("exact-cap-graph", "mlp", 16, torch.device("cpu"), _bench.Setting("bf16", draws=True))
    step()
    step()


STAND_IN = """
import torch
class PrivacyEngine:
    def __init__(self, module, **options): self.options = options
    def attach(self, optimizer): optimizer.private = self.options
"""


def test_fastdp_is_timed_only_where_it_trains_every_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the library, which is on no package index: what it is asked for, and what is refused."""
    package = tmp_path / "fastDP"
    package.mkdir()
    (package / "__init__.py").write_text(STAND_IN)
    known = "import torch\n_supported_layers_norm_sample_AND_clipping = {torch.nn.Linear: 0}\n"
    (package / "supported_layers_grad_samplers.py").write_text(known)
    if not _bench.installed("fastdp"):
        with pytest.raises(WeightclipError, match="clone"):
            _bench.prepare("fastdp", "mlp", 8, torch.device("cpu"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "fastDP", raising=False)
    assert _bench.installed("fastdp") and _bench.installed("plain")
    made: list[torch.optim.Optimizer] = []
    monkeypatch.setattr(torch.optim, "Adam", lambda *a, **k: (made.append(torch.optim.SGD(a[0], 0.1)), made[-1])[1])
    _bench.prepare("fastdp", "mlp", 8, torch.device("cpu"))()
    options = made[0].private  # type: ignore[attr-defined]
    assert (options["batch_size"], options["noise_multiplier"], options["max_grad_norm"]) == (8, 1.0, 1.0)
    assert options["clipping_style"] == "all-layer"
    with pytest.raises(WeightclipError, match="knows no layer"):
        _bench.prepare("fastdp", "convnet", 8, torch.device("cpu"))
