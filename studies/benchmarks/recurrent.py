"""Time of one step of an LSTM: plain, private (joint cap) and Opacus' DPLSTM, on one core. Prints seconds.

python studies/benchmarks/recurrent.py
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from opacus import PrivacyEngine
from opacus.layers import DPLSTM
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weightclip as wc

RECORDS, STEPS, INPUTS, HIDDEN, ROUNDS = 64, 50, 32, 64, 15


class Net(nn.Module):
    """A recurrent layer and a head on its last output."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(HIDDEN, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.layer(x)[0][:, -1])


def loop(model: Any, optimizer: Any, loader: Any, criterion: Any) -> Callable[[], None]:
    """One pass over the loader, which is one step."""

    def step() -> None:
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()

    return step


def main() -> None:
    """Time all of them in turn, so that whatever else the machine does falls on each."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(RECORDS, STEPS, INPUTS), torch.randint(0, 3, (RECORDS,)))

    def parts(layer: nn.Module) -> dict[str, Any]:
        model = Net(layer)
        return {"module": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1),
                "data_loader": DataLoader(data, batch_size=RECORDS), "criterion": nn.CrossEntropyLoss()}  # fmt: skip

    size: dict[str, Any] = {"input_size": INPUTS, "hidden_size": HIDDEN, "batch_first": True}
    steps = {"plain": loop(*parts(nn.LSTM(**size)).values())}
    steps["weightclip"] = loop(
        *wc.PrivacyEngine().make_private(**parts(nn.LSTM(**size)), noise_multiplier=1.0, sample_rate=1.0)
    )
    for mode in ("hooks", "ghost"):
        given = parts(DPLSTM(INPUTS, HIDDEN, batch_first=True))
        found = PrivacyEngine().make_private(
            **given, noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=False, grad_sample_mode=mode
        )
        model, optimizer, *rest = found
        loader, criterion = (rest[-1], rest[0]) if mode == "ghost" else (rest[-1], given["criterion"])
        steps[f"opacus {mode}"] = loop(model, optimizer, loader, criterion)  # pyright: ignore[reportArgumentType]
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS + 2):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    for name, seconds in times.items():
        kept = seconds[2:]
        print(f"{name:12} median {statistics.median(kept):.4f}  best {min(kept):.4f}")


if __name__ == "__main__":
    main()
