"""Which default needs no thought: accuracy of several bounds at one epsilon, on six tasks, beside Opacus.

Every row trains the same model from the same initial weights with the same optimiser, epochs, batch and noise
multiplier (calibrated once, by PLD); only what limits a record differs. Nothing is tuned for any of them:

* default: ``Bounds()``, the joint cap at 1 over all layers;
* layer caps: a cap of 1 for each layer, following private quantiles of the records' norms (paid from the same budget);
* weights: ``Bounds(weight_norm=1, input_radius=1)``, the certified bounds of the paper, inputs of norm 1;
* Opacus: flat clipping at ``max_grad_norm=1``.

    python studies/benchmarks/defaults.py --out results/method/defaults_tasks.csv
"""

from __future__ import annotations

import argparse
import csv
import gzip
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from rich.progress import Progress
from sklearn.datasets import load_digits
from sklearn.feature_extraction.text import HashingVectorizer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weightclip as wc
from weightclip.accounting import calibrate_sigma

Data = tuple[Tensor, Tensor, Tensor, Tensor]  # training records and labels, test records and labels
EPSILON, DELTA = 3.0, 1e-5

BOUNDS = {
    "default": wc.Bounds(),
    "layer caps": wc.Bounds(layer_cap=1.0, adaptive=wc.Adaptive()),
    "weights": wc.Bounds(weight_norm=1.0, input_radius=1.0),
}


class Tokens(nn.Module):
    """A one-block transformer over the eight rows of a digit."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Linear(8, 32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down, self.head = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(records, 1, 8, 8) pictures to logits."""
        h = self.embed(x.squeeze(1))
        q, k, v = self.qkv(h).chunk(3, -1)
        h = h + self.out(nn.functional.scaled_dot_product_attention(q, k, v))
        return self.head((h + self.down(torch.relu(self.up(h)))).flatten(1))


@dataclass(frozen=True)
class Task:
    """A model and what it is trained with."""

    model: Callable[[], nn.Module]
    data: Callable[[], Data]
    epochs: int
    batch: int
    rate: float


def digits() -> Data:
    """Handwritten digits of scikit-learn, 8 x 8."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    images, labels = torch.tensor(x[order] / 16.0, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(y[order])
    return images[:1437], labels[:1437], images[1437:], labels[1437:]


def adult() -> Data:
    """Census income, features scaled by public ranges."""
    from weightclip_studies import data

    table = data.load("adult")
    encoded, parts = data.encode(table), data.split(table, seed=0)
    x, y = torch.tensor(encoded.X), torch.tensor(encoded.y).long()
    return x[parts.train], y[parts.train], x[parts.test], y[parts.test]


def text_folder() -> Path:
    """Where the sentences of SST-2 lie."""
    return Path(os.environ.get("WEIGHTCLIP_DATA", "../shared/data")) / "text" / "sst2"


def sentences() -> Data:
    """SST-2 as hashed words, unit norm: text features that look at no data."""
    hashed, found = HashingVectorizer(n_features=2048, ngram_range=(1, 2), alternate_sign=False), []
    for name in ("train", "test"):
        with gzip.open(text_folder() / f"{name}.tsv.gz", "rt") as file:
            rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
        found += [torch.tensor(cast(Any, hashed.transform([r["sentence"] for r in rows])).toarray()).float()]
        found += [torch.tensor([int(r["label"]) for r in rows])]
    return found[0], found[1], found[2], found[3]


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


TASKS = {
    "digits CNN": Task(_cnn, digits, 30, 128, 2e-3),
    "digits MLP": Task(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), digits, 30, 128, 2e-3
    ),
    "digits transformer": Task(Tokens, digits, 30, 128, 2e-3),
    "digits linear head": Task(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), digits, 30, 128, 1e-2),
    "Adult MLP": Task(
        lambda: nn.Sequential(nn.Linear(105, 16), nn.ReLU(), nn.Linear(16, 2)), adult, 5, 512, 5e-3
    ),
    "text features": Task(lambda: nn.Linear(2048, 2), sentences, 3, 512, 1e-1),
}  # fmt: skip


def train(task: Task, data: Data, method: str, seed: int) -> tuple[float, float]:
    """(accuracy on the test set, seconds of training)."""
    x, y, test_x, test_y = data
    torch.manual_seed(seed)
    model = task.model()
    optimizer = torch.optim.Adam(model.parameters(), lr=task.rate)
    loader = DataLoader(TensorDataset(x, y), batch_size=task.batch)
    q = task.batch / len(x)
    steps = max(1, round(task.epochs * round(1 / q)))
    sigma = calibrate_sigma(EPSILON, DELTA, q, steps)
    criterion = nn.CrossEntropyLoss()
    if method == "Opacus":
        from opacus import PrivacyEngine

        opacus: Any = PrivacyEngine()  # what it returns depends on its arguments
        model, optimizer, loader = opacus.make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=sigma, max_grad_norm=1.0
        )[:3]
    else:
        model, optimizer, loader, criterion = wc.PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=loader, criterion=criterion, noise_multiplier=sigma,
            bounds=BOUNDS[method],
        )  # fmt: skip
    began = time.process_time()
    for _ in range(task.epochs):
        for a, b in loader:
            if len(a):
                optimizer.zero_grad()
                criterion(model(a), b).backward()
                optimizer.step()
    seconds = time.process_time() - began
    model.eval()
    with torch.no_grad():
        return float((model(test_x).argmax(1) == test_y).double().mean()), seconds


def main() -> None:
    """Train everything, write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--methods", nargs="+", default=[*BOUNDS, "Opacus"], choices=[*BOUNDS, "Opacus"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("results/method/defaults_tasks.csv"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = []
    with Progress() as progress:
        bar = progress.add_task("training", total=len(options.tasks) * len(options.methods))
        for name in options.tasks:
            task = TASKS[name]
            data = task.data()
            for method in options.methods:
                try:
                    found = [train(task, data, method, seed) for seed in range(options.seeds)]
                except (
                    wc.CertificationError
                ) as error:  # attention has no finite gain: weights alone bound nothing there
                    progress.console.print(f"{name:20} {method:12} refused: {error}")
                    found = [(float("nan"), float("nan"))] * options.seeds
                accuracy, seconds = (np.array(column) for column in zip(*found, strict=True))
                rows.append({
                    "task": name, "method": method, "epsilon": EPSILON, "delta": DELTA, "seeds": options.seeds,
                    "accuracy": round(float(accuracy.mean()), 4), "spread": round(float(accuracy.std()), 4),
                    "cpu_seconds": round(float(np.median(seconds)), 2),
                })  # fmt: skip
                progress.console.print(f"{name:20} {method:12} {accuracy.mean():.3f} +- {accuracy.std():.3f}  "
                                       f"{np.median(seconds):.1f} s")  # fmt: skip
                progress.advance(bar)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
