"""The search whose front is kept: chosen on validation, the test part read for the front alone."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from weightclip_studies.cli._reproduce import app
from weightclip_studies.tables import _pareto, _tune
from weightclip_studies.tables._store import Store
from weightclip_studies.tables._tune import Trial, pareto_mask

SMALL = {"trials": 8, "initial": 8, "seeds": 2, "test_seeds": 3}  # all drawn, none proposed: test_tune has the model
PLAN = (("ours", "dp-sgd"), ("paper", "lip-weights"))


def fake(keys):
    """Test accuracy falls where validation accuracy rises: whoever peeks chooses another front."""
    values = []
    for k in keys:
        good = 0.9 - 0.02 * k["config"]["sigma"] - 0.04 * abs(np.log(k["config"]["lr"] / 0.01))
        values.append(
            {"accuracy": good if k["part"] == "valid" else 1 - good, "epsilon": 4 / k["config"]["sigma"] ** 2}
        )
    return values


def searched(tmp_path: Path, patch: pytest.MonkeyPatch) -> tuple[list[_pareto.Point], list[dict]]:
    asked: list[dict] = []

    def counted(keys):
        asked.extend(keys)
        return fake(keys)

    patch.setattr(_tune, "compute_runs", counted)
    patch.setattr(_pareto, "compute_runs", counted)
    patch.setattr(_pareto, "_random_search", lambda *_: 9.0)  # slow, and has a test of its own
    points = _pareto.search_front(Store(tmp_path / "s.sqlite"), "breast_cancer", PLAN, **SMALL)
    return points, asked


def honest(points: list[_pareto.Point], asked: list[dict]) -> bool:
    """Whether fronts are those of validation accuracies, the test part read for them alone and with other seeds."""
    for space, method in PLAN:
        mine = [p for p in points if (p.space, p.method) == (space, method)]
        configs = [json.dumps(p.found.config, sort_keys=True) for p in mine]
        truth = fake([{"config": p.found.config, "part": "valid"} for p in mine])
        mask = pareto_mask([v["accuracy"] for v in truth], [v["epsilon"] for v in truth])
        front = {c for c, on in zip(configs, mask, strict=True) if on}
        read = [k for k in asked if k["part"] == "test" and k["method"] == method]
        if [p.found.pareto for p in mine] != mask or {json.dumps(k["config"], sort_keys=True) for k in read} != front:
            return False
        if any(bool(p.test) != on for p, on in zip(mine, mask, strict=True)) or len(read) != 3 * len(front):
            return False
    seeds = [{k["seed"] for k in asked if k["part"] == part} for part in ("valid", "test")]
    return not seeds[0] & seeds[1]


def test_the_front_is_chosen_on_validation(tmp_path: Path, monkeypatch):
    points, asked = searched(tmp_path, monkeypatch)
    assert honest(points, asked)
    assert 0 < sum(p.found.pareto for p in points) < len(points) == 16
    assert all((p.random_search is None) != p.found.pareto for p in points)


def by_test(real: Callable) -> Callable:
    """A search that marks its front by test accuracy."""

    def cheat(*args, **arguments):
        found = real(*args, **arguments)
        mask = pareto_mask([1 - t.accuracy for t in found], [t.epsilon for t in found])
        return [Trial(t.config, t.accuracy, t.epsilon, on) for t, on in zip(found, mask, strict=True)]

    return cheat


@pytest.mark.parametrize("leak", ["front by test accuracy", "trials judged on the test part", "every trial tested"])
def test_peeking_is_found(leak, tmp_path: Path, monkeypatch):
    if leak == "front by test accuracy":
        monkeypatch.setattr(_pareto, "tune", by_test(_tune.tune))
    elif leak == "trials judged on the test part":
        real = _tune.run_key
        monkeypatch.setattr(_tune, "run_key", lambda *a, **k: real(*a[:-1], "test", **k))
    else:
        monkeypatch.setattr(
            _pareto, "tune", lambda *a, **k: [Trial(t.config, t.accuracy, t.epsilon, True) for t in _tune.tune(*a, **k)]
        )
    assert not honest(*searched(tmp_path, monkeypatch))


def test_a_killed_search_continues(tmp_path: Path, monkeypatch):
    first, asked = searched(tmp_path, monkeypatch)
    again, more = searched(tmp_path, monkeypatch)
    assert asked and not more and again == first


def test_files(tmp_path: Path, monkeypatch):
    points, _ = searched(tmp_path, monkeypatch)
    with _pareto.write_points(points, "breast_cancer", 2, tmp_path / "p.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == _pareto.COLUMNS and len(rows) == 16
    for row in rows:
        assert (row["on_front"] == "1") == bool(row["test_accuracy"]) == bool(row["epsilon_random_search"])
    assert _pareto.plot_front(points, "breast_cancer", tmp_path / "p.png").stat().st_size > 1000
    for row in _pareto.summary(points, "breast_cancer", 2):
        assert row["epsilon"] == "" or float(row["epsilon"]) <= row["paper_epsilon"]
        assert float(row["epsilon_all_released"]) > 0


def test_what_a_paid_search_costs_is_more_than_a_run():
    one = _pareto._random_search(2.0, 0.1, 100, 1e-4, 60)
    alone = _pareto.accounting.epsilon([_pareto.accounting.Mechanism("gaussian", 2.0, 0.1, 100)], 1e-4, "rdp")
    assert one > alone


def test_quick_leaves_the_test_part_alone(tmp_path: Path, monkeypatch):
    parts = set()

    def counted(keys):
        parts.update(k["part"] for k in keys)
        return fake(keys)

    monkeypatch.setattr(_tune, "compute_runs", counted)
    monkeypatch.setattr(_pareto, "compute_runs", counted)
    monkeypatch.setattr(_pareto, "_random_search", lambda *_: 9.0)
    monkeypatch.setattr(_pareto, "released_all", lambda *_: 9.0)
    monkeypatch.setattr(_tune, "_propose", lambda points, done, count, seed: list(points[:count]))
    where = ["--out", str(tmp_path), "--store", str(tmp_path / "s.sqlite")]
    result = CliRunner().invoke(app, ["pareto", "--quick", "--datasets", "breast_cancer", "--json", *where])
    assert result.exit_code == 0, result.output
    assert parts == {"valid"} and len(json.loads(result.output)["summary"]) == 5
    assert {p.name for p in tmp_path.glob("pareto_*")} == {
        "pareto_breast_cancer.csv", "pareto_breast_cancer.png", "pareto_cost.csv"
    }  # fmt: skip


def test_the_committed_fronts_are_those_of_validation():
    folder = Path(__file__).parents[3] / "results" / "tabular"
    for name in ("adult", "nursery"):
        with (folder / f"pareto_{name}.csv").open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        for space, method in _pareto.PLAN:
            mine = [r for r in rows if (r["space"], r["method"]) == (space, method)]
            assert len(mine) == 60
            front = [(float(r["valid_accuracy"]), float(r["epsilon"])) for r in mine if r["on_front"] == "1"]
            for r in mine:  # written with five digits: what is off the front is dominated, what is on it is not
                a, e = float(r["valid_accuracy"]), float(r["epsilon"])
                assert (r["on_front"] == "1") == bool(r["test_accuracy"])
                assert r["on_front"] == "1" or any(x >= a and y <= e for x, y in front)
                assert r["on_front"] == "0" or not any(x > a + 2e-5 and y < e * 0.9999 for x, y in front)
