"""Seconds of training until a given test accuracy at a given epsilon: weightclip and Opacus, same model and settings.

Every run takes the same number of steps at the same batch, learning rate and clipping threshold, with noise for the
same epsilon; its own accountant chooses that noise. The clock runs over the training loop, sampling included, and
stands still while accuracy is measured. A run that never gets there has no time.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import weightclip as wc
from weightclip_studies import data

COLUMNS = ("device", "dataset", "model", "epsilon", "delta", "target", "library", "seconds", "step_ms", "steps", "best",
           "records")  # fmt: skip


class Records(Dataset[Any]):
    """Tensors on the training device, fetched a batch at a time."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        places = torch.as_tensor(indices, device=self.x.device)
        return self.x[places], self.y[places]


def together(batch: Any) -> Any:
    """Batches come whole; single records are stacked."""
    if isinstance(batch, tuple):
        return batch
    return torch.stack([x for x, _ in batch]), torch.stack([y for _, y in batch])


@dataclass(frozen=True)
class Task:
    """A data set, a model, and what it is trained with."""

    dataset: str
    model: str
    build: Callable[[], nn.Module]
    train: Records
    test: tuple[Tensor, Tensor]
    epsilon: float
    target: float
    batch: int
    epochs: int
    lr: float
    clip: float
    bounds: wc.Bounds  # of weightclip, beside the joint cap, which is what Opacus does
    delta: float = 1e-5

    @property
    def steps(self) -> int:
        """Of every run, whatever a library's loader makes of a pass."""
        return self.epochs * max(1, round(len(self.train) / self.batch))


def adult(device: torch.device, limit: int | None) -> Task:
    """Income, a multi-layer perceptron."""
    table = data.load("adult")
    parts, encoded = data.split(table, seed=0), data.encode(table)
    x, y = torch.tensor(encoded.X, device=device), torch.tensor(encoded.y, device=device).long()
    train, test = torch.as_tensor(parts.train)[:limit], torch.as_tensor(parts.test)
    bounds = wc.Bounds(input_radius=3.0, layer_radius=3.0, cotangent_radius=0.3, bias_scale=0.5)
    return Task("adult", "mlp-16", lambda: wc.models.MLP(x.shape[1], hidden=(16,), out_features=2),
                Records(x[train], y[train]), (x[test], y[test]), 1.0, 0.84, 1024, 10, 0.02, 0.5, bounds)  # fmt: skip


def mnist(device: torch.device, limit: int | None) -> Task:
    """Digits, the small convolutional network of the literature."""
    (x, y), test = (_images("mnist", split, device, limit) for split in ("train", "test"))
    bounds = wc.Bounds(layer_radius=8.0, cotangent_radius=0.3, bias_scale=0.5)
    return Task("mnist", "small-cnn", wc.models.SmallCNN.for_mnist, Records(x, y), test, 3.0, 0.95, 2048, 15, 2e-3, 1.0,
                bounds)  # fmt: skip


def cifar10(device: torch.device, limit: int | None) -> Task:
    """Pictures, a linear layer on scattering coefficients."""
    front = nn.Sequential(
        wc.nn.Scattering2d(2), nn.Flatten(1, 2), wc.nn.SafeGroupNorm(27, 243, affine=False), nn.Flatten()
    ).to(device)  # fmt: skip
    parts = []
    for split in ("train", "test"):
        x, y = _images("cifar10", split, device, limit)
        with torch.no_grad():
            z = torch.cat([front(part) for part in x.split(512)])
        parts.append((z / z.norm(dim=1, keepdim=True), y))
    width = parts[0][0].shape[1]
    bounds = wc.Bounds(input_radius=1.0, layer_radius=1.1, cotangent_radius=0.1, bias_scale=0.3)
    target = 0.55 if limit is None else 0.38
    return Task("cifar10", "scattering-linear", lambda: nn.Linear(width, 10), Records(*parts[0]), parts[1], 3.0, target,
                1024, 20, 0.1, 0.1, bounds)  # fmt: skip


def _images(name: str, split: str, device: torch.device, limit: int | None) -> tuple[Tensor, Tensor]:
    images, labels = data.load_images(name, split)
    x = torch.from_numpy(images[:limit]).to(device).float().div_(255)
    x = x.unsqueeze(1) if x.dim() == 3 else x
    return (x if x.shape[1] <= 3 else x.permute(0, 3, 1, 2)).contiguous(), torch.from_numpy(
        labels[:limit].astype("int64")
    ).to(device)


def start(task: Task, library: str) -> tuple[nn.Module, Any, Callable[[Tensor, Tensor], Any]]:
    """(model, loader, training step) made private by a library."""
    torch.manual_seed(0)
    model = task.build().to(task.train.x.device)
    fused = library.endswith("-fused")
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=task.lr, capturable=fused and task.train.x.is_cuda)
    loader = DataLoader(task.train, batch_size=task.batch, collate_fn=together)
    if library.startswith("weightclip"):
        joint, engine = wc.Bounds(joint_cap=task.clip), wc.PrivacyEngine()
        _, _, private, loss = engine.make_private_with_epsilon(
            module=model, optimizer=optimizer, data_loader=loader, criterion=nn.CrossEntropyLoss(),
            target_epsilon=task.epsilon, target_delta=task.delta, epochs=task.epochs,
            bounds=joint if "joint-cap" in library else task.bounds, allocation=wc.AdamAware(),
            generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
        return model, private, engine.fused_step() if fused else ordinary(model, optimizer, loss)
    from opacus import PrivacyEngine
    from opacus.accountants.utils import get_noise_multiplier

    kind = library.removeprefix("opacus-")
    noise = get_noise_multiplier(  # for as many steps as ours; of its own passes there may be more steps
        target_epsilon=task.epsilon, target_delta=task.delta, sample_rate=1 / len(loader), steps=task.steps,
        accountant="prv",
    )  # fmt: skip
    found: Any = PrivacyEngine(accountant="prv").make_private(
        module=model, optimizer=optimizer, data_loader=loader, criterion=nn.CrossEntropyLoss(),
        noise_multiplier=noise, max_grad_norm=task.clip, grad_sample_mode=kind,
    )  # fmt: skip
    loss = found[2] if len(found) == 4 else nn.CrossEntropyLoss()
    return found[0], found[-1], ordinary(found[0], found[1], loss)


def ordinary(model: nn.Module, optimizer: Any, loss: Any) -> Callable[[Tensor, Tensor], Any]:
    """The loop as everybody writes it."""

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()

    return step


def measure(task: Task, library: str) -> dict[str, Any]:
    """One run: when the target was reached, and how long a step took."""
    device = task.train.x.device
    model, loader, step = start(task, library)
    spent, reached, best, steps = 0.0, math.nan, 0.0, 0
    while steps < task.steps:
        _wait(device)
        began = time.perf_counter()
        for x, y in loader:
            step(x, y)
            steps += 1
            if steps == task.steps:
                break
        _wait(device)
        spent += time.perf_counter() - began
        with torch.no_grad():
            guess = torch.cat([model(part).argmax(1) for part in task.test[0].split(2048)])
        accuracy = (guess == task.test[1]).double().mean().item()
        best = max(best, accuracy)
        if accuracy >= task.target and math.isnan(reached):
            reached = spent
    label = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu x{torch.get_num_threads()}"
    return {"device": label, "dataset": task.dataset, "model": task.model, "epsilon": task.epsilon, "delta": task.delta,
            "target": task.target, "library": library, "seconds": "" if math.isnan(reached) else round(reached, 3),
            "step_ms": round(1e3 * spent / max(1, steps), 3), "steps": steps, "best": round(best, 4),
            "records": len(task.train)}  # fmt: skip


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Measure, print, write."""
    tasks = {"adult": adult, "mnist": mnist, "cifar10": cifar10}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", nargs="+", default=list(tasks), choices=list(tasks))
    parser.add_argument("--libraries", nargs="+",
                        default=["weightclip", "weightclip-joint-cap", "opacus-hooks", "opacus-ghost"],
                        help="weightclip-fused and weightclip-joint-cap-fused take fused steps")  # fmt: skip
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--limit", type=int, default=None, help="records, for a quick look")
    parser.add_argument("--out", type=Path, default=Path("results/bench/time_to_accuracy.csv"))
    options = parser.parse_args()
    rows = []
    for name in options.datasets:
        task = tasks[name](torch.device(options.device), options.limit)
        for library in options.libraries:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                rows.append(measure(task, library))
            print(rows[-1], file=sys.stderr, flush=True)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            with options.out.open("w", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS)
                writer.writeheader()
                writer.writerows(rows)


if __name__ == "__main__":
    main()
