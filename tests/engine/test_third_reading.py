"""What a third, hostile reading found around models that are not traced; each is closed, with mutants.

Every case is ordinary user code, and is judged by what is released alone: without noise and with all records drawn,
one record must not move the released sum by more than its cap, or the code is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine_kit import Run, private, table
from torch import Tensor, nn

import weightclip as wc
from weightclip.engine import _independence
from weightclip.engine._entrance import Entrance, Watch
from weightclip.engine._gate import OutputGate

CAP = 0.1
Step = Callable[[Run, Any], None]


class Net(nn.Module):
    """first -> relu -> something -> last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def between(self, h: Tensor) -> Tensor:
        return torch.relu(self.inner(h))

    def forward(self, x: Tensor) -> Any:
        return self.last(self.between(torch.relu(self.first(x))))


def usual(run: Run, batch: Any) -> None:
    *x, y = batch
    run.criterion(run.model(*x), y).backward()
    run.optimizer.step()


def made(model: nn.Module, data: Any = None, **settings: Any) -> Run:
    settings.setdefault("bounds", wc.Bounds(max_grad_norm=CAP))
    sgd = lambda p: torch.optim.SGD([q for q in p if q.requires_grad], lr=0.0)  # noqa: E731
    return private(model, table(9) if data is None else data, batch=8, sample_rate=1.0, optimizer=sgd, **settings)


def moved(make: Callable[[], nn.Module], step: Step = usual, data: Any = None, **settings: Any) -> float:
    """How far the first record moves the release, in units of the cap (the joint norm over all parameters)."""
    data, worst = table(9) if data is None else data, 0.0
    for size in (30.0, 1e4, 1e30):
        sums = []
        for start in (0, 1):
            kept = tuple(t[start:].clone() for t in data)
            if start == 0 and kept[0].is_floating_point():
                kept[0][0] *= size
            run = made(make(), kept, **settings)
            for batch in run.loader:
                step(run, batch)
            grads = [p.grad for p in run.model.parameters() if p.grad is not None]
            sums.append(torch.cat([8 * g.double().flatten() for g in grads]))
        worst = max(worst, float((sums[0] - sums[1]).norm()) / CAP)
    return worst


# -- records that random records do not look like ----------------------------------------------------------------------


class Logarithms(Net):
    """Takes positive features; of standard normal ones it makes NaN, which hides everything."""

    def forward(self, x: Tensor) -> Tensor:
        h = x.log()
        return super().forward(h - h.mean(0) if self.mixes else h)

    mixes = True


class OwnLogarithms(Logarithms):
    mixes = False


class Never(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clamp(max=-1.0).log())


class Packed(Net):
    """All records in one sequence, kept apart by an attention mask: zero times a huge number is no zero."""

    mask = -1e9

    def forward(self, x: Tensor) -> Tensor:
        n = len(x)
        h = self.first(x.unsqueeze(0))
        apart = torch.full((n, n), self.mask).fill_diagonal_(0.0)
        return self.last((self.inner(h) @ h.mT + apart).softmax(-1) @ h).squeeze(0)


class PackedStrictly(Packed):
    mask = -torch.inf


class Longest(nn.Module):
    """Cut to the longest record of the batch, then averaged."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x))[:, : int(lengths.max())].mean(1))


class Experts(Net):
    """An expert with room for two records."""

    def between(self, h: Tensor) -> Tensor:
        wants = (h[:, 0] > h[:, 1]).long()
        first_two = wants * (wants.cumsum(0) <= 2)
        return h + first_two[:, None] * torch.relu(self.inner(h))


class Backward(Net):
    """Only its backward pass mixes, where all records have the same gradient if the loss is not looked at."""

    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x)
        if z.requires_grad:
            z.register_hook(lambda g: g * (1 + g.amax(0)))
        return z


class Drawing(Net):
    """Draws by itself, and scales by the batch size."""

    def between(self, h: Tensor) -> Tensor:
        return torch.relu(self.inner(F.dropout(h, 0.5, self.training))) * 8 / len(h)


class ByPlace(Drawing):
    def between(self, h: Tensor) -> Tensor:
        h = h + 0.1 * torch.randn_like(h)
        return torch.relu(self.inner(h)) * (1 + torch.arange(len(h))[:, None] % 2)


MIXING = [Logarithms, Packed, PackedStrictly, Experts, Backward, Drawing, ByPlace]


@pytest.mark.parametrize("make", MIXING)
def test_models_that_mix_in_ways_that_random_records_hide_are_refused(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(wc.ContractError, match="mixes records"):
        made(make())


def test_the_longest_record_of_a_batch_is_nobodys_business() -> None:
    x, y = torch.randn(9, 4, 6), table(9)[1]
    lengths = torch.full((9,), 2)
    with pytest.raises(wc.ContractError, match="mixes records"):
        made(Longest(), (x, lengths, y), example=(x, lengths))


def test_a_model_that_makes_nan_of_everything_cannot_be_tested() -> None:
    with pytest.raises(wc.ContractError, match=r"returns NaN or infinity.*clamp"):
        made(Never())


class Noisy(Net):
    def between(self, h: Tensor) -> Tensor:
        return torch.relu(self.inner(F.dropout(h + torch.randn_like(h), 0.5, self.training)))


def test_sound_models_that_take_logarithms_or_draw_are_trained() -> None:
    x, y = table(9)
    assert 0.5 < moved(OwnLogarithms, data=(x.abs() + 0.1, y)) <= 1 + 1e-4
    run = made(Noisy())
    usual(run, next(iter(run.loader)))
    assert run.engine.steps == 1


# -- ways around the forward pass --------------------------------------------------------------------------------------


class Given(Net):
    """Takes features that somebody computed."""

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return self.last(self.between(torch.relu(self.first(x) + h)))


def outside(run: Run, batch: Any) -> None:
    x, y = batch
    h = run.model.first(x)  # type: ignore[operator]
    run.criterion(run.model(x, h - h.mean(0)), y).backward()
    run.optimizer.step()


def test_inputs_that_the_models_own_layers_made_are_refused() -> None:
    example = torch.randn(2, 6), torch.randn(2, 8)
    run = made(Given(), example=example)
    with pytest.raises(wc.ContractError, match=r"computed by its own layers.*detach"):
        outside(run, next(iter(run.loader)))

    def detached(run: Run, batch: Any) -> None:
        x, y = batch
        usual(run, (x, run.model.first(x).detach().requires_grad_() * 1.0, y))  # type: ignore[operator]

    assert moved(Given, detached, example=example) <= 1 + 1e-4


def test_modules_that_come_after_make_private_are_refused() -> None:
    run = made(Net())
    run.model.inner = nn.Sequential(run.model.inner, nn.BatchNorm1d(8, affine=False))  # type: ignore[arg-type]
    with pytest.raises(wc.ContractError, match=r"added, replaced or removed.*then make it private"):
        usual(run, next(iter(run.loader)))
    assert run.engine.steps == 0


def head() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    return model


def test_an_output_of_an_earlier_batch_is_refused() -> None:
    run = made(head())
    (x, y), kept = next(iter(run.loader)), []
    kept.append(run.model(x))
    usual(run, (x, y))
    _, y = next(iter(run.loader))
    with pytest.raises(wc.ContractError, match="before the loader gave this batch"):
        run.criterion(kept[0], y).backward()
    assert run.engine.steps == 1


# -- losses ------------------------------------------------------------------------------------------------------------


def hardest(z: Tensor, y: Tensor) -> Tensor:
    """The six hardest records of the batch."""
    values = F.cross_entropy(z, y, reduction="none")
    return values * (values >= values.topk(min(6, len(values))).values.min())


def test_a_loss_that_mixes_only_batches_of_some_size_is_refused() -> None:
    run = made(Net(), criterion=hardest)
    with pytest.raises(wc.ContractError, match="mixes records"):
        usual(run, next(iter(run.loader)))


# -- ordinary code that failed -----------------------------------------------------------------------------------------


class Temperature(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale.exp()


def test_a_parameter_without_dimensions() -> None:
    assert moved(Temperature) <= 1 + 1e-4
    x, y = table(8)
    plain = Temperature()
    run = made(Temperature(), (x, y), bounds=wc.Bounds(max_grad_norm=1e3))
    usual(run, next(iter(run.loader)))
    F.cross_entropy(plain(x), y).backward()
    for (name, p), q in zip(run.model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)


def test_outputs_in_half_precision_are_copied_for_many_records() -> None:
    run = made(head(), table(600), bounds=wc.Bounds(max_grad_norm=CAP))
    x, y = next(iter(run.loader))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = run.model(x)
    assert z.dtype == torch.bfloat16 and len(z) == 600
    with pytest.raises(wc.ContractError, match="mixes or repeats"):
        run.criterion(z.as_strided((600, 3), (0, 1)).float(), y)
    run.criterion(z.float(), y).backward()
    run.optimizer.step()
    assert run.engine.steps == 1


# -- mutants -----------------------------------------------------------------------------------------------------------

FAILURES = (AssertionError, pytest.fail.Exception)


def refuses(make: Callable[[], nn.Module]) -> None:
    test_models_that_mix_in_ways_that_random_records_hide_are_refused(make)


@pytest.mark.parametrize(
    ("name", "value", "make"),
    [
        ("_DRAWS", (torch.randn,), Never),
        ("_HUGE", 3.0, Packed),
        ("_waves", lambda z: torch.ones_like(z), Backward),
        ("_StillDraws", torch.no_grad, ByPlace),
    ],
    ids=["one kind of records", "no huge record", "one gradient for all", "draws that move"],
)
def test_weaker_tests_of_independence_are_caught(
    name: str, value: Any, make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_independence, name, value)
    with pytest.raises((*FAILURES, wc.ContractError)):
        if make is Never:
            test_sound_models_that_take_logarithms_or_draw_are_trained()
        else:
            refuses(make)


def test_inputs_with_a_graph_move_the_release_if_they_are_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Entrance, "_refuse_graphs", lambda self, inputs: None)
    assert moved(Given, outside, example=(torch.randn(2, 6), torch.randn(2, 8))) > 2


def test_a_batch_norm_that_comes_later_moves_the_release_if_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(run: Run, batch: Any) -> None:
        run.model.inner = nn.Sequential(run.model.inner, nn.BatchNorm1d(8, affine=False))  # type: ignore[arg-type]
        usual(run, batch)

    monkeypatch.setattr(Watch, "check", lambda self: None)
    assert moved(Net, late) > 1.5


def test_outputs_without_a_batch_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = OutputGate.enter

    def enter(self: OutputGate, *args: Any) -> Any:
        found = right(self, *args)
        found[0].passage.batch = self.owner().info  # type: ignore[misc, union-attr]
        return found

    monkeypatch.setattr(OutputGate, "enter", enter)
    with pytest.raises((*FAILURES, RuntimeError)):  # torch itself stops where a layer needs the weights it ran with
        test_an_output_of_an_earlier_batch_is_refused()
