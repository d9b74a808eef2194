"""The plan: which cells, in which order, and how a search moves."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from weightclip_studies.figure import ABLATIONS, EPSILONS, METHODS, Cell, Recipe, ablations, cells, settle, steps_within
from weightclip_studies.figure._plan import next_place, open_sides
from weightclip_studies.figure._recipe import build

BENCH = Path(__file__).parents[3] / "results" / "bench" / "step.csv"


def test_every_cell_has_a_recipe_of_the_papers_network() -> None:
    plan = cells(list(EPSILONS), list(METHODS)) + ablations(list(EPSILONS), list(METHODS))
    assert len({c.key for c in plan}) == len(plan)
    sizes = {"convnet": 1_625_866, "wrn-16-4": 2_747_530}
    for cell in plan:
        for place in ((0, 0), (1, 0), (-2, 1), (0, -1)):
            recipe = cell.recipe(place)
            assert recipe.method == cell.method and recipe.network == cell.network
            assert {k: getattr(recipe, k) for k, _ in cell.changes} == dict(cell.changes)
    for dataset, size in (("mnist", 28), ("cifar10", 32)):
        recipe = Cell(dataset, "joint", 8.0).base()
        model = build(recipe, 1 if dataset == "mnist" else 3, size, 0)
        assert sum(p.numel() for p in model.parameters()) == sizes[recipe.network]


def test_the_figure_has_every_method_on_every_set_and_the_first_epsilon_first() -> None:
    plan = cells(["mnist", "cifar10"], list(METHODS))
    assert {(c.dataset, c.method) for c in plan} == {(d, m) for d in ("mnist", "cifar10") for m in METHODS}
    assert [c.epsilon for c in plan if c.dataset == "mnist" and c.method == "joint"] == list(EPSILONS["mnist"])
    assert [c.epsilon for c in plan if c.method == "plain"] == [None, None]
    first = [c for c in plan if c.epsilon in (EPSILONS[c.dataset][0], None)]
    assert plan[: len(first)] == first and plan[0].method == "joint"
    changed = {frozenset(dict(c.changes)) for c in ablations(["mnist", "cifar10"], ["joint"])}
    assert changed >= {frozenset({k}) for k in ("views", "average", "standardise", "group_norm")}
    assert {dict(c)["views"] for c in ABLATIONS["convnet"] if "views" in dict(c)} == {1, 4, 16}


def test_the_recipe_of_the_wide_network_is_that_of_the_literature() -> None:
    recipe = Cell("cifar10", "joint", 8.0).base()
    assert (recipe.batch, recipe.clip, recipe.learning_rate, recipe.adam, recipe.decay) == (
        4096,
        1.0,
        4.0,
        False,
        False,
    )
    assert recipe.group_norm and recipe.standardise and recipe.average and recipe.views > 1
    assert Cell("cifar10", "opacus", 8.0).base().views == 1 and Cell("cifar10", "weights", 8.0).base().adam
    assert Cell("cifar10", "opacus", 8.0, (("views", 16),)).base().views == 1


def test_a_search_moves_to_the_best_and_says_what_it_did_not_see() -> None:
    cell = Cell("mnist", "joint", 3.0)
    tried: dict[tuple[int, int], float] = {}
    while (place := next_place(cell, tried, 12, (0, 0))) is not None:
        tried[place] = -((place[0] - 2) ** 2) - (place[1] + 1) ** 2  # best at (2, -1)
    best = max(tried, key=tried.__getitem__)
    assert len(tried) == 12 and best == (2, -1) and open_sides(cell, tried, best) == []
    assert open_sides(cell, {(0, 0): 1.0, (1, 0): 0.5}, (0, 0)) == ["learning_rate", "clip"]
    assert open_sides(Cell("mnist", "plain", None), {(0, 0): 1.0, (1, 0): 0.5, (-1, 0): 0.1}, (0, 0)) == []
    assert next_place(cell, {}, 5, (3, 1)) == (3, 1) and next_place(cell, {(3, 1): 0.1}, 1) is None
    adaptive = Cell("mnist", "opacus-adaptive", 3.0)
    assert [round(adaptive.recipe((0, j)).quantile, 3) for j in (-1, 0, 1)] == [0.333, 0.5, 0.667]
    assert cell.recipe((1, -1)).learning_rate == 4e-3 and cell.recipe((1, -1)).clip == 0.5


def test_searches_start_where_trials_on_validation_ended() -> None:
    """Within a factor of two of the learning rate that every finished search of the committed rows chose."""
    rates = {"joint": 8e-3, "opacus": 8e-3, "caps": 8e-3, "factors": 8e-3, "opacus-adaptive": 8e-3, "weights": 4e-3,
             "fix": 2e-3, "plain": 2e-3}  # fmt: skip
    starts = {m: Cell("mnist", m, 3.0) for m in METHODS}
    assert {m: c.recipe(c.start).learning_rate for m, c in starts.items()} == rates
    assert Cell("cifar10", "joint", 8.0).start == (0, 0)  # as published
    lines = (BENCH.parents[1] / "figure" / "figure.jsonl").read_text().splitlines()
    finals = [r for r in map(json.loads, lines) if r["stage"] == "final" and r["dataset"] != "cifar10"]
    assert {r["recipe"]["method"] for r in finals} >= {"joint", "opacus", "factors", "weights", "plain"}
    for row in finals:
        assert 0.5 <= row["recipe"]["learning_rate"] / rates[row["recipe"]["method"]] <= 2
        cell = Cell(row["dataset"], row["recipe"]["method"], row["target"])
        place = (row["place"][0], row["place"][1])
        assert cell.recipe(place).learning_rate == row["recipe"]["learning_rate"]  # places mean what they meant


def test_numbers_of_the_page_about_images_are_the_committed_ones() -> None:
    text = (BENCH.parents[2] / "docs" / "images.md").read_text()
    with (BENCH.parents[1] / "figure" / "figure.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= 21 and all(f"{r['median']} ± {float(r['sem']):.2f}" in text for r in rows)
    audits = json.loads((BENCH.parents[1] / "figure" / "audit.json").read_text())
    assert {r["method"] for r in audits} >= {"joint", "factors", "weights", "fix"}
    assert all(max(r["falsifier"], r["one_step"]) <= 1 + 1e-6 for r in audits)


def test_steps_are_estimated_from_the_committed_times() -> None:
    with BENCH.open(newline="") as file:
        row = next(r for r in csv.DictReader(file)
                   if (r["model"], r["mode"], r["precision"]) == ("wrn-16-4", "exact-joint-cap", "bf16"))  # fmt: skip
    each = float(row["ms"]) / 1e3 * 16  # 4,096 records of 4 views, in thousands
    assert steps_within(Cell("cifar10", "joint", 8.0).base(), 480, BENCH) == pytest.approx(480 / each, abs=1)
    slower = steps_within(Cell("cifar10", "joint", 8.0, (("views", 16),)).base(), 480, BENCH)
    assert slower == pytest.approx(480 / each / 4, abs=1)
    assert steps_within(Recipe("wrn-40-4", "joint"), 480, BENCH) is None


def test_a_run_is_settled_by_its_trials_pace_and_validation() -> None:
    def trial(rate: float, accuracy: float, step_ms: float, stage: str = "trial") -> dict[str, object]:
        recipe = Cell("cifar10", "joint", 8.0).base().to_dict() | {"views": 2, "learning_rate": rate}
        return {"stage": stage, "accuracy": accuracy, "step_ms": step_ms, "recipe": recipe}

    rows = [trial(4.0, 30.0, 210.0), trial(8.0, 35.0, 200.0), trial(16.0, 90.0, 1.0, "final")]
    assert settle(rows, 300.0) == {"steps": 750, "views": 4, "learning_rate": 8.0}
    assert settle(rows, 150.0) == {"steps": 750, "views": 2, "learning_rate": 8.0}
    assert settle(rows, 50.0) == {"steps": 500, "views": 1, "learning_rate": 8.0}
    assert settle(rows, 1e4)["steps"] == 2400 and settle(rows, 1.0)["steps"] == 100
    assert settle([], 300.0) == {"steps": 500, "views": 2}
