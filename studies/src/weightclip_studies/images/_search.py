"""Random search: one space per method, the same number of trials for each."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from weightclip_studies.images._settings import HeadSettings

STEPS: dict[float | None, tuple[int, ...]] = {
    1.0: (200, 300, 500),
    2.0: (300, 500, 800),
    3.0: (400, 600, 1000),
    8.0: (600, 1000, 1500),
    None: (500, 1000),  # not private
}
BATCHES = (4096, 8192)


def _common(rng: random.Random, epsilon: float | None, hidden: int) -> dict:
    low, high = (0.006, 0.04) if hidden else (0.02, 0.12)
    return {
        "hidden": hidden,
        "batch": rng.choice(BATCHES),
        "steps": rng.choice(STEPS[epsilon]),
        "learning_rate": _log(rng, low, high),
        "average": rng.choice((0.9, 0.95, 0.98)),
        "bias_scale": rng.choice((0.1, 0.2, 0.3)),
    }


def _log(rng: random.Random, low: float, high: float) -> float:
    return float(f"{math.exp(rng.uniform(math.log(low), math.log(high))):.3g}")


def _factors(rng: random.Random) -> dict:
    cap = _log(rng, 0.1, 0.6)
    return {
        "loss_cap": cap,
        "cotangent_radius": float(f"{cap * _log(rng, 0.25, 1.2):.3g}"),
        "layer_radius": _log(rng, 1.0, 5.0),
        "gain": rng.choice((1.0, 20.0)),
    }


def _caps(rng: random.Random, hidden: int) -> dict:
    caps = (_log(rng, 0.05, 0.5), _log(rng, 0.1, 1.0))
    kind = rng.choice(("joint_cap", "layer_caps"))
    return {"loss_cap": _log(rng, 0.1, 1.0), "gain": rng.choice((1.0, 20.0)), kind: caps if hidden else caps[:1]}


def _flat(rng: random.Random, hidden: int) -> dict:
    clip = _log(rng, 0.05, 1.0)
    return {"joint_cap": (clip,) * (2 if hidden else 1), "gain": rng.choice((1.0, 20.0))}


def _weights(rng: random.Random, hidden: int, sphere: bool) -> dict:
    loss = {"loss_cap": _log(rng, 0.1, 0.6)}
    return loss | ({"weight_norm": _log(rng, 1.0, 12.0), "sphere": sphere} if hidden else {})


_SPACES: dict[str, Callable[[random.Random, int], dict]] = {
    "lip-factors": lambda rng, hidden: _factors(rng),
    "dp-sgd": _flat,
    "caps": _caps,
    "non-private": lambda rng, hidden: {"loss_cap": rng.choice((None, 0.5)), "cotangent_radius": 1.0,
                                        "layer_radius": 100.0},
    "lip-weights": lambda rng, hidden: _weights(rng, hidden, False),
    "fix-lip": lambda rng, hidden: _weights(rng, hidden, True),
}  # fmt: skip
METHODS = tuple(_SPACES)


def proposals(method: str, hidden: int, epsilon: float | None, trials: int, seed: int = 0) -> list[HeadSettings]:
    """``trials`` settings drawn from the method's space; the seed alone decides them."""
    rng = random.Random(f"{method}/{hidden}/{epsilon}/{seed}")
    return [HeadSettings(**{**_common(rng, epsilon, hidden), **_SPACES[method](rng, hidden)}) for _ in range(trials)]
