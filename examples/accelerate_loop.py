"""A loop of Hugging Face Accelerate, private. Lines marked "private" are all that differs from the usual script.

Run it with ``python examples/accelerate_loop.py`` (needs accelerate).
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator  # pyright: ignore[reportMissingImports]
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from weightclip.integrations import Privacy, prepare  # private

epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 20
x, y = (torch.tensor(t) for t in load_digits(return_X_y=True))
x = x.float() / 16

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
loss = nn.CrossEntropyLoss()
parts = {"module": model, "optimizer": optimizer, "data_loader": loader, "criterion": loss}  # private
model, optimizer, loader, loss = prepare(accelerator, Privacy(3.0, 1e-5), epochs=epochs, **parts)  # private

for _ in range(epochs):
    for a, b in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss(model(a), b))
            optimizer.step()
            optimizer.zero_grad()
print("epsilon", round(loader.engine.get_epsilon(1e-5), 3))  # private
