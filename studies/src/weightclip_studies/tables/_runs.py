"""One run of the study: a data set, a method, a configuration and a seed in; scores and costs out.

A run is described by a *key* of plain values, which is what the results store hashes. Runs that differ in configuration
and seed only are trained together.
"""

from __future__ import annotations

import functools
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from weightclip import accounting
from weightclip.errors import WeightclipError
from weightclip.noise import AdamAware, Allocation, Equal, Streams
from weightclip_studies import data as sets
from weightclip_studies.fast_mlp import Budget, Logistic, Run, Settings, Softmax

from ._metrics import metrics
from ._paper import printed
from ._printed_runs import PrintedSettings, printed_logits, train_printed
from ._space import PRINTED_METHODS, Config
from ._stacked import GroupNorm, stacked_logits, train_stacked

VERSION = 1
"""Of the protocol: runs of another version are not reused."""

_ALLOCATIONS: dict[str, Allocation] = {"equal": Equal(), "adam": AdamAware()}
_NO_CLIPPING = 1e12


@dataclass(frozen=True, eq=False)
class Prepared:
    """A data set, encoded and split."""

    name: str
    X: np.ndarray
    y: np.ndarray
    parts: sets.Split
    classes: int
    radius: float  # public: root of the number of columns, the norm of a typical standardised row
    covered: str

    @property
    def delta(self) -> float:
        """δ = 1/n, n counting the whole table as the paper does."""
        return 1 / len(self.y)


@functools.lru_cache(maxsize=16)
def prepare(name: str, encoding: str = "from-data") -> Prepared:
    """Load, split with seed 0 and encode a data set.

    Args:
        name: Data set.
        encoding: "from-data": standardised by the training rows (as in the paper, not covered by ε); "public": public
            ranges (covered).
    """
    table = sets.load(name)
    parts = sets.split(table, seed=0)
    choices = {"from-data": sets.FromData(), "public": sets.PublicRanges()}
    if encoding not in choices:
        raise WeightclipError(f"unknown encoding {encoding!r}: choose one of {', '.join(choices)}")
    encoded = sets.encode(table, fit_on=parts.train, statistics=choices[encoding])
    radius = math.sqrt(len(table.columns))
    return Prepared(name, encoded.X, encoded.y, parts, len(table.classes), radius, encoded.covered)


def run_key(
    dataset: str,
    method: str,
    group_norm: bool,
    config: Config,
    seed: int,
    part: str,
    *,
    encoding: str = "from-data",
    accountant: str = "rdp",
) -> dict[str, Any]:
    """The key of one run. ``part`` is where it is judged: "valid" while choosing, "test" once."""
    if part not in ("valid", "test"):
        raise WeightclipError(f"a run is judged on 'valid' or 'test', not on {part!r}")
    return {
        "version": VERSION, "dataset": dataset, "method": method, "group_norm": group_norm, "config": config,
        "seed": seed, "part": part, "encoding": encoding, "accountant": accountant,
    }  # fmt: skip


def compute_runs(keys: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Train and judge all keys; those that may share a stack do."""
    groups: dict[tuple, list[int]] = defaultdict(list)
    for i, key in enumerate(keys):
        names = ("dataset", "method", "group_norm", "part", "encoding", "accountant")
        groups[tuple(key[name] for name in names)].append(i)
    results: list[dict[str, Any]] = [{} for _ in keys]
    for (dataset, method, group_norm, part, encoding, accountant), members in groups.items():
        prepared = prepare(dataset, encoding)
        by_seeds: dict[str, tuple[Config, dict[int, int]]] = {}
        for i in members:
            config = dict(keys[i]["config"])
            by_seeds.setdefault(repr(sorted(config.items())), (config, {}))[1][keys[i]["seed"]] = i
        # configurations that need the same seeds are trained together
        batches: dict[tuple[int, ...], list[tuple[Config, dict[int, int]]]] = defaultdict(list)
        for config, places in by_seeds.values():
            batches[tuple(sorted(places))].append((config, places))
        for seeds, entries in batches.items():
            configs = [config for config, _ in entries]
            scored = evaluate(prepared, method, group_norm, configs, seeds, part, accountant)
            for (_, places), by_seed in zip(entries, scored, strict=True):
                for seed, value in zip(seeds, by_seed, strict=True):
                    results[places[seed]] = value
    return results


def evaluate(
    prepared: Prepared,
    method: str,
    group_norm: bool,
    configs: Sequence[Config],
    seeds: Sequence[int],
    part: str,
    accountant: str = "rdp",
) -> list[list[dict[str, Any]]]:
    """Scores and costs by configuration, then seed."""
    started = time.perf_counter()
    rows = getattr(prepared.parts, part)
    train = prepared.parts.train
    X, y = prepared.X[train], prepared.y[train]
    target = prepared.X[rows]
    if method == "majority":
        share = np.bincount(y, minlength=prepared.classes) / len(y)
        outputs = [[np.tile(share, (len(rows), 1)) for _ in seeds] for _ in configs]
        costs = [{"epsilon": 0.0} for _ in configs]
    elif method in PRINTED_METHODS:
        outputs, costs = _printed(prepared, method, group_norm, configs, seeds, X, y, target, accountant)
    else:
        outputs, costs = _sound(prepared, method, group_norm, configs, seeds, X, y, target, accountant, part)
    wall = (time.perf_counter() - started) / (len(configs) * len(seeds))
    return [
        [{**metrics(p, prepared.y[rows]), **cost, "wall_s": round(wall, 4)} for p in by_seed]
        for by_seed, cost in zip(outputs, costs, strict=True)
    ]


def settings_of(config: Config, method: str, prepared: Prepared) -> Settings:
    """A configuration as settings of the stacked trainer."""
    n = len(prepared.parts.train)
    loss_bound = 1.0 if prepared.classes == 2 else math.sqrt(2)
    batch = config["batch"] if "batch" in config else max(1, round(n / config["batches"]))
    common: dict[str, Any] = {
        "hidden": (int(config["width"]),), "batch": int(batch), "epochs": config["epochs"], "lr": config["lr"],
        "final_lr": config.get("final_lr", 1.0), "averaging": config.get("averaging", 0.0),
    }  # fmt: skip
    if method == "dp-sgd":
        return Settings(**common, input_radius=None, joint_cap=config["clip"])
    if method == "non-private":
        return Settings(**common, input_radius=None, joint_cap=_NO_CLIPPING)
    radius, beta = config.get("input_radius", 1.0) * prepared.radius, config.get("bias_scale", 1.0)
    cap = config.get("cap", loss_bound)
    common |= {
        "input_radius": radius, "bias_scale": beta, "cap": cap, "temperature": config.get("temperature", 1.0),
        "allocation": _ALLOCATIONS[config.get("allocation", "equal")],
    }  # fmt: skip
    if method in ("lip-weights", "fix-lip"):
        return Settings(**common, weight_norm=config["weight_norm"], fix_lip=method == "fix-lip")
    if method == "lip-factors":
        # the first layer's input is projected and the last one's cotangent capped by the loss: their radii are those
        return Settings(
            **common,
            weight_norm=config.get("weight_norm"),
            layer_radius=(math.hypot(radius, beta), config.get("hidden_radius", 1.0)),
            cotangent_radius=(config.get("cotangent", 1.0) * cap, cap),
        )
    if method == "joint-cap":
        root = math.sqrt(config["ratio"])
        return Settings(**common, joint_cap=(config["clip"] * root, config["clip"] / root))
    raise WeightclipError(f"unknown method {method!r}")


def cost_of(config: Config, prepared: Prepared, method: str, accountant: str, steps: int, q: float) -> dict[str, Any]:
    """σ and the ε of both accountants; ε is the paper's unless the configuration fixes σ."""
    if method == "non-private":
        return {"sigma": 0.0, "epsilon": None, "epsilon_pld": None, "steps": steps, "q": q}
    delta = prepared.delta
    target = printed(prepared.name).epsilon
    sigma = config["sigma"] if "sigma" in config else _calibrated(target, delta, q, steps, accountant)
    spent = [accounting.Mechanism("gaussian", sigma, q, steps)]
    return {
        "sigma": sigma,
        "epsilon": accounting.epsilon(spent, delta, accountant),
        "steps": steps,
        "q": q,
    }


@functools.lru_cache(maxsize=4096)
def _calibrated(epsilon: float, delta: float, q: float, steps: int, accountant: str) -> float:
    return Budget(epsilon, delta, accountant).sigma(q, steps)


def _norm(config: Config, group_norm: bool) -> GroupNorm | None:
    if not group_norm:
        return None
    size = int(config["group_size"])
    # the paper writes alpha in units of 1/|group|
    alpha = config["alpha"] if "alpha" in config else config["relative_alpha"] / size
    return GroupNorm(int(config["width"]) // size, alpha)


def _sound(prepared, method, group_norm, configs, seeds, X, y, target, accountant, part):
    n = len(X)
    settings = [settings_of(config, method, prepared) for config in configs]
    costs = [
        cost_of(config, prepared, method, accountant, s.steps(n), s.sample_rate(n))
        for config, s in zip(configs, settings, strict=True)
    ]
    objective = Logistic() if prepared.classes == 2 else Softmax(prepared.classes)
    noise = [cost["sigma"] for cost in costs]
    norms = [_norm(config, group_norm) for config in configs]
    dtype = torch.float64 if part == "test" else torch.float32  # only what is reported needs the last digits
    runs = train_stacked(X, y, settings, norms, seeds, objective=objective, noise=noise, dtype=dtype)
    outputs = [
        [_probabilities(stacked_logits(run, norm, target)) for run in by_seed]
        for by_seed, norm in zip(runs, norms, strict=True)
    ]
    return outputs, costs


def train_one(prepared: Prepared, method: str, group_norm: bool, config: Config, streams: Streams) -> tuple[Run, int]:
    """One run of a sound method with sums in float64, and how many validation records it gets right (a secret).

    Formal guarantees: the run alone is `Run.mechanism` on the training part; the count is exact, and moves by at most
    one for a validation record.
    """
    train, valid = prepared.parts.train, prepared.parts.valid
    norm = _norm(config, group_norm)
    objective = Logistic() if prepared.classes == 2 else Softmax(prepared.classes)
    settings = settings_of(config, method, prepared)
    run = train_stacked(
        prepared.X[train], prepared.y[train], [settings], [norm], [streams], objective=objective, noise=config["sigma"]
    )[0][0]
    guesses = _probabilities(stacked_logits(run, norm, prepared.X[valid])).argmax(axis=1)
    return run, int((guesses == prepared.y[valid]).sum())


def _probabilities(z: torch.Tensor) -> np.ndarray:
    z = z.double()
    p = torch.sigmoid(z) if z.shape[1] == 1 else torch.softmax(z, 1)
    return (torch.cat([1 - p, p], 1) if z.shape[1] == 1 else p).numpy()


def _printed(prepared, method, group_norm, configs, seeds, X, y, target, accountant):
    n = len(X)
    settings, costs = [], []
    for config in configs:
        batch = config["batch"] if "batch" in config else max(1, round(n / config["batches"]))
        q = min(1.0, batch / n)
        steps = max(1, round(config["epochs"] * max(1, round(1 / q))))
        cost = cost_of(config, prepared, method, accountant, steps, q)
        settings.append(
            PrintedSettings(
                width=int(config["width"]),
                batch=int(batch),
                steps=steps,
                lr=config["lr"],
                weight_norm=config.get("weight_norm", 1.0),
                sigma=cost["sigma"],
                final_lr=config.get("final_lr", 1.0),
                averaging=config.get("averaging", 0.0),
                fixed=method == "fix-lip-published",
                norm=_norm(config, group_norm),
                clip=config["clip"] if method == "dp-sgd-published" else None,
            )  # fmt: skip
        )
        costs.append(cost)
    trained = train_printed(X, y, settings, seeds, prepared.classes)
    outputs = [
        [torch.softmax(printed_logits(params, s.norm, target).double(), 1).numpy() for params in by_seed]
        for by_seed, s in zip(trained, settings, strict=True)
    ]
    return outputs, costs
