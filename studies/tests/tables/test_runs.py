"""Runs: what a key means, that methods keep to their budget, and that stacking changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from weightclip.accounting import _accounting as accounting
from weightclip.errors import WeightclipError
from weightclip.noise._streams import Streams
from weightclip_studies.fast_mlp import Settings, Softmax
from weightclip_studies.fast_mlp._data import Data
from weightclip_studies.printed import OpacusDPSGD
from weightclip_studies.tables._paper import PRINTED, best_lip, paper_accuracy, printed
from weightclip_studies.tables._runs import compute_runs, evaluate, prepare, run_key, settings_of
from weightclip_studies.tables._space import PRINTED_METHODS, PRIVATE, our_space, paper_space
from weightclip_studies.tables._stacked import StudyStack

RNG = np.random.default_rng(0)


def small(method: str, group_norm: bool = False) -> dict:
    config = our_space(method, 364, group_norm).sample(np.random.default_rng(1), 1, 1)[0]
    return {**config, "epochs": 2, "batches": 4}


@pytest.mark.parametrize("group_norm", [False, True])
@pytest.mark.parametrize("method", PRIVATE)
def test_every_method_runs_within_the_papers_budget(method: str, group_norm: bool):
    prepared = prepare("breast_cancer")
    value = evaluate(prepared, method, group_norm, [small(method, group_norm)], [0], "test")[0][0]
    assert 0 <= value["accuracy"] <= 1 and np.isfinite(value["log_loss"])
    spent = [accounting.Mechanism("gaussian", value["sigma"], value["q"], value["steps"])]
    assert accounting.epsilon(spent, 1 / 569, "rdp") <= printed("breast_cancer").epsilon
    assert value["epsilon"] == pytest.approx(printed("breast_cancer").epsilon, rel=1e-3)
    assert accounting.epsilon(spent, 1 / 569) < value["epsilon"]  # PLD is tighter
    assert value["steps"] == 2 * 4


def test_a_run_does_not_depend_on_what_it_is_stacked_with():
    configs = [small("lip-factors"), {**small("lip-factors"), "lr": 0.01}, {**small("lip-factors"), "width": 32}]
    keys = [run_key("breast_cancer", "lip-factors", False, c, s, "valid") for c in configs for s in (3, 4)]
    together = compute_runs(keys)
    alone = compute_runs(keys[3:4])[0]
    names = ("accuracy", "auc", "log_loss", "ece")
    assert {n: together[3][n] for n in names} == pytest.approx({n: alone[n] for n in names}, abs=1e-4)
    assert together[0]["log_loss"] != together[1]["log_loss"]  # another seed, another run


def test_dp_sgd_is_flat_clipping_without_our_extras():
    s = settings_of(small("dp-sgd"), "dp-sgd", prepare("breast_cancer"))
    assert s.joint_cap == small("dp-sgd")["clip"]
    assert s.input_radius is None and s.cap is None and s.temperature == 1 and s.bias_scale == 1
    assert s.weight_norm is None


def test_dp_sgd_walks_the_path_of_opacus():
    """Full batches without noise: six Adam steps of the study's DP-SGD and of Opacus end at the same weights."""
    pytest.importorskip("opacus")
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(40, 5)).astype(np.float32), rng.integers(0, 3, 40)
    settings = Settings(hidden=(8,), batch=40, epochs=6, lr=0.05, input_radius=None, joint_cap=0.4)
    data = Data(X, y, Softmax(3), None, 1, torch.device("cpu"))
    stack = StudyStack(data, [settings], [Streams.seeded(0)], Softmax(3), [None])
    stack.start(None)
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    layers = [model[0], model[2]]
    with torch.no_grad():
        for layer, (w, b) in zip(layers, stack.params, strict=True):
            layer.weight.copy_(w[0, 0])
            layer.bias.copy_(b[0, 0])
    for step in range(6):
        stack.step(step)
    theirs = OpacusDPSGD(model, 0.4, 0.0, batch_size=40, learning_rate=0.05)
    theirs.fit(torch.as_tensor(X), torch.as_tensor(y), steps=6)
    for layer, (w, b) in zip(layers, stack.params, strict=True):
        assert torch.allclose(layer.weight.double(), w[0, 0], atol=1e-4)
        assert torch.allclose(layer.bias.double(), b[0, 0], atol=1e-4)


def test_no_noise_is_better_and_majority_is_the_floor():
    prepared = prepare("breast_cancer")
    config = {"width": 8, "batches": 4, "epochs": 20, "lr": 0.03, "final_lr": 1.0, "averaging": 0.9}
    ceiling = evaluate(prepared, "non-private", False, [config], [0], "test")[0][0]
    floor = evaluate(prepared, "majority", False, [{}], [0], "test")[0][0]
    assert ceiling["accuracy"] > 0.93 and ceiling["epsilon"] is None
    assert floor["accuracy"] == pytest.approx(0.5877, abs=1e-3) and floor["auc"] == 0.5


@pytest.mark.parametrize("group_norm", [False, True])
@pytest.mark.parametrize("method", ["dp-sgd", "lip-weights", "lip-factors", *PRINTED_METHODS])
def test_the_papers_space_runs(method: str, group_norm: bool):
    config = {**paper_space(method, group_norm).sample(np.random.default_rng(2), 1, 1)[0], "epochs": 1, "batch": 128}
    value = evaluate(prepare("breast_cancer"), method, group_norm, [config], [0], "valid")[0][0]
    assert value["sigma"] == config["sigma"] and value["epsilon"] > 0


def test_the_split_is_kept_apart():
    parts = prepare("german_credit").parts
    assert not set(parts.train) & set(parts.test) and not set(parts.valid) & set(parts.test)
    assert (len(parts.train), len(parts.valid), len(parts.test)) == (640, 160, 200)


def test_encodings_say_what_they_cover():
    assert "not covered" in prepare("german_credit").covered
    assert "public" in prepare("german_credit", "public").covered
    with pytest.raises(WeightclipError, match="encoding"):
        prepare("german_credit", "guess")
    with pytest.raises(WeightclipError, match="'valid' or 'test'"):
        run_key("adult", "dp-sgd", False, {}, 0, "train")


def test_the_papers_numbers():
    assert len(PRINTED) == 7
    assert paper_accuracy("breast_cancer", "lip-factors", True) == 0.924 == best_lip("breast_cancer")
    assert paper_accuracy("german_credit", "fix-lip", False) == 0.768
    assert paper_accuracy("adult", "majority", False) is None
    with pytest.raises(WeightclipError, match="iris"):
        printed("iris")
