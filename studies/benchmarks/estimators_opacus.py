"""DP-SGD by Opacus on the estimators' own features, with averaging and decay: a column of ``estimators.py``.

What differs from the default estimator is what is left: Opacus' flat clipping of an ordinary cross-entropy.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from opacus.grad_sample import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import nn

from weightclip.models import MLP
from weightclip.nn import ParameterAverage
from weightclip.noise import Streams
from weightclip.tabular import FitPlan, PrivateScaling, Table, _fit, _training
from weightclip.tabular import defaults as _defaults

GRID = tuple(itertools.product((0.1, 0.3, 1.0), (0.02, 0.06, 0.2)))  # clipping norms, learning rates
KEPT, AGAIN = 3, (1, 2)  # the best of the grid are tried again with these seeds
Split = Callable[[int], tuple[np.ndarray, np.ndarray, np.ndarray]]


def train(
    X: np.ndarray, y: np.ndarray, classes: int, how: _training.Settings, clip: float, sigma: float, seed: int
) -> nn.Module:
    """Poisson draws, Opacus' clipping and noise, Adam with a falling rate, an exponential average of the weights."""
    torch.manual_seed(seed)
    n, outputs = len(X), classes if classes > 2 else 1
    q, steps = how.sample_rate(n), how.steps(n)
    model = MLP(X.shape[1], how.hidden, outputs).float()
    module = GradSampleModule(model)
    optimizer = DPOptimizer(torch.optim.Adam(module.parameters(), lr=how.lr), noise_multiplier=sigma,
                            max_grad_norm=clip, expected_batch_size=how.batch)  # fmt: skip
    loss = nn.CrossEntropyLoss() if classes > 2 else nn.BCEWithLogitsLoss()
    features, average = torch.from_numpy(X), ParameterAverage(model, how.averaging)
    labels = torch.from_numpy(y) if classes > 2 else torch.from_numpy(y.astype(np.float32))[:, None]
    for t in range(steps):
        optimizer.original_optimizer.param_groups[0]["lr"] = how.lr * (1 - (1 - how.final_lr) * t / steps)
        drawn = torch.rand(n) < q
        optimizer.zero_grad(set_to_none=True)
        loss(module(features[drawn]), labels[drawn]).backward()
        optimizer.step()
        average.update()
    with average.apply(), torch.no_grad():
        kept = MLP(X.shape[1], how.hidden, outputs).float()
        kept.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    return kept


def probabilities(model: nn.Module, X: np.ndarray) -> np.ndarray:
    """Of each class.  # records x classes"""
    with torch.no_grad():
        z = model(torch.from_numpy(X)).double()
    z = torch.cat([torch.zeros_like(z), z], dim=1) if z.shape[1] == 1 else z
    return torch.softmax(z, dim=1).numpy()


def opacus(
    table: Table, y: np.ndarray, split: Split, epsilon: float, delta: float, seeds: int
) -> list[tuple[np.ndarray, float]]:
    """Probabilities for the test records of every split, and seconds: clipping norm and rate by validation records.

    The first split's training and validation records choose; epsilon does not cover that. The noise multiplier is
    the one that keeps (epsilon, delta) together with the statistics behind the features, by our accountant.
    """
    classes, n = int(y.max()) + 1, len(split(0)[0])

    def run(which: int, seed: int, clip: float, lr: float) -> tuple[nn.Module, np.ndarray]:
        rows = split(which)[0]
        records = Table(table.columns, table.values[rows])
        plan = FitPlan(epsilon, delta, PrivateScaling(), streams=Streams.seeded(seed))
        fitted = _fit._center(_fit._preprocess(records, plan, n), records, plan, n)
        outputs = classes if classes > 2 else 1
        how = replace(_defaults.settings(n, epsilon, fitted.encoder.width, outputs, {}), lr=lr)
        budget = _training.Budget(epsilon, delta, extra=fitted.mechanisms)
        features = fitted.encoder.transform(table.values)
        sigma = budget.sigma(how.sample_rate(n), how.steps(n))
        return train(features[rows], y[rows], classes, how, clip, sigma, seed), features

    def validated(seed: int, setting: tuple[float, float]) -> float:
        model, features = run(0, seed, *setting)
        valid = split(0)[1]
        return float((probabilities(model, features[valid]).argmax(1) == y[valid]).mean())

    first = {setting: validated(0, setting) for setting in GRID}
    finalists = sorted(GRID, key=lambda s: -first[s])[:KEPT]
    best = max(finalists, key=lambda s: np.mean([first[s], *(validated(seed, s) for seed in AGAIN)]))
    print(f"  clipping norm {best[0]}, learning rate {best[1]}", file=sys.stderr, flush=True)
    results = []
    for seed in range(seeds):
        start = time.perf_counter()
        model, features = run(seed, seed, *best)
        seconds = time.perf_counter() - start
        results.append((probabilities(model, features[split(seed)[2]]), seconds))
    return results
