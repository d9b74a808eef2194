"""Doors of a private model: projection of inputs, recognition of outputs and of their views."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.engine_kit import mlp, private, residual, table, tokens
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weightclip as wc
from weightclip.engine._entrance import InputProjection, project_records
from weightclip.engine._gate import OutputGate, ViewLayout, keeps_records
from weightclip.errors import ContractError


@pytest.mark.parametrize("radius", [1.0, 0.1, 1e-3, 1e-7, 1e-12])
@pytest.mark.parametrize("size", [1e26, 1e30, 1e38, 3.4e38])
def test_scales_below_the_normal_numbers_do_not_lead_out_of_the_ball(radius: float, size: float) -> None:
    for n in (1, 2, 16):
        x = torch.cat([torch.full((1, n), size), torch.rand(50, n, generator=torch.Generator().manual_seed(n)) * size])
        norms = project_records(x, radius).double().norm(dim=1)
        assert bool((norms <= radius * (1 + (n + 8) * 2.0**-24)).all())
        assert bool((norms >= radius * (1 - 1e-5)).all())


@given(
    st.integers(0, 10**6), st.floats(1e-12, 1e12), st.sampled_from([1e-44, 1e-30, 1e-20, 1.0, 1e10, 1e19, 1e30, 3e38]),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)  # fmt: skip
def test_projection_holds_at_every_magnitude(seed: int, radius: float, size: float, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(seed)
    x = (torch.rand(5, 3, 7, generator=g) * 2 - 1).double() * size
    x[1, 0] = 0.0
    x = x.to(dtype)
    out = project_records(x, radius)
    assert out.dtype == dtype and out.shape == x.shape
    norms = out.double().flatten(1).norm(dim=1)
    assert bool((norms <= radius * (1 + 29 * 2.0**-24)).all())
    before = x.double().flatten(1).norm(dim=1)
    inside = before <= radius * 0.99
    assert torch.equal(out[inside], x[inside])
    outside = torch.isfinite(before) & (before > radius * 1.01) & (radius > 1e-6)
    if bool(outside.any()) and dtype != torch.bfloat16:
        assert bool((norms[outside] > radius * 0.999).all())  # projected, not dropped


def test_projection_of_bad_records_is_zero_and_touches_no_other() -> None:
    x = torch.randn(6, 4)
    good = project_records(x.clone(), 0.5)
    x[1, 2], x[3, 0], x[4] = math.nan, math.inf, -math.inf
    out = project_records(x, 0.5)
    assert not out[[1, 3, 4]].any()
    assert torch.equal(out[[0, 2, 5]], good[[0, 2, 5]])
    assert torch.equal(project_records(x, math.inf)[0], x[0])
    assert not project_records(x, math.inf)[[1, 3, 4]].any()
    huge = torch.full((4, 3), 3e38)  # finite, though their sum is not
    assert torch.equal(project_records(huge, math.inf), huge)


@pytest.mark.parametrize("detach", [False, True])
def test_projection_is_non_expansive_backwards(detach: bool) -> None:
    x = torch.tensor([[3.0, 4.0], [0.1, 0.1], [0.0, 0.0], [math.nan, 1.0], [1e30, 0.0]], requires_grad=True)
    d = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
    (g,) = torch.autograd.grad(project_records(x, 1.0, detach), x, d)
    assert bool(torch.isfinite(g).all())
    assert bool((g.norm(dim=1) <= d.norm(dim=1) * (1 + 1e-6)).all())
    assert torch.equal(g[1], d[1]) and not g[3].any()
    if detach:
        for p in (1, math.inf):
            assert bool((g.norm(p, dim=1) <= d.norm(p, dim=1) * (1 + 1e-6)).all())


def test_scalars_vectors_and_integers_pass_the_hook() -> None:
    hook = InputProjection(1.0)
    args, kwargs = hook(  # pyright: ignore[reportGeneralTypeIssues]
        nn.Identity(), (torch.tensor(5.0), torch.tensor([2.0, -0.5]), {"ids": torch.arange(3)}), {"k": None}
    )
    assert args[0] == 5 and args[1].tolist() == [1.0, -0.5] and kwargs == {"k": None}
    assert args[2]["ids"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("shape", "view", "fine"),
    [
        ((4, 6), lambda z: z, True),
        ((4, 6), lambda z: z.view(4, 2, 3), True),
        ((4, 6), lambda z: z[:, 2:5], True),
        ((4, 6), lambda z: z[:, ::2], True),
        ((4, 2, 3), lambda z: z.transpose(1, 2), True),
        ((4, 1), lambda z: z.squeeze(1), True),
        ((1, 6), lambda z: z, True),
        ((4, 4), lambda z: z.t(), False),
        ((4, 6), lambda z: z.view(2, 12).view(4, 6)[:2], False),
        ((4, 6), lambda z: z.as_strided((4, 6), (1, 4)), False),
        ((4, 6), lambda z: z[:, :1].expand(4, 5), False),
        ((4, 6), lambda z: z.as_strided((4, 3), (6, 2), 1), True),
        ((4, 6), lambda z: z.as_strided((4, 7), (6, 1)), False),
        ((4, 6), lambda z: z.unfold(1, 2, 1), False),
        ((4, 6), lambda z: z[0], False),
    ],
)
def test_which_views_keep_records(shape, view, fine: bool) -> None:
    z = torch.arange(math.prod(shape)).view(shape)
    padded = torch.cat([z.flatten(), torch.zeros(8, dtype=z.dtype)]).as_strided(z.shape, z.stride())
    assert keeps_records(ViewLayout.of(view(padded)), ViewLayout.of(padded)) is fine


def test_a_gate_leaves_its_engine_behind_in_copies() -> None:
    run = private(mlp(), table(4))
    gate = next(h for h in run.model._forward_hooks.values() if isinstance(h, OutputGate))
    for twin in (copy.deepcopy(gate), pickle.loads(pickle.dumps(gate))):
        assert twin.owner is None and twin(run.model, (), torch.zeros(2, requires_grad=True) * 1) is None


def start(make=mlp):
    run = private(make(), table(8))
    x, y = next(iter(run.loader))
    return run, x, y


def test_views_of_the_output_are_fine_and_bounded_as_the_loss_sees_them() -> None:
    x, y = table(8)
    single = nn.Linear(6, 1)
    run = private(single, (x, (y > 0).float()), criterion=nn.BCEWithLogitsLoss())
    for a, target in run.loader:
        run.criterion(run.model(a).squeeze(1), target).backward()
        run.optimizer.step()
    assert run.engine.steps == 1
    # a sequence model whose loop turns (records, positions, classes) around
    g = torch.Generator().manual_seed(0)
    ids, labels = torch.randint(0, 5, (8, 4), generator=g), torch.randint(0, 3, (8, 4), generator=g)
    run = private(tokens(), (ids, labels))
    for a, target in run.loader:
        run.criterion(run.model(a).transpose(1, 2), target).backward()
        run.optimizer.step()
    # CE averaged over 4 positions: sqrt(2)/sqrt(4), not sqrt(2)/sqrt(3) as for three positions of four classes
    assert run.engine.report()["public"]["loss_bound"] == pytest.approx(2**0.5 / 2, rel=1e-9)
    again = private(tokens(), (ids, labels))
    plain = tokens()
    nn.functional.cross_entropy(plain(ids).transpose(1, 2), labels, reduction="mean").backward()
    for a, target in again.loader:
        again.criterion(again.model(a).permute(0, 2, 1), target).backward()
        again.optimizer.step()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(again.grads()[name], p.grad, rtol=1e-3, atol=1e-6)


def test_a_class_may_be_left_out_by_a_slice() -> None:
    run, x, y = start(residual)
    y = y.clamp(max=1)
    run.criterion(run.model(x)[:, :2], y).backward()
    run.optimizer.step()
    assert run.grads()["last.weight"][2].abs().max() == 0


def test_training_on_records_larger_than_certified_is_refused() -> None:
    """Gains and positions grow with the input: 16 x 16 pictures under a certificate for 8 x 8."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2))
    data = TensorDataset(torch.randn(8, 1, 16, 16), torch.zeros(8, dtype=torch.long))
    engine = wc.PrivacyEngine()
    model, _, loader, loss = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=DataLoader(data, batch_size=8),
        criterion=nn.CrossEntropyLoss(), noise_multiplier=1.0, bounds=wc.Bounds(input_radius=1.0),
        example=torch.zeros(1, 1, 8, 8),
    )  # fmt: skip
    x, _ = next(iter(loader))
    with pytest.raises(ContractError, match="certified for"):
        model(x)
    with torch.no_grad():
        model(x)  # looking at predictions is free


def test_the_wall_is_refused_under_a_transform() -> None:
    """There its output would not be what the criterion takes it for."""
    run = private(mlp(), table(8))
    x, _ = next(iter(run.loader))
    weights = {name: p.detach() for name, p in run.model.named_parameters()}
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda w: torch.func.functional_call(run.model, w, (x,)).sum())(weights)
