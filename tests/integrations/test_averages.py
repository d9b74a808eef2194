"""Averages of weights and schedulers around a private run: they read released weights alone."""

from __future__ import annotations

import torch
from tests.integrations.kit import DELTA, PRIVACY, net, table, weights
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader


def test_an_average_of_the_private_model():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    engine = PRIVACY.engage(epochs=2, module=model, optimizer=optimizer, criterion=nn.CrossEntropyLoss(),
                            data_loader=DataLoader(table(), batch_size=24))  # fmt: skip
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # a copy, which the engine does not follow
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=8)
    want = None
    for _ in range(2):
        for x, y in engine.loader:
            optimizer.zero_grad()
            engine.criterion(model(x), y).backward()
            optimizer.step()
            schedule.step()
            average.update_parameters(model)
            want = weights(model) if want is None else 0.9 * want + 0.1 * weights(model)
    assert engine.steps == 8 and engine.get_epsilon(DELTA) <= 2.0
    torch.testing.assert_close(weights(average.module), want, rtol=1e-5, atol=1e-6)
    torch.optim.swa_utils.update_bn([], average)  # nothing to update, nothing to refuse
    out = average(table().tensors[0])
    assert out.shape == (96, 2) and out.grad_fn is not None  # an ordinary model
