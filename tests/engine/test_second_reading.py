"""What a hostile second reader found around the limits, each closed, with mutants."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.engine.test_holes import _mean
from tests.engine_kit import mlp, private, table
from tests.holes import Net, moved, usual
from torch import Tensor, nn

import weightclip as wc
from weightclip.factors import Collector, Entry, _conv, make_layer_private
from weightclip.factors._affine import affine_factors
from weightclip.factors._conv import patch_energies
from weightclip.factors._record_norms import Shape, numbers

RADII = wc.Bounds(layer_radius=1.0, cotangent_radius=0.1)


def test_limits_are_out_of_reach_of_whoever_casts_or_writes_buffers() -> None:
    for bounds in (wc.Bounds(input_radius=1.0), RADII, wc.Bounds(layer_cap=0.5)):
        run = private(mlp(), table(8), bounds=bounds)
        before = [entry.layer._wc_limits for entry in run.engine.training.collector.entries]
        values = [limits.clone() for limits in before]
        assert not any(name.endswith("_wc_limits") for name, _ in run.model.named_buffers())
        run.model.bfloat16().float()
        for buffer in run.model.buffers():
            buffer.data.fill_(1e6)
        for entry, limits, value in zip(run.engine.training.collector.entries, before, values, strict=True):
            assert entry.layer._wc_limits is limits and torch.equal(limits, value) and limits.dtype == torch.float32


def test_limits_do_not_follow_the_default_type() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = nn.Linear(2, 2).float()
        make_layer_private(layer, cap=1.00395)
    finally:
        torch.set_default_dtype(torch.float32)
    assert layer._wc_limits[2].item() == pytest.approx(1.00395, rel=1e-7)  # type: ignore[index, union-attr]


class Conv(nn.Module):
    """A convolution whose numbers a user may change."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.last = nn.Conv1d(1, 4, 3, padding=1), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.conv(x.unsqueeze(1))).flatten(1))


@pytest.mark.parametrize("bounds", [RADII, wc.Bounds(input_radius=1.0, p=float("inf")), wc.Bounds()], ids=str)
def test_norms_go_by_the_forward_pass_and_not_by_what_the_layer_says(bounds: wc.Bounds) -> None:
    def step(run, x, y) -> None:
        run.model.conv.kernel_size = (1,)
        usual(run, x, y)

    assert moved(Conv, step, bounds) <= 1 + 1e-4


def test_the_patch_norm_is_that_of_the_kernel_in_use() -> None:
    layer = nn.Conv1d(2, 3, 3, padding=1)
    make_layer_private(layer, cap=1.0)
    layer.kernel_size, layer.padding, layer.dilation = (1,), (0,), (1,)
    x, d = torch.randn(4, 2, 6), torch.randn(4, 3, 6)
    patches = torch.nn.functional.pad(x, (1, 1)).unfold(2, 3, 1)
    exact = (patches.square().sum((1, 2, 3)) + 6).sqrt()
    torch.testing.assert_close(layer._wc_form.factors(layer, x, d, numbers((1,), (1,), (1,), 1, False, (0,)))[0], exact)


@pytest.mark.parametrize("joint", [None, 0.5])
def test_masked_rows_contribute_nothing_whatever_reaches_them(joint: float | None) -> None:
    found: list[dict[int, Tensor]] = []
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    for rows, mask in ((2, None), (3, torch.tensor([True, True, False]))):
        torch.manual_seed(0)
        layer, sums = nn.Linear(4, 3), {}
        make_layer_private(layer, cap=0.5)
        collector = Collector(lambda place, g, to=sums: to.__setitem__(place, to.get(place, 0) + g))
        collector.enter(Entry(layer, 0, 1, joint=joint))
        with collector.collection(rows, mask):
            layer(x[:rows]).sum().backward()
        found.append(sums)
    for place in (0, 1):
        torch.testing.assert_close(found[1][place], found[0][place])


def test_squares_that_vanish_are_allowed_for() -> None:
    x = torch.full((2, 5, 6), 3e-23)
    d = torch.ones(2, 5, 6)
    assert bool((affine_factors(x, d, 0.0, [2])[0].double() >= x.double().square().sum(2).amax(1).sqrt()).all())
    shape = Shape((3,), (1,), (0,), (1,), 1, False, (0,))
    largest = patch_energies(x, shape).flatten(1).amax(1).sqrt()
    assert bool((largest.double() >= x.double()[:, :, :3].square().sum((1, 2)).sqrt()).all())


def test_a_loss_inside_the_loss_is_refused() -> None:
    inner: list = []

    def nested(z: Tensor, y: Tensor) -> Tensor:
        if inner and z.shape[0] == 8:
            run, x, labels = inner.pop()
            with torch.enable_grad():
                run.criterion(run.model(x), labels).backward()
        return (z - 1).square().sum(1)

    run = private(mlp(), table(8), bounds=wc.Bounds(), criterion=nested, sigma=1.0)
    x, y = next(iter(run.loader))
    inner.append((run, x, y))
    with pytest.raises(wc.ContractError, match="already taken"):
        run.criterion(run.model(x), y).backward()
    assert run.engine.steps == 0
    run.train()
    assert run.engine.steps == 1


class Touchy(Net):
    """Its backward pass fails on one batch."""

    fails = False

    def between(self, h: Tensor) -> Tensor:
        if self.fails and h.requires_grad:
            h.register_hook(_fail)
        return h


def _fail(gradient: Tensor) -> None:
    raise ValueError("an activation is too large")


def test_a_draw_in_which_a_pass_failed_is_not_released_without_its_records() -> None:
    run = private(Touchy(), table(8), bounds=wc.Bounds(), max_physical_batch_size=3, sigma=1.0)
    before, refused = run.weights(), 0
    for i, (x, y) in enumerate(run.loader):
        run.model.fails = i == 1  # type: ignore[assignment]
        try:
            run.criterion(run.model(x), y).backward()
            run.optimizer.step()
        except (ValueError, wc.ContractError):
            refused += 1
    assert refused >= 2 and run.engine.steps == 0
    assert all(torch.equal(before[k], v) for k, v in run.weights().items())
    run.model.fails = False  # type: ignore[assignment]
    run.train()
    assert run.engine.steps == 1


class Shy(Net):
    """Mixes records, and takes no batch of seven."""

    def between(self, h: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and h.shape[0] == 7:
            raise RuntimeError("not seven")
        return h - _mean(h)


def test_a_size_the_model_does_not_take_leaves_the_other_sizes_to_test() -> None:
    with pytest.raises(wc.ContractError, match="mixes records"):
        private(Shy(), table(8), bounds=wc.Bounds())


# -- mutants -----------------------------------------------------------------------------------------------------------


def test_padding_that_counts_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Collector, "_masked", lambda self, scale, d: scale)
    with pytest.raises(AssertionError):
        test_masked_rows_contribute_nothing_whatever_reaches_them(None)


def test_a_reservation_after_the_users_code_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    from weightclip.engine._step import Training

    monkeypatch.setattr(Training, "reserve", lambda self, draw, info: None)
    with pytest.raises((AssertionError, pytest.fail.Exception, wc.ContractError)):
        test_a_loss_inside_the_loss_is_refused()


def test_norms_by_the_layers_attributes_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = _conv.shape_of
    monkeypatch.setattr(
        _conv, "shape_of", lambda layer, conf: replace(right(layer, conf), kernel=tuple(layer.kernel_size))
    )
    with pytest.raises((AssertionError, RuntimeError)):
        test_the_patch_norm_is_that_of_the_kernel_in_use()
