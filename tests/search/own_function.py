"""A training function for the tests of `weightclip tune own_function.py:train`; OWN_LOG says where it tells of runs."""

from __future__ import annotations

import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


def train(run):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 3, generator=generator)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    training, validation = run.split(len(data))
    rate = run.uniform("lr", 0.1, 1.0)
    if log := os.environ.get("OWN_LOG"):
        with open(log, "a") as file:
            file.write(f"{rate!r} {os.getpid()}\n")
        time.sleep(float(os.environ.get("OWN_PAUSE", "0")))
    model = nn.Linear(3, 2)
    model, optimizer, loader, loss = run.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=rate),
        data_loader=DataLoader(Subset(data, training), batch_size=24), criterion=nn.CrossEntropyLoss(),
    )  # fmt: skip
    for _ in range(run.passes):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss(model(inputs), labels).backward()
            optimizer.step()
    print("the score is a secret")
    with torch.no_grad():
        right = model(x[validation]).argmax(1) == data.tensors[1][validation]
    return right.sum()
