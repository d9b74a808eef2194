"""Which files one private step of a two-layer network runs through: ``python tools/trace_step.py``.

A reader who follows a step with a debugger opens these files.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weightclip as wc

SOURCE = str(Path(wc.__file__).parent)


def trace_step(fused: bool = False) -> tuple[Counter[str], int]:
    """Calls in each file of the package during one step, after a few that warm it up; and changes of file."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    data = TensorDataset(torch.randn(32, 6), torch.randint(0, 3, (32,)))
    engine = wc.PrivacyEngine()
    model, optimizer, loader, loss = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(data, batch_size=8), noise_multiplier=1.0,
    )  # fmt: skip
    step = engine.fused_step()
    calls: Counter[str] = Counter()
    order: list[str] = []

    def look(frame: FrameType, event: str, arg: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(SOURCE):
            calls[name[len(SOURCE) + 1 :]] += 1
            order.append(name)

    for i, (x, y) in enumerate(loader):
        sys.settrace(look if i == 3 else None)
        try:
            if fused:
                step(x, y)
            else:
                optimizer.zero_grad()
                loss(model(x), y).backward()
                optimizer.step()
        finally:
            sys.settrace(None)
    return calls, sum(a != b for a, b in zip(order, order[1:], strict=False))


if __name__ == "__main__":
    for fused in (False, True):
        calls, changes = trace_step(fused)
        print(
            f"{'fused step' if fused else 'step'}: {sum(calls.values())} calls, {len(calls)} files, {changes} changes"
        )
        for name, count in calls.most_common():
            print(f"  {count:4d}  {name}")
