"""What secret randomness and strict numerics cost on one CPU core: microseconds a step, and ratios of whole steps.

    OMP_NUM_THREADS=1 python studies/benchmarks/secret_randomness.py [--seconds 4]

Variants of one step take turns, so that a busy machine slows all of them; the median processor time of
each is shown.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import weightclip as wc
from weightclip.sampling import KeyedRecords, Wanted
from weightclip_studies.bench import endless_steps


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Conv2d(16, 32, 4, 2), nn.ReLU(),
        nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


def step_of(make: Callable[[], nn.Module], shape: tuple[int, ...], batch: int, **settings: Any) -> Callable[[], None]:
    """One step of the ordinary loop, draw after draw."""
    torch.manual_seed(0)
    model, n = make(), 20 * batch
    data = TensorDataset(torch.randn(n, *shape), torch.randint(0, 10, (n,)))
    engine, optimizer = wc.PrivacyEngine(), torch.optim.SGD(model.parameters(), lr=0.01)
    _, _, loader, loss = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=batch), noise_multiplier=1.0,
        criterion=nn.CrossEntropyLoss(), bounds=wc.Bounds(layer_radius=1.0, cotangent_radius=0.5), **settings,
    )  # fmt: skip

    step = endless_steps(engine, model, optimizer, loader, loss)
    step.engine = engine  # type: ignore[attr-defined]
    return step


def medians(variants: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Median microseconds of each, in turns."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for work in variants.values():
        for _ in range(3):
            work()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, work in variants.items():
            start = time.process_time()
            work()
            times[name].append((time.process_time() - start) * 1e6)
    return {name: round(statistics.median(t), 1) for name, t in times.items()}


class Plain(Dataset):
    """Records of no work at all."""

    def __init__(self) -> None:
        self.x = torch.zeros(8)

    def __len__(self) -> int:
        return 256

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.x


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=4.0)
    seconds = parser.parse_args().seconds
    bare = step_of(mlp, (32,), 256)
    for name in ("enter", "leave"):
        setattr(bare.engine.training.randomness, name, lambda: None)  # type: ignore[attr-defined]
    found: dict[str, Any] = {}
    found["mlp 256, us a step"] = medians({
        "generators left alone": bare, "as it is": step_of(mlp, (32,), 256),
        "seeded (digests)": step_of(mlp, (32,), 256, generator=torch.Generator().manual_seed(0)),
        "pieces of 64": step_of(mlp, (32,), 256, max_physical_batch_size=64),
        "strict": step_of(mlp, (32,), 256, strict=True),
        "strict, pieces of 64": step_of(mlp, (32,), 256, strict=True, max_physical_batch_size=64),
    }, seconds)  # fmt: skip
    found["convnet 256, us a step"] = medians({
        "as it is": step_of(convnet, (1, 28, 28), 256), "strict": step_of(convnet, (1, 28, 28), 256, strict=True)
    }, 3 * seconds)  # fmt: skip
    found["convnet 1024, us a step"] = medians({
        "as it is": step_of(convnet, (1, 28, 28), 1024), "strict": step_of(convnet, (1, 28, 28), 1024, strict=True)
    }, 4 * seconds)  # fmt: skip
    data, wanted = Plain(), Wanted(list(range(256)), None, None, bytes(32), 0)
    keyed = KeyedRecords(data)
    found["256 records by __getitem__, us"] = medians({
        "plain": lambda: [data[i] for i in range(256)], "keyed": lambda: keyed.__getitems__(wanted)
    }, 1.0)  # fmt: skip
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
