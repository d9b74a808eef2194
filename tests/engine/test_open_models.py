"""Models of any kind under caps: no graph is traced, records are tested, and gradients are the clipped ones of each."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.engine_kit import private, table
from tests.holes import moved, usual
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import weightclip as wc

CAP = 0.05
LARGE = 1e3  # where norms of several uses or of embeddings are bounds: nobody is clipped


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.between(torch.relu(self.first(x))))

    def between(self, h: Tensor) -> Tensor:
        return self.inner(h)


class Branches(Base):
    """Python control flow, a loop, operations in place and constants made on the way."""

    def between(self, h: Tensor) -> Tensor:
        for i in range(3):
            h = h + torch.tanh(self.inner(h)) * torch.arange(8.0, device=h.device) / (i + 8)
        h[:, 0] *= 2.0
        h.add_(0.5)
        return h if h.shape[-1] == 8 else h[:, :8]


class Masked(Base):
    """A mask by values, and a data-dependent choice for each record."""

    def between(self, h: Tensor) -> Tensor:
        h = torch.where((h.sum(1, keepdim=True) > 1).expand_as(h), self.inner(h), -h)
        return h.masked_fill(h > 3, 0.0).sort(1).values


class Frozen(Base):
    """A frozen part that no rule knows, with batch normalisation in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Hardswish()).eval().requires_grad_(False)
        self.scale = nn.Parameter(torch.full((8,), 1.5), requires_grad=False)

    def between(self, h: Tensor) -> Tensor:
        return self.inner(self.trunk(h) * self.scale)

    def train(self, mode: bool = True):
        super().train(mode)
        self.trunk.eval()
        return self


LIMITS = {
    "joint": wc.Bounds(max_grad_norm=CAP),
    "layer": wc.Bounds(layer_cap=CAP),
    "radii": wc.Bounds(layer_radius=1.0, cotangent_radius=0.1),
}
MODELS = [Base, Branches, Masked, Frozen]


def oracle(model: nn.Module, x: Tensor, y: Tensor, loss: Callable[[Any, Any], Tensor], cap: float = CAP):
    """Sum of each record's gradient, clipped on its own, and how many were clipped; ``loss`` is of one record."""
    total = {k: torch.zeros_like(p, dtype=torch.float64) for k, p in model.named_parameters() if p.requires_grad}
    clipped = 0
    for i in range(len(x)):
        model.zero_grad()
        loss(model(x[i : i + 1]), y[i : i + 1]).backward()
        found = {k: p.grad.double() for k, p in model.named_parameters() if p.grad is not None and p.requires_grad}
        norm = sum(float(g.square().sum()) for g in found.values()) ** 0.5
        clipped += norm > cap
        for k, g in found.items():
            total[k] += g * min(1.0, cap / max(norm, 1e-12))
    return total, clipped


def close(run: Any, expected: dict[str, Tensor], batch: int = 8) -> None:
    size = max(float(g.abs().max()) for g in expected.values())
    for k, p in run.model.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(p.grad.double() * batch, expected[k], rtol=1e-5, atol=1e-5 * size)


@pytest.mark.parametrize("make", MODELS)
def test_gradients_are_those_of_each_record_clipped(make) -> None:
    x, y = table(8)
    plain, cap = make().train(), LARGE if make is Branches else CAP
    expected, clipped = oracle(copy.deepcopy(plain), x, y, F.cross_entropy, cap)
    assert clipped >= 4 or cap == LARGE
    run = private(plain, (x, y), bounds=wc.Bounds(max_grad_norm=cap)).train()
    close(run, expected)
    assert run.engine.report()["independence"] == "tested"


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("bounds", LIMITS)
def test_one_record_moves_a_release_by_no_more_than_its_limit(make, bounds: str) -> None:
    def trained() -> nn.Module:  # the frozen part out of sight
        model = make().train()
        for name, p in list(model.named_parameters()):
            if not p.requires_grad:
                owner, _, last = name.rpartition(".")
                delattr(model.get_submodule(owner), last)
                model.get_submodule(owner).register_buffer(last, p.detach())
        return model

    assert moved(trained, usual, LIMITS[bounds], size=1e4) <= 1 + 1e-4


def test_batch_normalisation_in_training_is_refused_by_name_also_when_it_comes_later() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 3))
    with pytest.raises(wc.ContractError, match="1 +BatchNorm1d.*mixes records"):
        private(model, table(8), bounds=wc.Bounds())
    model[1].eval()
    run = private(model, table(8), bounds=wc.Bounds(), sigma=1.0).train()
    run.model.train()
    with pytest.raises(wc.ContractError, match=r"BatchNorm1d|writes buffer"):
        run.train()
    assert run.engine.steps == 1


# -- calls -------------------------------------------------------------------------------------------------------------


class Records(Dataset):
    """Mappings, with labels among them."""

    def __init__(self, n: int = 8, length: int = 4) -> None:
        g = torch.Generator().manual_seed(0)
        self.ids = torch.randint(0, 7, (n, length), generator=g)
        self.mask = (torch.rand(n, length, generator=g) > 0.3).long()
        self.mask[:, 0] = 1
        self.labels = torch.randint(0, 3, (n,), generator=g)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[i], "attention_mask": self.mask[i], "labels": self.labels[i]}


@dataclasses.dataclass
class Output:
    logits: Tensor
    hidden: Tensor
    loss: Tensor | None = None


class Text(nn.Module):
    """Keyword inputs, a dataclass for an output, and a loss of its own if it is given labels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.mix, self.head = nn.Embedding(7, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Output:
        h = torch.tanh(self.mix(self.table(input_ids)))
        if attention_mask is not None:
            h = h * attention_mask.unsqueeze(-1)
        logits = self.head(h.sum(1))
        return Output(logits, h, None if labels is None else F.cross_entropy(logits, labels))


def text(criterion: Any = None, data: Dataset | None = None, **settings: Any):
    torch.manual_seed(0)
    model, engine = Text(), wc.PrivacyEngine()
    settings = {"bounds": wc.Bounds(max_grad_norm=LARGE), "noise_multiplier": 0.0, **settings}
    data = data or Records()
    parts = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=DataLoader(data, batch_size=8),
        criterion=criterion or nn.CrossEntropyLoss(), **settings,
    )  # fmt: skip
    return engine, *parts


def text_oracle() -> dict[str, Tensor]:
    data, plain = Records(), Text()
    (8 * plain(data.ids, data.mask, data.labels).loss).backward()
    return {k: p.grad for k, p in plain.named_parameters() if p.grad is not None}


def check_text(model: nn.Module) -> None:
    for k, g in text_oracle().items():
        torch.testing.assert_close(model.get_parameter(k).grad * 8, g, rtol=1e-4, atol=1e-6)  # type: ignore


@pytest.mark.parametrize("labels", [False, True], ids=["without labels", "with labels"])
@pytest.mark.parametrize("whole", [False, True], ids=["logits", "output"])
def test_keyword_inputs_and_dataclass_outputs(labels: bool, whole: bool) -> None:
    _, model, optimizer, loader, loss = text()
    for batch in loader:
        target = batch["labels"]
        inputs = batch if labels else {k: v for k, v in batch.items() if k != "labels"}
        out = model(**inputs)
        assert isinstance(out, Output)
        loss(out if whole else out.logits, target).backward()
        optimizer.step()
    check_text(model)


def test_a_function_of_outputs_and_batch_is_a_criterion() -> None:
    def criterion(out: Output, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(out.logits, batch["labels"], reduction="none")

    _, model, optimizer, loader, loss = text(criterion)
    for batch in loader:
        loss(model(batch["input_ids"], batch["attention_mask"]), batch).backward()
        optimizer.step()
    check_text(model)


def test_the_models_own_loss_is_refused_with_the_fix_and_releases_nothing() -> None:
    engine, model, optimizer, loader, loss = text(noise_multiplier=1.0)
    before = copy.deepcopy(model.state_dict())
    for batch in loader:
        out = model(**batch)
        with pytest.raises(wc.ContractError, match=r"criterion\(out.logits, labels\)"):
            out.loss.backward()
        with pytest.raises(wc.ContractError):
            (loss(model(**batch).logits, batch["labels"]) + out.hidden.sum()).backward()
        with pytest.raises(wc.ContractError, match="step"):
            optimizer.step()
    assert engine.steps == 0 and all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_outputs_that_are_no_records_are_no_argument_of_the_loss() -> None:
    _, model, _, loader, loss = text(lambda z, y: z.reshape(-1)[:1].expand(8))
    for batch in loader:
        with pytest.raises(wc.ContractError, match="records"):
            loss(model(**batch).loss, batch["labels"])


class Heads(Base):
    def forward(self, x: Tensor) -> dict[str, Any]:
        h = torch.relu(self.first(x))
        return {"classes": self.last(h), "pair": (self.inner(h), h.detach().sum())}


def two_losses(out: dict[str, Any], y: Tensor) -> Tensor:
    return F.cross_entropy(out["classes"], y, reduction="none") + 0.1 * out["pair"][0].square().sum(1)


def test_several_heads() -> None:
    x, y = table(8)
    expected, clipped = oracle(Heads(), x, y, lambda out, t: two_losses(out, t).sum())
    assert clipped >= 4
    run = private(Heads(), (x, y), bounds=wc.Bounds(max_grad_norm=CAP), criterion=two_losses).train()
    close(run, expected)


def test_a_tuple_of_heads_of_the_users_own_making() -> None:
    def loss(z: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        return F.cross_entropy(z[0], y, reduction="none") + 0.1 * z[1].square().sum(1)

    x, y = table(8)
    expected, _ = oracle(Heads(), x, y, lambda out, t: two_losses(out, t).sum())
    run = private(Heads(), (x, y), bounds=wc.Bounds(max_grad_norm=CAP), criterion=loss)
    for a, b in run.loader:
        out = run.model(a)
        run.criterion((out["classes"], out["pair"][0]), b).backward()
        run.optimizer.step()
    close(run, expected)


def test_a_loss_of_several_heads_that_mixes_records_is_refused() -> None:
    run = private(Heads(), table(8), bounds=wc.Bounds(), sigma=1.0,
                  criterion=lambda out, y: two_losses(out, y) + out["pair"][0].mean())  # fmt: skip
    with pytest.raises(wc.ContractError, match="mixes records"):
        run.train()


def test_heads_of_two_calls_do_not_mix() -> None:
    run = private(Heads(), table(8), bounds=wc.Bounds(), criterion=two_losses)
    for x, y in run.loader:
        one, two = run.model(x), run.model(x)
        with pytest.raises(wc.ContractError, match="several calls"):
            run.criterion({"classes": one["classes"], "pair": two["pair"]}, y)


# -- what a cap prints -------------------------------------------------------------------------------------------------


def test_the_certificate_prints_the_cap_and_warns_of_nothing() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(64, 3))
    run = private(model, (torch.randn(8, 1, 6, 6), table(8)[1]), bounds=wc.Bounds(max_grad_norm=1.0), sigma=1.0)
    certificate = run.engine.certificate()
    assert certificate.joint_sensitivity == pytest.approx(1.0, rel=1e-3)
    assert "joint sensitivity 1 (a cap)" in str(certificate) and "inf" not in str(certificate)


def test_a_layer_that_is_never_used_is_refused() -> None:
    model = Base()
    model.spare = nn.Linear(2, 2)
    with pytest.raises(wc.WeightclipError, match="'spare' is trainable but the model does not use it"):
        private(model, table(8), bounds=wc.Bounds())
    model.spare.requires_grad_(False)
    private(model, table(8), bounds=wc.Bounds()).train()


def test_targets_of_one_number_are_not_broadcast_against_each_other() -> None:
    x = table(8)[0]
    y = torch.randn(8)
    run = private(nn.Linear(6, 1), (x, y), bounds=wc.Bounds(max_grad_norm=CAP), criterion=nn.MSELoss()).train()
    torch.manual_seed(0)
    plain = copy.deepcopy(run.engine.detach())
    with torch.no_grad():
        for p, q in zip(plain.parameters(), run.model.parameters(), strict=True):
            p.copy_(q + q.grad)  # as it was: one step of rate 1
    expected, _ = oracle(plain, x, y, lambda z, t: F.mse_loss(z.squeeze(1), t))
    close(run, expected)


class Half(Base):
    """Computes in bfloat16 in between."""

    def between(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(h).float()


def test_records_are_tested_in_full_precision_whatever_the_loop_trains_in() -> None:
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
    try:
        with torch.autocast("cpu", torch.bfloat16):
            run = private(Base(), table(64), bounds=wc.Bounds(), sigma=1.0).train()
        assert matmul.fp32_precision == "bf16"
    finally:
        matmul.fp32_precision = before
    assert run.engine.steps == 1
    private(Half(), table(64), bounds=wc.Bounds(), sigma=1.0).train()
