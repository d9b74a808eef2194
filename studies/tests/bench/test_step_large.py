"""The benchmark's encoder and ResNet-18 on the CPU: traced, released as by record, and refused where nothing holds."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.compile_kit import BOUNDS, check, compiling
from torch import Tensor, nn

import weightclip as wc
from weightclip.errors import CertificationError
from weightclip_studies import bench as _bench
from weightclip_studies.bench import _step

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")


@compiling
@pytest.mark.parametrize("bounds,half", [("joint cap", False), ("radii", True)])
def test_the_encoder_traces_as_one_graph(bounds: str, half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = _bench.models()["encoder-tiny"]
    torch.manual_seed(0)
    check(tiny.factory, tiny.batch(8, CPU)[0], BOUNDS[bounds], half, monkeypatch)


# -- ResNet-18 at 64 x 64 ---------------------------------------------------------------------------------------------

RECORDS = 4
SMALL = dataclasses.replace(_bench.models()["resnet18"], shape=(3, 64, 64))
HEAD = "14.weight", "14.bias"
# relative differences: below a ReLU whose input is as near to zero as 1e-6 (one of this step's is), rounding decides
ROOM = dict.fromkeys((*HEAD, "11.body.4.weight", "11.body.4.bias"), 1e-4) | {"1.weight": 1e-2, "1.bias": 1e-2}


def released(mode: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Gradients of one step of the benchmark whose noise is zero, times the batch."""
    made: list[Any] = []

    class Quiet(wc.PrivacyEngine):
        def make_private(self, **settings: Any) -> Any:
            made.append(super().make_private(**{**settings, "noise_multiplier": 0.0}))
            return made[-1]

    monkeypatch.setattr(_step, "PrivacyEngine", Quiet)
    monkeypatch.setattr(_step, "models", lambda: {"resnet18": SMALL})
    _bench.prepare(mode, "resnet18", RECORDS, CPU)()
    found = {name: p.grad for name, p in made[0][0].named_parameters()}
    assert all(g is not None for g in found.values())
    return {name: RECORDS * g.double() for name, g in found.items()}


@functools.cache
def by_record() -> list[tuple[dict[str, Tensor], Tensor]]:
    """The plain model's gradient of one record at a time, and what enters its head."""
    torch.manual_seed(0)
    model = SMALL.factory()
    x, y = SMALL.batch(RECORDS, CPU)
    entering: list[Tensor] = []
    model[-1].register_forward_pre_hook(lambda m, args: entering.append(args[0].detach().double()))  # type: ignore[index]
    found = []
    for i in range(RECORDS):
        loss = nn.functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        own = torch.autograd.grad(loss, list(model.parameters()))
        names = [name for name, _ in model.named_parameters()]
        found.append(({k: g.double() for k, g in zip(names, own, strict=True)}, entering[i]))
    return found


def scales(mode: str) -> tuple[list[float], list[str]]:
    """What each record's gradient is multiplied with, and the parameters of small layers of which that is known."""
    found = []
    for own, entering in by_record():
        if mode == "exact-joint-cap":
            norm = torch.stack([g.square().sum() for g in own.values()]).sum().sqrt()
            found.append(float((1.0 / norm).clamp(max=1)))
        else:  # the bias's gradient is the cotangent, with one position
            cotangent, factor = own[HEAD[1]].norm(), (entering.square().sum() + 1).sqrt()
            found.append(float((0.1 / cotangent).clamp(max=1) * (1.0 / factor).clamp(max=1)))
    return found, list(ROOM if mode == "exact-joint-cap" else HEAD)


@pytest.mark.parametrize("mode", ["exact-joint-cap", "factors"])
def test_a_step_of_resnet18_releases_what_single_records_say(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = released(mode, monkeypatch)
    assert len(found) == 62 and all(bool(torch.isfinite(g).all()) and bool(g.any()) for g in found.values())
    factors, names = scales(mode)
    assert max(factors) < 1, "no record meets a limit"
    for name in names:
        want = sum(scale * own[name] for scale, (own, _) in zip(factors, by_record(), strict=True))
        assert float((found[name] - want).norm()) <= ROOM[name] * float(want.norm()), name  # type: ignore[union-attr]


# -- bounds from weights, of an encoder -------------------------------------------------------------------------------

REASON = "'scaled_dot_product_attention'"


@pytest.mark.filterwarnings("ignore:LayerNorm .* has gain:UserWarning")  # the reason why one would not want them here
@pytest.mark.parametrize("mode", ["weights", "weights-refresh", "weights-fast"])
def test_bounds_from_weights_refuse_the_encoder_in_one_line(mode: str) -> None:
    """Attention has no finite gain: no gradient that comes through it is bounded by weights."""
    with pytest.raises(CertificationError) as refused:
        _bench.prepare(mode, "encoder-tiny", 4, CPU)
    said = str(refused.value)
    assert "\n" not in said and REASON in said and "no finite gain" in said and "cotangent_radius" in said


def test_the_script_says_which_mode_it_cannot_time(tmp_path: Path) -> None:
    """Whether it goes on without the mode or ends there, the reason is a line of its own on stderr."""
    asked = ["--models", "encoder-tiny", "--batches", "4", "--modes", "plain", "weights", "--device", "cpu"]
    asked += ["--seconds", "0.01", "--out", str(tmp_path / "step.csv")]
    command = [sys.executable, "studies/benchmarks/step.py", *asked]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    lines = [line for line in done.stderr.splitlines() if REASON in line and "no finite gain" in line]
    assert len(lines) == 1, done.stderr
    rows = _bench.read_csv(tmp_path / "step.csv") if done.returncode == 0 else []
    assert [row.mode for row in rows] == (["plain"] if done.returncode == 0 else [])
