"""Search of linear heads by climbing ordered lists: every list is long enough that what is chosen lies inside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weightclip.errors import WeightclipError
from weightclip_studies.images._settings import HeadSettings

BATCHES = (2048, 4096, 8192, 16384)
STEPS = (100, 200, 300, 400, 600, 800, 1000, 1500, 2000, 3000)
_CAPS = (0.01, 0.02, 0.035, 0.05, 0.075, 0.11, 0.16, 0.24, 0.36, 0.55, 0.8, 1.2)
LISTS: Mapping[str, Sequence[float]] = {
    "learning_rate": (0.004, 0.006, 0.009, 0.013, 0.02, 0.03, 0.045, 0.065, 0.1, 0.15, 0.22, 0.33, 0.5),
    "cap": _CAPS,
    "steps": STEPS,
    "batch": BATCHES,
    "bias_scale": (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8),
    "average": (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995),
}
"""Fields of a linear head, in the order in which they are climbed."""

_START: Mapping[float | None, Mapping[str, float]] = {
    1.0: {"steps": 300, "learning_rate": 0.065, "cap": 0.11},
    2.0: {"steps": 600, "learning_rate": 0.065, "cap": 0.16},
    3.0: {"steps": 600, "learning_rate": 0.1, "cap": 0.16},
    8.0: {"steps": 1000, "learning_rate": 0.065, "cap": 0.16},
    None: {"steps": 1000, "learning_rate": 0.03, "cap": 0.55},
}
METHODS = ("lip-weights", "dp-sgd", "non-private")


@dataclass(frozen=True)
class Chosen:
    """What a climb ended with.

    Attributes:
        settings: The best head.
        accuracy: Its score.
        edges: Fields whose value is the first or last of its list: the list should be longer.
        scores: Score of every head tried, in order.
    """

    settings: HeadSettings
    accuracy: float
    edges: tuple[str, ...]
    scores: tuple[float, ...]


def head(method: str, point: Mapping[str, float]) -> HeadSettings:
    """The linear head of a point of the lists; ``cap`` is the loss's cap, or DP-SGD's clipping threshold."""
    if method not in METHODS:
        raise WeightclipError(f"linear heads: choose one of {', '.join(METHODS)}, got {method!r}")
    values: dict[str, Any] = {key: value for key, value in point.items() if key != "cap"}
    if method == "dp-sgd":
        return HeadSettings(hidden=0, joint_cap=(point["cap"],), **values)
    return HeadSettings(hidden=0, loss_cap=point["cap"], **values)


def start(epsilon: float | None) -> dict[str, float]:
    """Where a climb begins: near what earlier tables chose, on the lists."""
    levels = [level for level in _START if level is not None]
    near = None if epsilon is None else min(levels, key=lambda level: abs(level - epsilon))
    return {"batch": 4096, "bias_scale": 0.2, "average": 0.95, **_START[near]}


def climb(
    score: Callable[[HeadSettings], float],
    method: str,
    epsilon: float | None,
    trials: int,
    lists: Mapping[str, Sequence[float]] = LISTS,
    begin: Mapping[str, float] | None = None,
) -> Chosen:
    """The best of exactly ``trials`` heads (fewer only if the lists hold no more to try).

    One field at a time is moved along its list while that helps; when no neighbour is better, further ones are tried.
    The path depends on scores alone, so repeating it with remembered scores ends in the same place.
    """
    point = {key: min(range(len(values)), key=lambda i: abs(values[i] - (begin or start(epsilon))[key]))
             for key, values in lists.items()}  # fmt: skip
    seen: dict[tuple[int, ...], float] = {}

    def at(place: Mapping[str, int]) -> float | None:
        """Score of a place; None when it would be one trial too many."""
        key = tuple(place.values())
        if key not in seen:
            if len(seen) >= trials:
                return None
            seen[key] = score(head(method, {name: lists[name][i] for name, i in place.items()}))
        return seen[key]

    best, reach = at(point), 1
    assert best is not None
    while len(seen) < trials and reach < max(map(len, lists.values())):
        moved = False
        for name, values in lists.items():
            for step in (reach, -reach):
                while 0 <= point[name] + step < len(values):
                    value = at({**point, name: point[name] + step})
                    if value is None or value <= best:
                        break
                    point, best, moved = {**point, name: point[name] + step}, value, True
        reach = 1 if moved else reach + 1
    edges = tuple(name for name, i in point.items() if len(lists[name]) > 1 and i in (0, len(lists[name]) - 1))
    settings = head(method, {name: lists[name][i] for name, i in point.items()})
    return Chosen(settings, best, edges, tuple(seen.values()))
