"""Climbing of ordered lists: exactly so many trials, the top of a hill, edges told."""

from __future__ import annotations

import math

import pytest

from weightclip.errors import WeightclipError
from weightclip_studies.images._climb import LISTS, METHODS, climb, head, start
from weightclip_studies.images._settings import HeadSettings


def hill(**top: float):
    """A score that falls with the distance from ``top``, in the logarithm."""

    def score(settings: HeadSettings) -> float:
        values = settings.to_dict() | {"cap": settings.loss_cap or (settings.joint_cap or (0,))[0]}
        return -sum(math.log(values[name] / value) ** 2 for name, value in top.items())

    return score


@pytest.mark.parametrize("method", METHODS)
def test_the_top_of_a_hill_is_found(method: str) -> None:
    found = climb(hill(learning_rate=0.02, cap=0.36, steps=200, batch=8192), method, 1.0, 40)
    s = found.settings
    assert (s.learning_rate, s.steps, s.batch, s.hidden) == (0.02, 200, 8192, 0) and found.edges == ()
    assert (s.joint_cap, s.loss_cap) == (((0.36,), None) if method == "dp-sgd" else (None, 0.36))
    assert len(found.scores) == 40 and found.accuracy == max(found.scores) == pytest.approx(0)


@pytest.mark.parametrize("trials", [1, 7, 24])
def test_exactly_so_many_heads_are_tried(trials: int) -> None:
    tried = []

    def score(settings: HeadSettings) -> float:
        tried.append(settings)
        return hill(learning_rate=0.2)(settings)

    found = climb(score, "lip-weights", 3.0, trials)
    assert len(tried) == len(set(tried)) == trials and found.settings in tried
    assert found.accuracy == max(hill(learning_rate=0.2)(s) for s in tried)


def test_edges_are_told() -> None:
    assert climb(hill(learning_rate=9.0, batch=1e9), "dp-sgd", 8.0, 60).edges == ("learning_rate", "batch")


def test_all_there_is_may_be_less_than_the_trials() -> None:
    lists = {name: values[2:5] for name, values in LISTS.items() if name in ("cap", "steps")}
    others = {name: (start(1.0)[name],) for name in LISTS if name not in lists}
    found = climb(hill(cap=0.05), "lip-weights", 1.0, 100, {**lists, **others})
    assert found.settings.loss_cap == 0.05 and len(found.scores) <= 9 and "batch" not in found.edges


@pytest.mark.parametrize("epsilon", [1.0, 2.0, 3.0, 8.0, None])
def test_climbs_begin_inside_the_lists(epsilon: float | None) -> None:
    for name, value in start(epsilon).items():
        assert value in LISTS[name][1:-1]
    assert all(list(values) == sorted(set(values)) for values in LISTS.values())


def test_unknown_methods_are_refused() -> None:
    with pytest.raises(WeightclipError, match="magic"):
        head("magic", start(1.0))
