"""Accelerate: the loop of its documentation, private."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.integrations.kit import DELTA, PRIVACY, net, table, weights
from torch import nn
from torch.utils.data import DataLoader

import weightclip as wc

accelerate = pytest.importorskip("accelerate", reason="accelerate is missing: pip install weightclip[test-stock]")


def train(steps: int, size: int, privacy=PRIVACY, **options):
    from weightclip.integrations import prepare

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=steps, **options)
    model = net()
    start = weights(model)
    model, optimizer, loader, loss = prepare(
        accelerator, privacy, epochs=2, module=model, optimizer=torch.optim.SGD(model.parameters(), 0.5),
        data_loader=DataLoader(table(), batch_size=size), criterion=nn.CrossEntropyLoss(),
    )  # fmt: skip
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, 0.5)
    values, moved, last = [], [], start
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                value = loss(model(x), y)
                accelerator.backward(value)
                optimizer.step()
                if accelerator.sync_gradients:
                    scheduler.step()
                optimizer.zero_grad()
            values.append(value.item())
            now = weights(model)
            moved.append(not torch.equal(now, last))
            last = now
    return loader, values, moved, scheduler


def test_the_usual_loop():
    loader, values, moved, scheduler = train(1, 24)
    engine = loader.engine
    assert engine.steps == 8 == len(values) and all(moved)
    assert 1.9 < engine.get_epsilon(DELTA) <= 2.0
    assert all(v != v for v in values)  # withheld
    assert scheduler.last_epoch == 8


def test_accumulated_gradients_are_pieces_of_one_draw():
    loader, values, moved, _ = train(3, 8)
    engine, pieces = loader.engine, loader.engine.loader.pieces
    assert engine.expected_batch_size == 24 and engine.loader.sample_rate == 0.25 and engine.loader.piece_size == 8
    assert pieces > 3 and len(values) == len(loader) * 2 == 8 * pieces
    assert engine.steps == 8
    assert [i for i, m in enumerate(moved) if m] == [pieces * (k + 1) - 1 for k in range(8)]  # one release a draw


def test_losses_are_shown_to_those_who_ask():
    _, values, _, _ = train(1, 24, dataclasses.replace(PRIVACY, show_losses=True))
    assert all(v == v and v > 0 for v in values)


def test_bf16_is_tested_as_it_is_trained():
    loader, _, moved, _ = train(1, 24, mixed_precision="bf16")
    assert loader.engine.steps == 8 and all(moved)


def test_what_would_average_raw_gradients_is_refused(monkeypatch):
    from weightclip.integrations import prepare

    accelerator = accelerate.Accelerator(cpu=True)
    monkeypatch.setattr(type(accelerator), "num_processes", 2)
    model = net()
    with pytest.raises(wc.ContractError, match="launch one process"):
        prepare(accelerator, PRIVACY, epochs=1, module=model, optimizer=torch.optim.SGD(model.parameters(), 0.5),
                data_loader=DataLoader(table(), batch_size=8), criterion=nn.CrossEntropyLoss())  # fmt: skip


def test_a_state_is_loaded_only_where_its_releases_are_counted(tmp_path):
    from weightclip.integrations import prepare

    for privacy, counted in ((PRIVACY, False), (dataclasses.replace(PRIVACY, ledger=tmp_path / "run.ledger"), True)):
        for again in (False, True):
            accelerator, model = accelerate.Accelerator(cpu=True), net()
            model, optimizer, loader, loss = prepare(
                accelerator, privacy, epochs=2, module=model, optimizer=torch.optim.SGD(model.parameters(), 0.5),
                data_loader=DataLoader(table(), batch_size=24), criterion=nn.CrossEntropyLoss(),
            )  # fmt: skip
            if again and not counted:
                with pytest.raises(wc.ContractError, match="how often it was released"):
                    accelerator.load_state(tmp_path / "state")
                break
            if again:
                accelerator.load_state(tmp_path / "state")
            for x, y in loader:
                accelerator.backward(loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            accelerator.save_state(tmp_path / "state")
            accelerator.load_state(tmp_path / "state")  # a state of this very run is counted
            assert loader.engine.steps == (8 if again else 4)
            loader.engine.detach()
