"""Audits of trainers that are not ours: two known defects of another library are found, sound trainers pass."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from weightclip.accounting._accounting import Mechanism, gdp_epsilon
from weightclip.audit import Trainer, audit_trainer
from weightclip.audit._trainer import flat
from weightclip.cli import main
from weightclip.errors import WeightclipError

_DELTA = 1e-5


def _opacus() -> Any:
    pytest.importorskip("opacus")
    place = Path(__file__).with_name("opacus_trainers.py")
    spec = importlib.util.spec_from_file_location("opacus_trainers", place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _gaussian(scale: float, steps: int = 1, size: int = 10) -> Any:
    """Sums of the data with noise, ``steps`` times; released: the running total after every step."""

    def train(data: np.ndarray, seed: int) -> list[np.ndarray]:
        noise = np.random.default_rng(seed).normal(scale=scale, size=(steps, size))
        return list(np.cumsum(data.sum(0) + noise, axis=0))

    return train


def _pair(size: int = 10) -> tuple[np.ndarray, np.ndarray]:
    base = np.zeros((4, size))
    return base, np.vstack([base, np.eye(size)[:1]])


def test_a_divisor_that_follows_the_length_is_found():
    found = audit_trainer(_opacus().divides_by_length(), runs=400)
    assert found.violation and found.result.epsilon_lower > found.epsilon
    assert "how many" in found.told_by


def test_a_weighted_sampler_accounted_as_poisson_is_found():
    found = audit_trainer(_opacus().weighted_sampler(), runs=500)
    assert found.violation and found.result.epsilon_lower > 2 * found.epsilon


def test_the_same_trainer_without_a_defect_passes_and_the_audit_is_sharp():
    found = audit_trainer(_opacus().clean(), runs=1200)
    assert not found.violation and found.result.epsilon_lower <= found.epsilon
    assert found.result.epsilon_gdp == pytest.approx(2.0, rel=0.25)


@pytest.mark.skipif(not os.environ.get("WEIGHTCLIP_FULL"), reason="a minute: WEIGHTCLIP_FULL=1")
def test_the_sampler_that_was_accounted_passes():
    """The control of the weighted sampler, by the same audit with as many runs."""
    found = audit_trainer(_opacus().poisson_sampler(), runs=500)
    assert not found.violation and found.result.epsilon_lower <= found.epsilon


@pytest.mark.parametrize("steps", [1, 9])
def test_a_sound_trainer_passes_and_a_third_of_its_noise_does_not(steps: int):
    sigma = 2.0
    epsilon = gdp_epsilon(math.sqrt(steps) / sigma, _DELTA)
    claim = (Mechanism("gaussian", sigma, 1.0, steps),)
    without, with_record = _pair()
    sound = Trainer(_gaussian(sigma, steps), without, with_record, epsilon, _DELTA, claim)
    found = audit_trainer(sound, runs=2000)
    assert not found.violation and found.result.mu == pytest.approx(math.sqrt(steps) / sigma, rel=0.25)
    broken = Trainer(_gaussian(sigma / 3, steps), without, with_record, epsilon, _DELTA, claim)
    assert audit_trainer(broken, runs=2000).violation


def test_noise_that_depends_on_the_data_is_told_by_its_spread():
    def train(data: np.ndarray, seed: int) -> np.ndarray:
        return np.random.default_rng(seed).normal(scale=len(data) ** 1.5, size=50)

    without, with_record = _pair()
    found = audit_trainer(Trainer(train, without, with_record, 1.0, _DELTA), runs=400)
    assert found.violation and "spread" in found.told_by


def test_a_score_of_ones_own_is_used_and_few_runs_are_refused():
    without, with_record = _pair()
    trainer = Trainer(_gaussian(0.01), without, with_record, 1.0, _DELTA, score=lambda released: released[0][0])
    found = audit_trainer(trainer, runs=200)
    assert found.told_by == "the given score" and found.violation
    with pytest.raises(WeightclipError, match="at least 40"):
        audit_trainer(trainer, runs=10)


@pytest.mark.parametrize(("name", "value"), [("epsilon", -1.0), ("epsilon", math.inf), ("delta", 1.0)])
def test_claims_that_are_none_are_refused(name: str, value: float):
    settings: dict[str, Any] = {"epsilon": 1.0, "delta": 0.0, name: value}
    with pytest.raises(WeightclipError, match=f"Trainer.{name}"):
        Trainer(_gaussian(1.0), *_pair(), **settings)


def test_whatever_is_released_becomes_one_vector():
    layer = torch.nn.Linear(2, 1)
    assert flat(layer).size == 3 and flat([1.0, {"b": torch.ones(2), "a": [0.0]}]).tolist() == [1.0, 0.0, 1.0, 1.0]
    with pytest.raises(WeightclipError, match="train"):
        flat("text")


_MODULE = """
import numpy as np
from weightclip.audit import Trainer

def make():
    def train(data, seed):
        return sum(data) + np.random.default_rng(seed).normal(scale={scale}, size=2)
    return Trainer(train, [0.0] * 3, [0.0] * 3 + [1.0], 1.0, 1e-5, name="mine")

nothing = 3
"""


def _run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["audit", *arguments])
    assert isinstance(stop.value.code, int)
    return stop.value.code


@pytest.mark.parametrize(("scale", "code"), [(0.05, 1), (20.0, 0)])
def test_from_the_shell(
    scale: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    name = f"own_trainer_{code}"
    (tmp_path / f"{name}.py").write_text(_MODULE.format(scale=scale))
    monkeypatch.chdir(tmp_path)
    assert _run(f"{name}:make", "--runs", "200", "--out", str(tmp_path / "out"), "--json") == code
    shown = capsys.readouterr()
    assert json.loads(shown.out) == json.loads((tmp_path / "out" / "trainer.json").read_text())
    assert ("VIOLATION mine" in shown.err) == bool(code)
    assert (tmp_path / "out" / "trainer.png").stat().st_size > 5_000
    for place, text in (("nosuch:make", "cannot import"), (f"{name}:other", "has no"), (f"{name}:nothing", "Trainer"),
                        (name, "module:function")):  # fmt: skip
        assert _run(place) == 2
        assert text in capsys.readouterr().err
    sys.modules.pop(name, None)
