"""Bad input: each a specific one-line error before any step, and the model left as it was."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from tests.engine_kit import mlp, private, same_bits, table, tokens
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

import weightclip as wc
from weightclip.noise._mechanisms import Weighted


def refused(match: str, make=mlp, kind: type[Exception] = wc.WeightclipError, **settings) -> None:
    """make_private raises one line that matches; model and optimiser stay untouched."""
    model = make()
    loader = settings.pop("data_loader", DataLoader(TensorDataset(*table(8)), batch_size=4))
    optimizer = settings.pop("optimizer", None) or torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad] or [nn.Parameter(torch.zeros(1))], lr=1.0
    )
    before = [(type(m), len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    state = copy.deepcopy(model.state_dict())
    bounds = wc.Bounds(input_radius=1.0, weight_norm=0.5)
    settings = {"noise_multiplier": 1.0, "criterion": nn.CrossEntropyLoss(), "bounds": bounds, **settings}
    engine = wc.PrivacyEngine()
    call = engine.make_private if "target_epsilon" not in settings else engine.make_private_with_epsilon
    if "target_epsilon" in settings:
        del settings["noise_multiplier"]
    with pytest.raises(kind, match=match) as error:
        call(module=model, optimizer=optimizer, data_loader=loader, **settings)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
    assert [(type(m), len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == before
    for old, new in zip(state.values(), model.state_dict().values(), strict=True):
        if isinstance(old, nn.parameter.UninitializedParameter) or old.is_meta:
            continue
        assert torch.equal(old, new) or bool(old.isnan().any())


def frozen() -> nn.Module:
    return mlp().requires_grad_(False)


def with_nan() -> nn.Module:
    model = mlp()
    with torch.no_grad():
        model[2].weight[1, 1] = math.nan
    return model


def on_two_devices() -> nn.Module:
    model = mlp()
    model[2].to("meta")
    return model


def loader_of(*tensors: Tensor, **settings) -> DataLoader:
    return DataLoader(TensorDataset(*tensors), **{"batch_size": 4, **settings})


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


X, Y = table(8)
CASES = {
    "empty data set": ("empty", {"data_loader": loader_of(X[:0], Y[:0])}),
    "labels above range": (r"in \[0, 3\].*3 outputs", {"data_loader": loader_of(X, torch.tensor([0, 1, 2, 3] * 2))}),
    "labels below range": (r"labels lie in \[-1", {"data_loader": loader_of(X, torch.tensor([-1, 1, 2, 0] * 2))}),
    "rate above one": ("sample_rate", {"sample_rate": 1.5}),
    "rate zero": ("sample_rate", {"sample_rate": 0.0}),
    "negative epsilon": ("target_epsilon", {"target_epsilon": -1.0, "target_delta": 1e-3, "epochs": 1}),
    "epsilon zero": ("target_epsilon", {"target_epsilon": 0.0, "target_delta": 1e-3, "epochs": 1}),
    "delta one": ("target_delta", {"target_epsilon": 1.0, "target_delta": 1.0, "epochs": 1}),
    "delta zero": ("target_delta", {"target_epsilon": 1.0, "target_delta": 0.0, "epochs": 1}),
    "no epochs": ("epochs", {"target_epsilon": 1.0, "target_delta": 1e-3, "epochs": 0}),
    "frozen model": ("frozen", {"make": frozen}),
    "no parameters": ("no parameters", {"make": nn.ReLU}),
    "nan weights": ("NaN", {"make": with_nan}),
    "two devices": ("several devices", {"make": on_two_devices}),
    "meta device": ("meta device", {"make": lambda: mlp().to("meta")}),
    "half precision": ("float32", {"make": lambda: mlp().half()}),
    "no shape yet": ("no shape", {"make": lambda: nn.Sequential(nn.LazyLinear(3))}),
    "negative noise": ("noise_multiplier", {"noise_multiplier": -1.0}),
    "noise of text": ("noise_multiplier", {"noise_multiplier": "1.0"}),
    "noise nan": ("noise_multiplier", {"noise_multiplier": math.nan}),
    "noise infinite": ("noise_multiplier", {"noise_multiplier": math.inf}),
    "noise bool": ("noise_multiplier", {"noise_multiplier": True}),
    "batch size zero": ("expected_batch_size", {"expected_batch_size": 0}),
    "batch size infinite": ("expected_batch_size", {"expected_batch_size": math.inf}),
    "pieces of zero": ("max_physical_batch_size", {"max_physical_batch_size": 0}),
    "adjacency": ("adjacency", {"adjacency": "neighbours"}),
    "iterable data": ("IterableDataset", {"data_loader": DataLoader(Stream(), batch_size=4)}),
    "custom sampler": ("sampler", {"data_loader": loader_of(X, Y, sampler=WeightedRandomSampler([1.0] * 8, 8))}),
    "no batch size": ("batch_size", {"data_loader": loader_of(X, Y, batch_size=None)}),
    "not a loader": ("DataLoader", {"data_loader": [(X, Y)]}),
    "loss class": ("instance", {"criterion": nn.CrossEntropyLoss}),
    "unbounded input": ("input_radius", {"bounds": wc.Bounds(limit=wc.Certified())}),
    "unknown layer": ("no module", {"bounds": wc.Bounds(input_radius=1.0, weight_norm={"fc9": 1.0})}),
    "layer without any": ("parameters of its own", {"bounds": wc.Bounds(input_radius=1.0, layer_cap={"1": 1.0})}),
    "wrong allocation": ("weights for", {"allocation": Weighted((1.0,))}),
    "batch norm": ("batch normalisation", {"make": lambda: nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))}),
    "no module": ("torch.nn.Module", {"make": lambda: mlp(), "optimizer": "adam"}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_line_before_any_step(case: str) -> None:
    match, settings = CASES[case]
    if case == "no module":
        with pytest.raises(wc.WeightclipError, match=match):
            wc.PrivacyEngine().make_private(module=lambda x: x, optimizer=None, data_loader=None, criterion=None,
                                            noise_multiplier=1.0)  # fmt: skip
        with pytest.raises(wc.WeightclipError, match="Optimizer"):
            wc.PrivacyEngine().make_private(module=mlp(), optimizer="adam", data_loader=None, criterion=None,
                                            noise_multiplier=1.0)  # fmt: skip
        return
    refused(match, **settings)


def test_models_that_mix_records_are_refused() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x - x.mean(0))

    refused("record", make=Centred)


def test_the_optimiser_must_hold_the_models_parameters() -> None:
    model = mlp()
    for parameters, match in (
        (list(model[0].parameters()), "2.weight"),
        ([*model.parameters(), nn.Parameter(torch.ones(2))], "not the model's"),
    ):
        with pytest.raises(wc.WeightclipError, match=match):
            private(model, table(8), optimizer=lambda p, q=parameters: torch.optim.SGD(q, lr=1.0))


def test_accountants_are_named() -> None:
    with pytest.raises(wc.WeightclipError, match="pld"):
        wc.PrivacyEngine(accountant="gdp")
    with pytest.raises(wc.WeightclipError, match="make_private"):
        wc.PrivacyEngine().make_private_with_epsilon(
            target_epsilon=1, target_delta=1e-3, epochs=1, data_loader=loader_of(X, Y), noise_multiplier=1.0
        )
    with pytest.raises(wc.ContractError, match="make_private first"):
        wc.PrivacyEngine().get_epsilon(1e-5)


def test_inputs_that_are_not_the_first_element_need_an_example() -> None:
    class Named(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, i: int):
            return {"x": X[i], "y": Y[i]}

    refused("example=", data_loader=DataLoader(Named(), batch_size=4))
    model = mlp()
    engine = wc.PrivacyEngine()
    model, optimizer, loader, loss = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(Named(), batch_size=4), noise_multiplier=1.0, example=X[:2],
    )  # fmt: skip
    for batch in loader:
        loss(model(batch["x"]), batch["y"]).backward()
        optimizer.step()
    assert engine.steps == 2


def test_labels_of_sequences_are_checked_along_the_right_axis() -> None:
    ids = torch.zeros(8, 4, dtype=torch.long)
    private(tokens(), (ids, torch.full((8, 4), 2)))  # 4 positions of 3 classes, turned around by the loop
    with pytest.raises(wc.WeightclipError, match="3 outputs"):
        private(tokens(), (ids, torch.full((8, 4), 3)))


def test_a_bad_record_during_training_is_zeros_and_training_goes_on() -> None:
    x, y = table(8)
    clean = x.clone()
    clean[3] = 0.0
    dirty = x.clone()
    dirty[3, 1] = math.nan
    a, b = (private(mlp(), (data, y), sigma=1.0).train(3) for data in (clean, dirty))
    assert same_bits(a.weights(), b.weights())
    assert b.engine.steps == 3


@pytest.mark.parametrize(
    "bounds",
    [wc.Bounds(input_radius=1.0), wc.Bounds(layer_cap=0.1),
     wc.Bounds(input_radius=1.0, weight_norm=1.0, spectral=False), wc.Bounds(input_radius=1.0, refresh=5)],
    ids=["weights", "cap", "clipped", "refresh"],
)  # fmt: skip
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_no_longer_finite_stop_the_run(bounds: wc.Bounds, value: float) -> None:
    run = private(mlp(), table(8), sigma=1.0, bounds=bounds).train()
    with torch.no_grad():
        run.model[0].weight[0, 0] = value
    before = run.engine.steps
    with pytest.raises(wc.ContractError, match="no longer finite"):
        run.train()
    assert run.engine.steps == before


def test_weights_that_would_overflow_activations_stop_the_run() -> None:
    """Bounds in float64 are still finite, activations in float32 are not: NaN would reach everybody's sum."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    run = private(model, table(8), sigma=1.0).train()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1e20)
    with pytest.raises(wc.ContractError, match="far too large"):
        run.train()
    assert run.engine.steps == 1


def test_a_diverging_run_stops_by_itself() -> None:
    run = private(mlp(), table(8), sigma=1.0, optimizer=lambda p: torch.optim.SGD(p, lr=1e30))
    with pytest.raises(wc.ContractError, match="no longer finite"):
        run.train(6)
    assert 0 < run.engine.steps < 6
