"""Accuracy under the exponential (K-norm) mechanism in l1, l2 and l_inf beside the Gaussian, at equal epsilon."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from weightclip.accounting import Adjacency, calibrate_sigma
from weightclip.certificate import Bounds
from weightclip.engine import PrivacyEngine
from weightclip.losses import CrossEntropy
from weightclip.models import MLP
from weightclip.noise import KNorm, calibrate_epsilon0

from ._files import write_csv
from ._networks import Prepared, prepare

MECHANISMS: dict[str, KNorm | None] = {
    "gaussian": None, "k-norm, l1": KNorm(1), "k-norm, l2": KNorm(2), "k-norm, linf": KNorm(math.inf),
}  # fmt: skip
Parts = dict[str, tuple[Tensor, Tensor]]


def parts_of(data: Prepared) -> Parts:
    """Rows in the unit ball: train, valid, test."""
    x = torch.tensor(data.X, dtype=torch.float32)
    x = x / x.norm(dim=1, keepdim=True).clamp(min=1.0)
    y = torch.tensor(data.y).long()
    return {name: (x[rows], y[rows]) for name, rows in zip(("train", "valid", "test"), data.parts, strict=True)}


def one_run(
    parts: Parts, classes: int, hidden: tuple[int, ...], mechanism: KNorm | None, noise: float, q: float, steps: int,
    lr: float, seed: int,
) -> tuple[MLP, PrivacyEngine]:  # fmt: skip
    """A trained model and its engine; bounds come from weights alone, in the mechanism's own norm.

    Formal guarantees: those of the engine, for ``steps`` draws of rate ``q``.
    """
    x, y = parts["train"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MLP(x.shape[1], hidden, classes)
    engine = PrivacyEngine()
    batch = round(q * len(x))
    _, optimizer, loader, loss = engine.make_private(
        module=model, optimizer=torch.optim.Adam(model.parameters(), lr=lr), criterion=CrossEntropy(),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=batch), sample_rate=q, expected_batch_size=batch,
        noise_multiplier=noise, bounds=Bounds(input_radius=1.0), mechanism=mechanism,
        generator=torch.Generator().manual_seed(1000 + seed),
    )  # fmt: skip
    while engine.steps < steps:
        for a, b in loader:
            optimizer.zero_grad()
            loss(model(a), b).backward()
            optimizer.step()
            if engine.steps == steps:
                break
    engine.detach()
    return model, engine


@torch.no_grad()
def _accuracy(model: MLP, x: Tensor, y: Tensor) -> float:
    return float((model(x).argmax(1) == y).double().mean())


def exponential_study(
    out: Path, *, datasets: tuple[str, ...] = ("breast_cancer", "dropout"), hidden: tuple[int, ...] = (0, 8),
    epsilon: float = 2.0, delta: float = 1e-5, q: float = 0.25, steps: int = 20,
    lrs: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0), seeds: int = 5,
    say: Callable[[str], None] = lambda line: None,
) -> list[Path]:  # fmt: skip
    """results/method/exponential.csv: test accuracy, the learning rate chosen on validation records within each row."""
    pure = 1 / calibrate_epsilon0(epsilon, delta, q, steps, "pld", Adjacency.ADD_OR_REMOVE_ONE)
    sigma = calibrate_sigma(epsilon, delta, q, steps)
    rows: list[dict[str, Any]] = []
    for name in datasets:
        data = prepare(name)
        parts = parts_of(data)
        for units in hidden:
            for label, mechanism in MECHANISMS.items():
                noise, found = sigma if mechanism is None else pure, []
                for lr in lrs:
                    models = [one_run(parts, data.classes, (units,) if units else (), mechanism, noise, q, steps, lr, s)
                              for s in range(seeds)]  # fmt: skip
                    valid = statistics.fmean(_accuracy(m, *parts["valid"]) for m, _ in models)
                    spent = max(e.get_epsilon(delta) for _, e in models[:1])
                    found.append((valid, lr, [m for m, _ in models], spent))
                valid, lr, chosen, spent = max(found, key=lambda f: f[0])
                scores = [_accuracy(m, *parts["test"]) for m in chosen]
                rows.append({
                    "data": name, "hidden": units, "parameters": sum(p.numel() for p in chosen[0].parameters()),
                    "mechanism": label, "epsilon": spent, "delta": delta, "q": q, "steps": steps, "lr": lr,
                    "at_edge": int(lr in (min(lrs), max(lrs))), "seeds": seeds, "valid": valid,
                    "test": statistics.median(scores), "sd": statistics.stdev(scores) if seeds > 1 else 0.0,
                })  # fmt: skip
                say(" ".join(f"{k}={v}" for k, v in rows[-1].items()))
    return [write_csv(out / "exponential.csv", rows)]
