"""PrivacyEngine: native objects, copies, detach, certificate and report of a private model."""

from __future__ import annotations

import copy
import io
import json
import math
import pickle

import pytest
import torch
from tests.engine_kit import cnn, mlp, pictures, private, residual, same_bits, table, tokens
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weightclip as wc
from weightclip.engine._engine import engine_of

MODELS = {"mlp": (mlp, table), "cnn": (cnn, pictures), "residual": (residual, table)}


@pytest.mark.parametrize("kind", MODELS)
def test_objects_stay_native(kind: str) -> None:
    make, draw = MODELS[kind]
    model, plain = make(), make()
    kinds = [type(m) for m in model.modules()]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    engine = wc.PrivacyEngine()
    loader = DataLoader(TensorDataset(*draw(8)), batch_size=4)
    made, hooked, sampled, loss = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, criterion=nn.CrossEntropyLoss(), noise_multiplier=1.0
    )
    assert made is model and hooked is optimizer
    assert list(model.state_dict()) == list(plain.state_dict())
    assert all(isinstance(m, k) for m, k in zip(model.modules(), kinds, strict=True))
    assert repr(model) == repr(plain)
    for x, y in sampled:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    plain.load_state_dict(model.state_dict())
    x = 0.1 * draw(8)[0]
    with torch.no_grad():
        inside = x / x.flatten(1).norm(dim=1).clamp(min=1).view(-1, *(1,) * (x.dim() - 1))
        torch.testing.assert_close(plain(inside), model(x), rtol=1e-5, atol=1e-6)
    assert engine_of(model) is engine and engine_of(plain) is None


def test_copies_and_pickles_are_free_of_the_engine() -> None:
    run = private(mlp(), table(8), sigma=1.0).train()
    for twin in (copy.deepcopy(run.model), pickle.loads(pickle.dumps(run.model))):
        assert engine_of(twin) is None
        assert same_bits(dict(twin.state_dict()), dict(run.model.state_dict()))
        x, y = table(8)
        nn.functional.cross_entropy(twin(x), y).backward()  # trains on its own, without noise
        assert all(p.grad is not None for p in twin.parameters())
    assert all(p.grad is not None for p in run.model.parameters())  # the last release, untouched
    buffer = io.BytesIO()
    torch.save(run.model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    x = table(8)[0]
    with torch.no_grad():
        assert torch.equal(loaded(x), run.model(x))
    run.train()
    assert run.engine.steps == 2


@pytest.mark.parametrize(
    "bounds", [wc.Bounds(input_radius=1.0, spectral=False), wc.Bounds(joint_cap=0.1)], ids=["weights", "cap"]
)
def test_detach_gives_the_plain_model_back(bounds: wc.Bounds) -> None:
    plain = mlp()
    run = private(mlp(), table(8), sigma=1.0, bounds=bounds).train()
    spent, weights = run.engine.get_epsilon(1e-5), run.weights()
    model = run.engine.detach(keep_projection=False)
    assert model is run.model and [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    assert [sorted(m.__dict__) for m in model.modules()] == [sorted(m.__dict__) for m in plain.modules()]
    assert not any(m._forward_hooks or m._forward_pre_hooks or list(m.buffers()) for m in model.modules())
    assert same_bits(weights, run.weights())
    x, y = table(8)
    nn.functional.cross_entropy(model(x), y).backward()
    run.optimizer.step()  # an ordinary step now
    assert not same_bits(weights, run.weights())
    assert run.engine.get_epsilon(1e-5) == spent and run.engine.steps == 1
    with pytest.raises(wc.ContractError):
        run.engine.detach()
    with pytest.raises(wc.ContractError):
        for x, y in run.loader:
            run.criterion(model(x), y).backward()
    other = private(model, table(8), sigma=1.0)  # and it can be made private again
    other.train()
    assert other.engine.steps == 1


@pytest.mark.parametrize(
    "bounds",
    [wc.Bounds(input_radius=1.0), wc.Bounds(layer_radius=1.0, cotangent_radius=0.5, bias_scale=0.3)],
    ids=["weights", "radii"],
)
def test_certify_on_a_private_model_is_the_report(bounds: wc.Bounds) -> None:
    run = private(mlp(), table(8), sigma=1.0, bounds=bounds)
    for _ in range(2):
        certificate = wc.certify(run.model, run.criterion, input_radius=1.0, example=table(2)[0])
        rows = run.layers()
        assert certificate.sensitivities == {name: row["sensitivity"] for name, row in rows.items()}
        assert [(r.name, r.parameters) for r in certificate.rows] == [(k, v["parameters"]) for k, v in rows.items()]
        assert json.loads(certificate.to_json())["layers"][0]["sensitivity"] == rows["0"]["sensitivity"]
        run.train()


def test_the_plain_certificate_is_the_private_one_without_the_slack_of_the_sum() -> None:
    plain = wc.certify(mlp(), nn.CrossEntropyLoss(), input_radius=1.0, example=table(2)[0])
    run = private(mlp(), table(8))
    for name, row in run.layers().items():
        assert plain.sensitivities[name] <= row["sensitivity"] <= plain.sensitivities[name] * 1.002
    assert list(plain.sensitivities) == ["0", "2"]
    assert str(plain).count("\n") >= 3


def test_sensitivities_are_of_the_sum_and_do_not_know_the_batch_size() -> None:
    """But for the slack of rounding, which follows the largest draw that b, a public constant, allows for."""
    few, many = (private(mlp(), table(8), batch=b, sample_rate=1.0).layers() for b in (1, 64))
    for name, row in few.items():
        assert row["sensitivity"] <= many[name]["sensitivity"] <= 1.001 * row["sensitivity"]


def test_the_report_is_json_and_says_what_it_does_not_cover() -> None:
    run = private(mlp(), table(8), sigma=1.3, batch=4, max_physical_batch_size=2).train()
    report = json.loads(json.dumps(run.engine.report(delta=1e-5), allow_nan=False))
    assert report["adjacency"] == "ADD_OR_REMOVE_ONE" and report["accountant"] == "pld"
    public = report["public"]
    assert (public["noise_multiplier"], public["sample_rate"], public["expected_batch_size"]) == (1.3, 0.5, 4.0)
    assert public["steps"] == 2 and public["budget_steps"] is None
    assert {"weightclip", "torch", "dp-accounting"} <= set(report["library"])
    assert report["epsilon"] == run.engine.get_epsilon(1e-5) and report["delta"] == 1e-5
    assert any("loss" in line for line in report["not_covered"]) and any(
        "initial weights" in line for line in report["not_covered"]
    )
    assert [row["name"] for row in report["layers"]] == ["0", "2"]
    assert json.loads(json.dumps(run.engine.report(), allow_nan=False))["epsilon"] is None
    free = private(mlp(), table(8), sigma=0.0, bounds=wc.Bounds(layer_cap=1.0)).train()
    text = json.dumps(free.engine.report(delta=1e-5), allow_nan=False)
    assert '"epsilon": "inf"' in text


@pytest.mark.parametrize("bounds", [None, wc.Bounds(), wc.Bounds(max_grad_norm=1.0)])
def test_the_default_is_a_joint_cap_that_leaves_the_model_as_it_is(bounds: wc.Bounds | None) -> None:
    model, x = mlp(), 100 * table(8)[0]
    with torch.no_grad():
        plain = model(x)
    engine = wc.PrivacyEngine()
    engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(TensorDataset(*table(8)), batch_size=4), noise_multiplier=1.0, bounds=bounds,
    )  # fmt: skip
    assert engine.bounds == wc.Bounds(joint_cap=1.0)
    with torch.no_grad():
        assert torch.equal(model(x), plain)


def test_weights_only_is_asked_for() -> None:
    for bounds in (wc.Bounds(weight_norm=1.0, input_radius=1.0), wc.Bounds(limit=wc.Certified(), input_radius=2.0)):
        run = private(mlp(), table(8), bounds=bounds)
        assert run.engine.bounds == bounds and not run.engine.report()["joint_cap"]


def test_a_detached_model_computes_what_was_trained() -> None:
    """Inputs were projected in training: without the projection another function would be deployed in silence."""
    run = private(mlp(), table(8), sigma=1.0, bounds=wc.Bounds(input_radius=0.5)).train()
    x = 10 * table(8)[0]
    with torch.no_grad():
        trained = run.model(x)
        model = run.engine.detach()
        assert torch.equal(model(x), trained)
        plain = mlp()
        plain.load_state_dict(model.state_dict())
        assert not torch.allclose(plain(x), trained)
        assert torch.allclose(nn.Sequential(wc.nn.Project(0.5), plain)(x), trained, atol=1e-6)


def test_sequences_concatenation_and_shared_layers_train() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b, self.last = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(8, 3)
            self.twice = nn.Linear(8, 8)

        def forward(self, x):
            h = torch.cat([torch.relu(self.a(x)), torch.tanh(self.b(x))], 1)
            return self.last(self.twice(torch.relu(self.twice(h))))

    run = private(Wide(), table(8), sigma=1.0).train(2)
    assert run.engine.steps == 2 and set(run.layers()) == {"a", "b", "last", "twice"}
    ids = torch.randint(0, 5, (8, 4), generator=torch.Generator().manual_seed(0))
    run = private(tokens(), (ids, ids.clamp(max=2)), sigma=1.0)
    run.train(forward=lambda x: run.model(x).transpose(1, 2))
    assert run.engine.steps == 1 and math.isfinite(run.layers()["0"]["sensitivity"])
