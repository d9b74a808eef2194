from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.engine_kit import pin
from torch.utils.data import DataLoader, TensorDataset

import weightclip as wc
from weightclip.accounting._accounting import epsilon
from weightclip.errors import CertificationError, WeightclipError
from weightclip.models import MLP
from weightclip.nn._averaging import ParameterAverage
from weightclip.noise._streams import Streams
from weightclip_studies.fast_mlp import (
    Absolute,
    Adam,
    Budget,
    Huber,
    Logistic,
    Run,
    Settings,
    Sgd,
    Softmax,
    logits,
    train_many,
)
from weightclip_studies.fast_mlp._data import Data
from weightclip_studies.fast_mlp._train import _Stack

RNG = np.random.default_rng(5)
N, F = 60, 7
X = (RNG.normal(size=(N, F)) * np.exp(RNG.normal(size=(N, 1)))).astype(np.float32)
Y = RNG.integers(0, 3, N)
LABELS = {1: (Y > 0).astype(np.float32), 3: Y}


def engine_run(settings: Settings, objective, sigma: float, steps: int, seed: int = 3):
    """The same run by the engine: model, weights after every step, sensitivities of the last step."""
    torch.manual_seed(1)
    model = MLP(F, settings.hidden, objective.outputs)
    init = [(m.weight.detach().clone(), m.bias.detach().clone()) for m in model.modules() if hasattr(m, "weight")]
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr)
    bounds = wc.Bounds(
        input_radius=settings.input_radius, bias_scale=settings.bias_scale, weight_norm=settings.weight_norm,
        layer_radius=settings.layer_radius, cotangent_radius=settings.cotangent_radius, joint_cap=settings.joint_cap,
        clip=wc.Sphere() if settings.fix_lip else wc.Rescale(),
    )  # fmt: skip
    y = torch.from_numpy(LABELS[objective.outputs])
    loader = DataLoader(TensorDataset(torch.from_numpy(X), y), batch_size=settings.batch)
    engine = wc.PrivacyEngine()
    model, optimizer, loader, criterion = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader,
        criterion=objective.loss(settings.temperature, settings.cap),
        noise_multiplier=sigma, bounds=bounds, allocation=settings.allocation,
    )  # fmt: skip
    pin(engine, seed)  # draws and noise by seed and step alone, as this trainer has them
    average = ParameterAverage(model, decay=settings.averaging)
    done, delta = 0, None
    while done < steps:
        for x, t in loader:
            if done == steps:
                break
            optimizer.zero_grad()
            out = model(x)
            criterion(out if objective.outputs > 1 else out.squeeze(1), t).backward()
            delta = engine.training.sensitivity.values.clone()
            optimizer.step()
            average.update()
            done += 1
    with average.apply():
        weights = [p.detach().clone() for p in model.parameters()]
    return init, weights, delta


CASES = [
    Settings(hidden=(5,), batch=15, epochs=2, lr=0.02, input_radius=1.5, cap=0.3, bias_scale=0.4),
    Settings(hidden=(5, 4), batch=15, epochs=2, lr=0.02, input_radius=1.5, weight_norm=0.7, allocation=wc.AdamAware()),
    Settings(hidden=(5,), batch=15, epochs=2, lr=0.02, input_radius=2.0, layer_radius=0.8, cotangent_radius=0.2,
             averaging=0.9, allocation=wc.LeastVariance()),
    Settings(hidden=(), batch=12, epochs=2, lr=0.05, input_radius=1.0, weight_norm=0.5, fix_lip=True, cap=0.1),
    Settings(hidden=(5,), batch=15, epochs=2, lr=0.02, input_radius=None, joint_cap=0.3, bias_scale=0.5),
]  # fmt: skip


@pytest.mark.parametrize("settings", CASES)
@pytest.mark.parametrize("objective", [Logistic(), Softmax(3)])
@pytest.mark.parametrize("sigma", [0.0, 1.3])
def test_same_trajectory_as_the_engine(settings, objective, sigma):
    steps = settings.steps(N)
    init, expected, delta = engine_run(settings, objective, sigma, steps)
    runs = train_many(X, LABELS[objective.outputs], [settings], [3], objective=objective, noise=sigma, init=init)
    run = runs[0][0]
    assert (run.steps, run.q, run.batch, run.sigma) == (steps, settings.batch / N, settings.batch, sigma)
    for mine, theirs in zip([t for layer in run.weights for t in layer], expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5 if sigma == 0 else 2e-3, rtol=0)
    # float64 here, float32 with its larger rounding slack there
    ratio = torch.tensor(run.sensitivities, dtype=torch.float64) / delta
    assert float(ratio.min()) > 0.995 and float(ratio.max()) <= 1.0 + 1e-6


def stack_for(settings: Settings, objective, x=X, y=None) -> _Stack:
    y = LABELS[objective.outputs] if y is None else y
    stack = _Stack(Data(x, y, objective, None, 1, torch.device("cpu")), [settings], [Streams.seeded(0)], objective, N)
    stack.start(None)
    return stack


def layer_norms(stack: _Stack, index: int, beta: float) -> list[float]:
    """Norm of one record's gradient of every layer, as it enters the sum, biases times beta."""
    flat = stack.summed(torch.tensor([[index]]), None)
    return [math.hypot(float(w.norm()), beta * float(b.norm())) for w, b in stack.views(flat[0, 0])]


ADVERSARIAL = np.concatenate([X, 1e6 * X[:4], np.zeros((1, F)), 1e-8 * X[:2], np.full((1, F), np.nan)]).astype("f")


@pytest.mark.parametrize("settings", [*CASES, Settings(hidden=(6, 5), input_radius=None, layer_radius=(1.0, 0.5, 2.0),
                                                      cotangent_radius=(0.1, 0.2, 0.3), bias_scale=0.3)])  # fmt: skip
@pytest.mark.parametrize("objective", [Logistic(), Softmax(3)])
def test_no_record_exceeds_its_sensitivities(settings, objective):
    y = RNG.integers(0, 2, len(ADVERSARIAL)) if objective.outputs == 1 else RNG.integers(0, 3, len(ADVERSARIAL))
    stack = stack_for(settings, objective, ADVERSARIAL, y)
    for scale in (1.0, 30.0):  # large weights saturate the loss and make the chain of gains matter
        stack.flat.mul_(scale)
        stack.norms = stack.clip()
        delta = stack.bounds()[0][0, 0].tolist()
        for i in range(len(ADVERSARIAL)):
            for norm, bound in zip(layer_norms(stack, i, settings.bias_scale), delta, strict=True):
                assert norm <= bound


def test_enforced_radii_are_tight():
    settings = Settings(hidden=(4,), input_radius=None, layer_radius=0.5, cotangent_radius=0.01, bias_scale=0.2)
    stack = stack_for(settings, Logistic())
    delta = stack.bounds()[0][0, 0].tolist()
    worst = np.max([layer_norms(stack, i, 0.2) for i in range(N)], axis=0)
    assert worst == pytest.approx(delta, rel=1e-6)


@pytest.mark.parametrize("cap", [0.3, (0.1, 0.5)])
def test_joint_cap_is_clipping_of_the_whole_gradient(cap):
    """Against per-record gradients by autograd: the sum of g_i min(1, 1/||(g_ik/t_k)_k||)."""
    settings = Settings(hidden=(5,), input_radius=None, joint_cap=cap, bias_scale=0.5)
    stack = stack_for(settings, Softmax(3))
    index = torch.tensor([[0, 3, 4, 9, 9, 20]])
    got = stack.summed(index, torch.tensor([[True, True, True, False, True, True]]))[0, 0]
    t = torch.tensor(settings.per_layer("joint_cap"), dtype=torch.float64)
    expected = torch.zeros_like(got)
    clipped = 0
    for i in [0, 3, 4, 9, 20]:
        params = [p[0, 0].clone().requires_grad_() for layer in stack.params for p in layer]
        h = torch.relu(torch.from_numpy(X[i]).double() @ params[0].T + params[1])
        loss = torch.nn.functional.cross_entropy((h @ params[2].T + params[3])[None], torch.tensor([int(Y[i])]))
        g = torch.autograd.grad(loss, params)
        per_layer = torch.stack([(g[2 * k].square().sum() + 0.25 * g[2 * k + 1].square().sum()).sqrt() for k in (0, 1)])
        factor = min(1.0, 1 / float((per_layer / t).norm()))
        clipped += factor < 1
        expected += factor * torch.cat([p.flatten() for p in g])
    assert clipped >= 2
    torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-10)
    assert stack.bounds()[0][0, 0].tolist() == pytest.approx(t.tolist(), rel=1e-6)


def test_the_first_release_has_the_stated_noise():
    """With a zero learning rate's worth of information: one SGD step reveals the gradient, its noise must be s_k/b."""
    settings = Settings(hidden=(30,), batch=N, epochs=1, lr=1.0, optimizer=Sgd(), bias_scale=0.25, joint_cap=0.7)
    init = [(torch.zeros(30, F), torch.zeros(30)), (torch.zeros(1, 30), torch.zeros(1))]
    runs = train_many(X, LABELS[1], [settings], range(200), objective=Logistic(), noise=2.0, init=init)
    w = torch.stack([run.weights[0][0] for run in runs[0]]).double() * N  # zero weights: hidden gradients are zero
    b = torch.stack([run.weights[0][1] for run in runs[0]]).double() * N
    for values, expected in ((w, 2 * 0.7), (b, 2 * 0.7 / 0.25)):
        assert float(values.std()) == pytest.approx(expected, rel=5 / math.sqrt(values.numel()))
        assert abs(float(values.mean())) < 5 * expected / math.sqrt(values.numel())
    assert runs[0][0].scales == pytest.approx((1.4, 1.4), rel=1e-6)


def test_scales_spend_the_multiplier_exactly():
    for settings in CASES[:-1]:  # with a joint cap, t_k and s_k are in one proportion for all layers
        run = train_many(X, LABELS[1], [settings], [0], objective=Logistic(), noise=1.7)[0][0]
        assert sum((d / s) ** 2 for d, s in zip(run.sensitivities, run.scales, strict=True)) == pytest.approx(
            1 / 1.7**2
        )


def test_a_stack_equals_runs_alone():
    settings = [
        Settings(hidden=(4,), batch=12, epochs=1, lr=0.01, cap=0.2, bias_scale=0.3),
        Settings(hidden=(4,), batch=12, epochs=1, lr=0.05, input_radius=3.0, temperature=0.3, weight_norm=2.0),
        Settings(hidden=(4,), batch=12, epochs=1, joint_cap=0.4, averaging=0.5, final_lr=0.1),
        Settings(hidden=(), batch=20, epochs=1.5, optimizer=Sgd(0.9)),
        Settings(hidden=(4,), batch=12, epochs=1, layer_radius=0.6, cotangent_radius=0.1),
    ]
    noise = [0.5, 1.0, 1.5, 2.0, 0.0]
    together = train_many(X, Y, settings, [0, 1], objective=Softmax(3), noise=noise)
    for i, s in enumerate(settings):
        for j in (0, 1):
            alone = train_many(X, Y, [s], [j], objective=Softmax(3), noise=noise[i])[0][0]
            assert alone.sensitivities == pytest.approx(together[i][j].sensitivities, rel=1e-9)
            for mine, theirs in zip(alone.weights, together[i][j].weights, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_subsets_are_the_only_records_read():
    settings = [Settings(hidden=(3,), batch=10, epochs=1)]
    parts = [np.arange(0, 30), np.arange(30, 60)]
    runs = train_many(X, Y, settings, [0, 0], objective=Softmax(3), noise=1.0, subsets=parts)
    for part, run in zip(parts, runs[0], strict=True):
        alone = train_many(X[part], Y[part], settings, [0], objective=Softmax(3), noise=1.0)[0][0]
        for mine, theirs in zip(run.weights, alone.weights, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_bad_records_contribute_zero_and_training_goes_on():
    x, y = X.copy(), LABELS[1].copy()
    x[3, 2], x[4, 0], y[5] = np.nan, np.inf, 7
    settings = Settings(hidden=(3,), batch=N, epochs=1)
    got = stack_for(settings, Logistic(), x, y).summed(torch.arange(N)[None], None)
    good = np.setdiff1d(np.arange(N), [3, 4, 5])
    zeros = np.where(np.isin(np.arange(N), [3, 4])[:, None], 0, x).astype("f")
    expected = stack_for(settings, Logistic(), zeros, y).summed(torch.from_numpy(np.append(good, [3, 4]))[None], None)
    torch.testing.assert_close(got, expected)
    assert train_many(x, y, [settings], [0], objective=Logistic(), noise=1.0)[0][0].finite


def test_overflowing_records_are_left_out_of_every_layer():
    stack = stack_for(Settings(hidden=(3, 3), input_radius=None, layer_radius=1.0, cotangent_radius=1.0), Softmax(3))
    stack.flat.mul_(1e120)  # finite weights, activations that overflow for most records
    total = stack.summed(torch.arange(N)[None], None)
    assert bool(torch.isfinite(total).all())
    assert float(total.norm()) <= N * 3


def test_a_diverged_run_does_not_touch_the_others():
    settings = [Settings(hidden=(3,), batch=20, epochs=2, lr=lr, optimizer=Sgd()) for lr in (1e300, 0.1)]
    runs = train_many(X, Y, settings, [0], objective=Softmax(3), noise=1.0)
    assert not runs[0][0].finite
    alone = train_many(X, Y, settings[1:], [0], objective=Softmax(3), noise=1.0)[0][0]
    for mine, theirs in zip(runs[1][0].weights, alone.weights, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_budget_is_kept():
    settings = Settings(hidden=(3,), batch=12, epochs=4)
    run = train_many(X, Y, [settings], [0], objective=Softmax(3), noise=Budget(1.5, 1e-3))[0][0]
    assert isinstance(run, Run) and 1.5 * 0.999 < epsilon([run.mechanism], 1e-3) <= 1.5


@pytest.mark.parametrize("objective", [Huber(), Absolute()])
def test_regression_learns(objective):
    y = (X @ np.arange(F) / 10).astype(np.float32).clip(-2, 2)
    cap = 0.5 if objective == Huber() else None
    settings = Settings(hidden=(8,), batch=N, epochs=300, lr=0.02, cap=cap, input_radius=10.0)
    run = train_many(X, y, [settings], [0], objective=objective, noise=0.0)[0][0]
    error = (logits([run], X)[0, :, 0].numpy() - y).std()
    assert error < 0.5 * y.std()


def test_logits_are_those_of_a_plain_model():
    settings = Settings(hidden=(4,), batch=20, epochs=1, input_radius=1.0, temperature=0.5)
    run = train_many(X, Y, [settings], [0], objective=Softmax(3), noise=1.0)[0][0]
    x = torch.from_numpy(X)
    h = x / x.norm(dim=1, keepdim=True).clamp(min=1.0)
    h = torch.relu(h @ run.weights[0][0].T + run.weights[0][1]) @ run.weights[1][0].T + run.weights[1][1]
    torch.testing.assert_close(logits([run], X, chunk=7)[0], h / 0.5)


def test_secure_streams_serve_one_setting():
    settings = [Settings(hidden=(), batch=20, epochs=1)] * 2
    with pytest.raises(WeightclipError, match="share their noise"):
        train_many(X, Y, settings, [Streams.secure()], objective=Softmax(3), noise=1.0)
    assert len(train_many(X, Y, settings[:1], [Streams.secure()], objective=Softmax(3), noise=1.0)[0]) == 1


@pytest.mark.parametrize("settings, objective", [
    (Settings(hidden=(3,), input_radius=None), Logistic()),
    (Settings(hidden=(3,)), Huber()),
])  # fmt: skip
def test_infinite_sensitivities_are_refused(settings, objective):
    with pytest.raises(CertificationError, match="no finite sensitivity"):
        train_many(X, LABELS[1], [settings], [0], objective=objective, noise=1.0)


def test_progress_counts_steps():
    seen = []
    settings = [Settings(hidden=(), batch=30, epochs=2, optimizer=Adam(beta2=b)) for b in (0.9, 0.99)]
    train_many(X, Y, settings, [0], objective=Softmax(3), noise=1.0, progress=lambda a, b: seen.append((a, b)))
    assert seen[0] == (1, 8) and seen[-1] == (8, 8)


def test_records_in_half_precision_and_draws_in_pieces(monkeypatch):
    """Large tables are kept in half precision; draws are summed piece by piece, with and without a mask."""
    import weightclip_studies.fast_mlp._train as train

    settings = [Settings(hidden=(3,), batch=40, epochs=2)]
    rounded = torch.tensor(X).half()
    runs = [train_many(x, Y, settings, [0, 1], objective=Softmax(3), noise=1.0)[0] for x in (rounded, rounded.float())]
    monkeypatch.setattr(train, "_PIECE", 1)
    monkeypatch.setattr(train, "max", lambda *_: 7, raising=False)  # rows of a piece
    runs.append(train_many(rounded, Y, settings, [0, 1], objective=Softmax(3), noise=1.0)[0])
    for other, tolerance in ((runs[1], 0.0), (runs[2], 1e-6)):
        for mine, theirs in zip(runs[0], other, strict=True):
            for a, b in zip(mine.weights, theirs.weights, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def test_the_public_number_of_records_need_not_be_the_true_one():
    settings = Settings(hidden=(), batch=20, epochs=2)
    run = train_many(X, Y, [settings], [0], objective=Softmax(3), noise=1.0, records=100)[0][0]
    assert (run.q, run.steps, run.batch) == (0.2, 10, 20.0)
