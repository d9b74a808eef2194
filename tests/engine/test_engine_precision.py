"""torch.compile, bfloat16 autocast, double precision, reduced float32 precision."""

from __future__ import annotations

import contextlib
import shutil

import pytest
import torch
import torch._dynamo.testing
from tests.engine_kit import (
    Run,
    cnn,
    difference,
    layer_norms,
    mlp,
    pictures,
    private,
    release,
    residual,
    same_bits,
    table,
)
from torch import nn

import weightclip as wc
from weightclip._device import Reads
from weightclip.certificate._gains import numerics_for

# warnings of torch about its own tracing
quiet = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


def compiling(test):
    for mark in quiet:
        test = mark(test)
    return test


MODELS = {"mlp": (mlp, table), "cnn": (cnn, pictures), "residual": (residual, table)}


def one_step(run: Run, forward=None) -> dict:
    run.train(forward=forward)
    return run.grads()


# -- torch.compile ----------------------------------------------------------------------------------------------------


@compiling
@pytest.mark.parametrize("kind", ["cnn", "residual"])
def test_a_compiled_model_trains_as_the_eager_one(kind: str) -> None:
    make, draw = MODELS[kind]
    bounds = wc.Bounds(input_radius=2.0, cotangent_radius=0.5)
    torch._dynamo.reset()
    rate = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "batch": 6}
    run = private(make(), draw(60), bounds=bounds, **rate)  # ten draws of different sizes
    compiled = torch.compile(run.model, backend="aot_eager", fullgraph=True)
    eager = private(make(), draw(60), bounds=bounds, **rate)
    for value in one_step(run, compiled).values():
        assert value.dtype == torch.float32
    one_step(eager)
    assert run.engine.steps == 10
    for name, value in run.weights().items():
        torch.testing.assert_close(value, eager.weights()[name], rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        x, y = draw(8)
        torch.testing.assert_close(run.criterion(compiled(x), y), nn.CrossEntropyLoss()(run.model(x), y))
    assert wc.certify(compiled, run.criterion).sensitivities == wc.certify(run.model, run.criterion).sensitivities


@compiling
def test_a_compiled_models_contract() -> None:
    torch._dynamo.reset()
    run = private(mlp(), table(8), bounds=wc.Bounds(input_radius=1.0))
    compiled = torch.compile(run.model, backend="aot_eager", fullgraph=True)
    expected = one_step(private(mlp(), table(8), bounds=wc.Bounds(input_radius=1.0)))
    x, y = next(iter(run.loader))
    penalty = lambda x: sum(p.square().sum() for p in run.model.parameters())  # noqa: E731
    for term in (penalty, lambda x: compiled(3 * x).pow(2).sum()):
        with pytest.raises(wc.ContractError):
            (run.criterion(compiled(x), y) + term(x)).backward()
        assert all(p.grad is None for p in run.model.parameters())
        x, y = next(iter(run.loader))
    run.criterion(compiled(x), y).backward()
    run.optimizer.step()
    for name, value in run.grads().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)
    for act in (
        lambda x, y: run.criterion(2 * compiled(x), y),
        lambda x, y: run.criterion(compiled(x).mul_(100), y),
        lambda x, y: run.criterion(run.model.forward(x), y),
    ):
        x, y = next(iter(run.loader))
        with pytest.raises(wc.ContractError):
            act(x, y)
    x, y = next(iter(run.loader))
    run.criterion(compiled(x), y).backward()  # the projection is inside the graph: huge inputs are harmless
    run.optimizer.step()


@compiling
def test_the_joint_cap_compiles_into_one_graph() -> None:
    torch._dynamo.reset()
    bounds = wc.Bounds(joint_cap=0.3)
    run = private(mlp(), table(8), bounds=bounds)
    got = one_step(run, torch.compile(run.model, backend="aot_eager", fullgraph=True))
    for name, value in one_step(private(mlp(), table(8), bounds=bounds)).items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-6)


@compiling
def test_one_call_takes_the_compiled_model() -> None:
    torch._dynamo.reset()
    runs = [private(mlp(), table(24), batch=8) for _ in range(2)]
    step = runs[0].engine.fused_step(torch.compile(runs[0].model, backend="aot_eager", fullgraph=True))
    for x, y in runs[0].loader:
        step(x, y)
    one_step(runs[1])
    assert runs[0].engine.steps == runs[1].engine.steps == 3
    for name, value in runs[0].weights().items():
        torch.testing.assert_close(value, runs[1].weights()[name], rtol=1e-4, atol=1e-6)

    class Opaque(nn.Module):  # has no len(), as most models
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x)

    run = private(Opaque(), table(8))
    x, y = next(iter(run.loader))
    run.engine.fused_step(torch.compile(run.model, backend="aot_eager"))(x, y)
    for other in (torch.compile(mlp()), mlp(), runs[0].model):
        with pytest.raises(wc.ContractError, match="compile"):
            runs[0].engine.fused_step(other)


@compiling
def test_a_recording_runs_what_was_compiled(monkeypatch) -> None:
    """Nothing is compiled inside of a recording, though one looks at all that operators read."""
    torch._dynamo.reset()

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x).relu()

    run = private(Own(), table(8))
    step = run.engine.fused_step(torch.compile(run.model, backend="aot_eager"))
    batch = next(iter(run.loader))
    step(*batch)
    x, reads = torch.ones_like(batch[0]), Reads()
    with reads:
        outputs, leaves = step._forward(x, reads)
        (outputs.sum() * 1.0).detach()
    assert len(leaves) == 2 and reads.kept  # it looks again afterwards
    torch.testing.assert_close(outputs, run.model(x))
    monkeypatch.setattr(Reads, "paused", lambda self: contextlib.nullcontext())
    with Reads() as looking, pytest.raises(RuntimeError, match="recompile"):
        step._forward(x, looking)


@compiling
def test_sizes_of_poisson_draws_compile_twice_at_most() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    run = private(mlp(), table(90), batch=9)
    sizes, compiled = set(), torch.compile(run.model, backend=counter)
    for x, y in run.loader:
        sizes.add(len(x))
        run.optimizer.zero_grad()
        run.criterion(compiled(x), y).backward()
        run.optimizer.step()
    assert len(sizes) > 4 and counter.frame_count <= 2


@compiling
@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_trains() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    run = private(nn.Linear(6, 3), table(8))
    got = one_step(run, torch.compile(run.model, fullgraph=True))
    torch.manual_seed(0)
    for name, value in one_step(private(nn.Linear(6, 3), table(8))).items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-6)


# -- autocast ---------------------------------------------------------------------------------------------------------


def under_autocast(run: Run, loss_inside: bool = True) -> None:
    for x, y in run.loader:
        run.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = run.model(x)
            assert z.dtype == torch.bfloat16
            loss = run.criterion(z, y) if loss_inside else None
        loss = run.criterion(z, y) if loss is None else loss
        loss.backward()
        run.optimizer.step()


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("how", ["weights", "radii", "joint cap"])
def test_bfloat16_autocast_trains_with_float32_gradients_within_the_sensitivity(kind: str, how: str) -> None:
    make, draw = MODELS[kind]
    bounds = {
        "weights": wc.Bounds(input_radius=1.0), "radii": wc.Bounds(layer_radius=1.0, cotangent_radius=0.2),
        "joint cap": wc.Bounds(joint_cap=0.2),
    }[how]  # fmt: skip
    x, y = draw(10)
    runs = [private(make(), (x[:n], y[:n]), bounds=bounds, batch=8, sample_rate=1.0) for n in (9, 10)]
    sums = []
    for run in runs:
        under_autocast(run, loss_inside=how != "radii")
        sums.append({name: 8 * g.double() for name, g in run.grads().items()})
        assert all(g.dtype == torch.float32 for g in run.grads().values())
    start = private(make(), (x, y), bounds=bounds, batch=8, sample_rate=1.0)
    next(iter(start.loader))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        start.criterion(start.model(x), y)
    limits = start.layers()  # of the first step, under autocast
    for layer, moved in layer_norms(difference(sums[1], sums[0])).items():
        assert 0 < moved <= limits[layer]["sensitivity"]
    # gradients are stored in float32: not all of them fit in bfloat16
    assert any(bool((g != g.bfloat16().float()).any()) for g in runs[0].grads().values())


@pytest.mark.parametrize("fused", [False, True])
def test_one_autocast_context_around_all_steps_casts_the_weights_of_each(fused: bool) -> None:
    """autocast keeps its casts until the context ends: a forward on old weights has bounds of its own."""
    inside, around = (private(mlp(), table(24), batch=8) for _ in range(2))
    step = around.engine.fused_step()
    under_autocast(inside)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if not fused:
            around.train()
        for x, y in around.loader if fused else ():
            step(x, y)
    assert around.engine.steps == 3 and same_bits(inside.weights(), around.weights())


def test_under_autocast_the_certificate_takes_weights_as_cast() -> None:
    model = nn.Linear(8, 8, bias=False)
    with torch.no_grad():
        model.weight.fill_(1 + 2.0**-8 + 2.0**-12)  # rounds up to 1 + 2^-7 in bfloat16
    two = nn.Sequential(nn.Linear(6, 8), model)
    g = torch.Generator().manual_seed(0)
    data = torch.randn(8, 6, generator=g), torch.randint(0, 8, (8,), generator=g)
    run = private(two, data, optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    run.train()
    plain = run.layers()["1"]["gain"]
    under_autocast(run)
    cast = run.layers()["1"]["gain"]
    assert cast >= 8 * (1 + 2.0**-7) > plain * 0.999 > 8
    run.train()  # and back: float32 passes are certified for float32 weights again
    assert run.layers()["1"]["gain"] == plain


def test_autocast_around_the_model_alone_is_noticed_when_the_output_is_float32() -> None:
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x):
            return torch.nn.functional.softplus(self.last(torch.relu(self.first(x)))).float()

    run = private(Casts(), table(8), optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    run.train()
    plain = run.layers()["first"]["sensitivity"]
    x, y = next(iter(run.loader))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = run.model(x)
    assert z.dtype == torch.float32
    run.criterion(z, y).backward()
    run.optimizer.step()
    assert run.layers()["first"]["sensitivity"] > plain * (1 + 2.0**-8)


def test_float16_is_refused() -> None:
    run = private(mlp(), table(8))
    x, y = next(iter(run.loader))
    with torch.autocast("cpu", dtype=torch.float16), pytest.raises(wc.ContractError, match="bfloat16"):
        run.criterion(run.model(x), y)


def test_autocast_must_not_change_within_a_draw() -> None:
    run = private(mlp(), table(8), max_physical_batch_size=4)
    pieces = iter(run.loader)
    x, y = next(pieces)
    run.criterion(run.model(x), y).backward()
    x, y = next(pieces)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(wc.ContractError, match="within one draw"):
        run.criterion(run.model(x), y)


# -- other precisions -------------------------------------------------------------------------------------------------


def test_double_precision_models() -> None:
    x, y = table(9)
    runs = [private(mlp().double(), (x[:n].double(), y[:n]), batch=8, sample_rate=1.0) for n in (8, 9)]
    a, b = (release(run) for run in runs)
    limits = runs[0].layers()
    for layer, moved in layer_norms(difference(a, b)).items():
        assert 0 < moved <= limits[layer]["sensitivity"]
    noisy = private(mlp().double(), (x.double(), y), sigma=1.0)
    noisy.train()
    assert all(g.dtype == torch.float64 and bool((g != g.float().double()).any()) for g in noisy.grads().values())
    plain = mlp().double()
    inside = x.double() / x.double().norm(dim=1, keepdim=True).clamp(min=1)
    nn.functional.cross_entropy(plain(inside)[:8], y[:8], reduction="sum").backward()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(a[name], p.grad, rtol=1e-5, atol=1e-6)


def test_reduced_float32_precision_is_in_the_certificate() -> None:
    device = torch.device("cpu")
    assert numerics_for(device, None).operand == 0
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert numerics_for(device, None).operand == 2.0**-8
        assert numerics_for(device, None).weights == torch.bfloat16
        torch.set_float32_matmul_precision("high")
        assert numerics_for(device, None).operand == 2.0**-10
    finally:
        torch.set_float32_matmul_precision(before)
    assert numerics_for(device, None).operand == 0
    assert numerics_for(device, torch.bfloat16).weights == torch.bfloat16


def test_one_autocast_around_a_whole_run_trains_as_one_for_each_step() -> None:
    """autocast keeps its casts of weights until it is left: private layers ask for new ones."""
    runs = [private(mlp(), table(24), batch=8, optimizer=lambda p: torch.optim.Adam(p, lr=0.05)) for _ in range(2)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step = runs[0].engine.fused_step()
        for x, y in runs[0].loader:
            step(x, y)
    step = runs[1].engine.fused_step()
    for x, y in runs[1].loader:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            step(x, y)
    for name, value in runs[0].weights().items():
        assert torch.equal(value, runs[1].weights()[name])
