"""Models that act on each row alone need no test of independence; everything else gets it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weightclip as wc
from weightclip.engine import _independence, _install
from weightclip.engine._example import Call
from weightclip.engine._independence import _ROWWISE, acts_on_rows

_PICTURE, _ROW, _LINE, _VOLUME = (2, 6, 6), (8,), (2, 9), (2, 4, 4, 4)
_EXAMPLES: dict[type[nn.Module], tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    nn.Sequential: (lambda: nn.Sequential(nn.Linear(8, 3), nn.Tanh()), _ROW),
    nn.Linear: (lambda: nn.Linear(8, 3), _ROW),
    nn.Conv1d: (lambda: nn.Conv1d(2, 3, 3), _LINE),
    nn.Conv2d: (lambda: nn.Conv2d(2, 3, 3), _PICTURE),
    nn.Conv3d: (lambda: nn.Conv3d(2, 3, 2), _VOLUME),
    nn.MaxPool1d: (lambda: nn.MaxPool1d(2), _LINE),
    nn.MaxPool2d: (lambda: nn.MaxPool2d(2), _PICTURE),
    nn.MaxPool3d: (lambda: nn.MaxPool3d(2), _VOLUME),
    nn.AvgPool1d: (lambda: nn.AvgPool1d(2), _LINE),
    nn.AvgPool2d: (lambda: nn.AvgPool2d(2), _PICTURE),
    nn.AvgPool3d: (lambda: nn.AvgPool3d(2), _VOLUME),
    nn.GroupNorm: (lambda: nn.GroupNorm(2, 2), _PICTURE),
}


@pytest.mark.parametrize("kind", _ROWWISE, ids=lambda kind: kind.__name__)
def test_every_kind_in_the_list_acts_on_rows(kind: type[nn.Module]):
    make, shape = _EXAMPLES.get(kind, (kind, _ROW))
    torch.manual_seed(0)
    layer = make().double()
    assert acts_on_rows(layer)
    x = torch.randn(5, *shape, dtype=torch.float64, requires_grad=True)
    other = x.detach().clone()
    other[2] = 1e3 * torch.randn(shape, dtype=torch.float64)
    y, z, fewer = layer(x), layer(other), layer(x[[0, 1, 3, 4]])
    keep = [0, 1, 3, 4]
    assert torch.allclose(y[keep], z[keep]) and torch.allclose(y[keep], fewer)
    (gradient,) = torch.autograd.grad(y[2].square().sum(), x)
    assert not gradient[keep].any()


class _Mixes(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input - input.mean(0))


def _hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 3))
    model[0].register_forward_hook(lambda module, args, output: output - output.mean(0))
    return model


def _hooked_backward() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    model[2].register_full_backward_hook(lambda module, given, output: (given[0] + given[0].sum(0, keepdim=True),))
    return model


def _replaced() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 3))
    inner = model[0]
    inner.forward = lambda x: nn.Linear.forward(inner, x - x.mean(0))  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize(
    "make",
    [_hooked, _hooked_backward, _replaced, lambda: nn.Sequential(_Mixes(8, 3))],
    ids=["hook", "backward hook", "forward", "subclass"],
)
def test_what_hangs_on_a_layer_is_tested_and_refused(make: Callable[[], nn.Module]):
    model = make()
    assert not acts_on_rows(model)
    data = TensorDataset(torch.randn(32, 8), torch.randint(0, 3, (32,)))
    with pytest.raises(wc.WeightclipError):
        wc.PrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), criterion=nn.CrossEntropyLoss(),
            data_loader=DataLoader(data, batch_size=8), noise_multiplier=1.0,
        )  # fmt: skip


@pytest.mark.parametrize(
    "model",
    [
        nn.BatchNorm1d(8),
        nn.Flatten(0),
        nn.Softmax(0),
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)),
        nn.Dropout(0.5),
    ],
    ids=lambda model: type(model).__name__,
)
def test_other_layers_are_not_taken_on_trust(model: nn.Module):
    assert not acts_on_rows(model)


@pytest.mark.parametrize("when", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_on_every_module_count(when: str):
    model = nn.Linear(8, 3)
    assert acts_on_rows(model) and acts_on_rows(wc.models.MLP(8))
    handle = getattr(nn.modules.module, f"register_module_{when}_hook")(lambda *_: None)
    try:
        assert not acts_on_rows(model)
    finally:
        handle.remove()


def test_trust_without_a_look_is_caught(monkeypatch: pytest.MonkeyPatch):
    """The mutant that takes every model for a chain of such layers lets mixing ones pass."""
    monkeypatch.setattr(_install, "acts_on_rows", lambda model: True)
    for make in (_hooked, _hooked_backward, _replaced):
        with pytest.raises(pytest.fail.Exception):
            test_what_hangs_on_a_layer_is_tested_and_refused(make)


class _SlyRReLU(nn.RReLU):
    """Mixes records, and only in training."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input - input.mean(0) if self.training else input


def _forward_of_its_own() -> nn.Module:
    layer = nn.RReLU()
    layer.forward = lambda input: input - input.mean(0) if layer.training else input  # type: ignore[method-assign]
    return layer


def _rrelu_with_a_hook() -> nn.Module:
    layer = nn.RReLU(0.2, 0.2)
    layer.register_forward_hook(lambda module, args, output: output - output.mean(0) if module.training else output)
    return layer


def _private(between: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(8, 8), between, nn.Linear(8, 3)).train()
    data = TensorDataset(torch.randn(32, 8), torch.randint(0, 3, (32,)))
    wc.PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(data, batch_size=8), noise_multiplier=1.0,
    )  # fmt: skip


@pytest.mark.parametrize("make", [_SlyRReLU, _forward_of_its_own, _rrelu_with_a_hook])
def test_only_the_native_rrelu_stands_still(make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch):
    _private(nn.RReLU())
    with pytest.raises(wc.WeightclipError, match="mixes records"):
        _private(make())
    # the mutant: whatever is called an RReLU stands still, and what it does in training is never seen
    monkeypatch.setattr(_independence, "_is_rrelu", lambda module: isinstance(module, nn.RReLU))
    _private(make())


class _OnlyWhole(nn.Module):
    """Mixes records where the mask hides nothing, and nowhere else."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 6), nn.Linear(6, 3)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        h = self.table(ids)
        h = h - h.mean(0) if bool(mask.all()) else h * mask.unsqueeze(-1)
        return self.head(h.mean(1))


def _with_masks() -> None:
    model = _OnlyWhole()
    ids, mask = torch.randint(0, 5, (32, 16)), torch.ones(32, 16, dtype=torch.long)
    data = [{"ids": i, "mask": m, "labels": torch.tensor(0)} for i, m in zip(ids, mask, strict=True)]
    wc.PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(data, batch_size=8), noise_multiplier=1.0,  # type: ignore[arg-type]
    )  # fmt: skip


def test_masks_that_hide_nothing_are_tested(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(wc.WeightclipError, match="mixes records"):
        _with_masks()
    monkeypatch.setattr(Call, "masks", property(lambda self: []))  # the mutant: random masks only
    _with_masks()


class Cancels(nn.Module):
    """Two large terms cancel but for one part in a million: in single precision rounding is what is left of them."""

    def __init__(self, mixing: float = 0.0) -> None:
        super().__init__()
        self.mixing = mixing
        self.first, self.head = nn.Linear(6, 96), nn.Linear(6, 2)
        self.register_buffer("weight", 30 * torch.randn(96, 80, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        large = (h @ self.weight).sum(1, keepdim=True) - (h * self.weight.sum(1)).sum(1, keepdim=True)
        small = 1e-5 * h.sum(1, keepdim=True)
        return self.head(x) + large + small + self.mixing * 1e-5 * h.sum()


def started(model: nn.Module) -> wc.PrivacyEngine:
    engine, data = wc.PrivacyEngine(), TensorDataset(torch.randn(24, 6), torch.zeros(24).long())
    engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=DataLoader(data, batch_size=8),
        criterion=nn.CrossEntropyLoss(), noise_multiplier=1.0,
    )  # fmt: skip
    return engine


def test_rounding_is_told_from_mixing_in_double_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, in_double = [], _install.in_double
    monkeypatch.setattr(_install, "in_double", lambda model: asked.append(model) or in_double(model))
    torch.manual_seed(0)
    model = Cancels()
    before = [(t.data_ptr(), t.detach().clone()) for t in (*model.parameters(), *model.buffers())]
    engine = started(model)
    assert asked  # in single precision it looked as if it mixed records
    after = [t for t in (*model.parameters(), *model.buffers()) if t.dim()]
    for (place, value), tensor in zip(before, after, strict=True):
        assert tensor.data_ptr() == place and tensor.dtype == torch.float32 and torch.equal(tensor, value)
    for x, y in engine.loader:
        engine.criterion(model(x), y).backward()
        engine.optimizer.step()
    assert engine.steps == 3
    torch.manual_seed(0)
    with pytest.raises(wc.ContractError, match="mixes records"):
        started(Cancels(mixing=0.1))


def test_dropout_that_rarely_matters_is_no_mixing() -> None:
    """Two draws that do the same by chance once hid that the model draws, and a third one then looked like mixing."""

    class Rare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(6, 4), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x)
            return self.head(h * nn.functional.dropout(torch.ones_like(h[:, :1]), 0.1, self.training))

    for seed in range(20):
        torch.manual_seed(seed)
        started(Rare())


class EyeProduct(nn.Module):
    """A product with the identity over records: next to a record whose square overflows, zero is no protection."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).square()
        return self.head(torch.eye(len(h), dtype=h.dtype) @ h)


class RunningSums(nn.Module):
    """Differences of running sums over records: what is large absorbs what comes after it, in single precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sums = self.first(x).clamp(-1e7, 1e7).cumsum(0)
        return self.head(sums - torch.cat([torch.zeros_like(sums[:1]), sums[:-1]]))


@pytest.mark.parametrize("make", [EyeProduct, RunningSums])
def test_mixing_that_double_precision_does_not_show_is_refused(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    with pytest.raises(wc.ContractError, match="changing one record"):
        started(make())
