"""The driver: chosen on validation, tested once, every method by the same number of trials; it goes on where it was."""

from __future__ import annotations

import csv
import functools
import json
import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from studies.tests.figure.figure_kit import check_choice, fake_images, follow
from typer.testing import CliRunner

import weightclip as wc
from weightclip_studies.cli import _figure
from weightclip_studies.figure import METHODS, Cell, Figure, _audit, _driver, cells, draw, page, table
from weightclip_studies.images import _nets

# torch.func on the falsifier's unfolds
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")
CELL = Cell("mnist", "joint", 3.0)


@pytest.fixture(autouse=True)
def few_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _nets.dead_leaves
    monkeypatch.setattr(_nets, "dead_leaves", lambda n, *a, **k: whole(min(n, 12), *a, **k))


def test_settings_are_chosen_on_validation_and_the_test_part_is_read_once(tmp_path, monkeypatch) -> None:
    check_choice(monkeypatch, tmp_path)


def _tune_on_test(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Figure._one

    def one(self, cell, stage, recipe, seed, fit, judge, **more):
        return real(self, cell, stage, recipe, seed, fit, self._parts(cell.dataset)[1], **more)

    monkeypatch.setattr(Figure, "_one", one)


def _tune_on_what_was_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_driver, "split", lambda part: (part, part))


def _train_on_test_too(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Figure._parts
    monkeypatch.setattr(Figure, "_parts", lambda self, dataset: (real(self, dataset)[1],) * 2)


def _best_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Figure._one

    def one(self, cell, stage, *args, **more):  # every final run is made twice, as if to keep the better one
        return real(self, cell, stage, *args, **more) and (stage == "trial" or real(self, cell, stage, *args, **more))

    monkeypatch.setattr(Figure, "_one", one)


@pytest.mark.parametrize("mutate", [_tune_on_test, _tune_on_what_was_trained, _train_on_test_too, _best_seed])
def test_drivers_that_cheat_are_found(mutate, tmp_path, monkeypatch) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check_choice(monkeypatch, tmp_path)


def test_every_method_gets_the_same_number_of_trials(tmp_path, monkeypatch) -> None:
    figure, trained, _ = follow(monkeypatch, tmp_path, trials=6, seeds=1)
    plan = cells(["mnist"], list(METHODS), [3.0])
    assert figure.run(plan) and len(trained) == 7 * len(plan)
    for cell in plan:
        assert len(figure.tried(cell)) == 6
        recipes = {json.dumps(r["recipe"]) for r in figure.rows if r["cell"] == cell.key and r["stage"] == "trial"}
        assert len(recipes) == 6 or cell.method == "plain"
    again, trained, _ = follow(monkeypatch, tmp_path, trials=6, seeds=1)
    assert again.run(plan) and not trained and len(again.rows) == 7 * len(plan)  # nothing is made twice


def test_a_choice_at_the_edge_is_flagged_and_the_next_search_starts_there(tmp_path, monkeypatch) -> None:
    figure, _, _ = follow(monkeypatch, tmp_path, trials=3, seeds=1)
    first = CELL.start[0]
    scores = {first: 50.0, first + 1: 60.0, first + 2: 70.0}
    monkeypatch.setattr(_driver, "accuracy", lambda model, data: 50.0)
    assert figure.make(CELL)
    assert figure.open_sides(CELL) == ["clip"]  # both neighbours of the learning rate were tried
    for row in figure.rows:
        row["accuracy"] = scores.get(row["place"][0], 0.0)
    assert figure.chosen(CELL) == (first + 1, 0) and figure.open_sides(CELL) == ["learning_rate", "clip"]
    figure.rows[-1]["place"] = [1, 0]
    other = Cell("mnist", "caps", 1.0)
    assert figure._start(Cell("mnist", "joint", 1.0)) == (1, 0) and figure._start(other) == other.start != (0, 0)


def test_a_run_that_spent_too_much_is_no_row(tmp_path, monkeypatch) -> None:
    figure, _, _ = follow(monkeypatch, tmp_path, trials=1, seeds=1)
    real = _driver.train

    def dear(*args, **rest):
        done = real(*args, **rest)
        done.epsilon = 3.1
        return done

    monkeypatch.setattr(_driver, "train", dear)
    with pytest.raises(wc.WeightclipError, match="epsilon 3.1"):
        figure.make(CELL)
    assert not figure.rows


def test_a_failure_stops_its_cell_only_and_is_told(tmp_path, monkeypatch) -> None:
    figure, trained, _ = follow(monkeypatch, tmp_path, trials=1, seeds=1)
    real, told = _driver.train, []
    figure.say = told.append

    def fails(data, recipe, *args, **rest):
        if recipe.method == "caps":
            raise RuntimeError("out of memory")
        return real(data, recipe, *args, **rest)

    monkeypatch.setattr(_driver, "train", fails)
    assert not figure.run(cells(["mnist"], ["joint", "caps", "weights"], [3.0])) and figure.failed == 1
    assert len(figure.rows) == 2 and any("out of memory" in line for line in told)


def test_without_seeds_it_only_searches_and_a_run_may_be_ended_by_the_clock(tmp_path, monkeypatch) -> None:
    figure, _, asked = follow(monkeypatch, tmp_path, trials=2, seeds=0)
    assert figure.run([CELL]) and [r["stage"] for r in figure.rows] == ["trial"] * 2
    assert all(kind == "train" for kind, _ in asked)
    real = _driver.train
    monkeypatch.setattr(_driver, "train", lambda *a, **k: replace(real(*a, **k), releases=1, updates=1))
    figure.seeds = 1
    with pytest.raises(wc.WeightclipError, match="1 releases of 2"):
        figure.make(CELL)
    figure.finish = True
    assert figure.make(CELL) and figure.rows[-1]["releases"] == 1 and figure.rows[-1]["epsilon"] == CELL.epsilon


def test_the_clock_stops_it_and_a_cut_row_is_left_out(tmp_path, monkeypatch) -> None:
    figure, trained, _ = follow(monkeypatch, tmp_path, trials=1, seeds=2, deadline=time.monotonic() - 1)
    assert not figure.run([CELL]) and not trained
    figure.deadline = math.inf
    assert figure.run([CELL]) and len(trained) == 2
    path = tmp_path / _driver.ROWS_FILE
    path.write_text(path.read_text()[:-20])
    again, trained, _ = follow(monkeypatch, tmp_path, trials=1, seeds=2)
    assert len(again.rows) == 1 and again.run([CELL]) and len(trained) == 1
    third, trained, _ = follow(monkeypatch, tmp_path, trials=1, seeds=2)
    assert len(third.rows) == 2 and third.run([CELL]) and not trained  # the new row stands on a line of its own


def test_a_run_of_which_little_was_kept_is_begun_anew(tmp_path, monkeypatch) -> None:
    figure, trained, _ = follow(monkeypatch, tmp_path, trials=1, seeds=1)
    kept, real = [1], _driver.train

    def train(*args, **kwargs):
        done = real(*args, **kwargs)
        args[4].mkdir(parents=True, exist_ok=True)
        return replace(done, updates=kept.pop() if kept else done.releases)

    monkeypatch.setattr(_driver, "train", train)
    assert figure.run([CELL]) and len(trained) == 2 and len(figure.rows) == 1


def test_processes_may_share_a_folder(tmp_path, monkeypatch) -> None:
    one, other = (follow(monkeypatch, tmp_path, trials=1, seeds=1)[0] for _ in range(2))
    assert one.run([CELL]) and other.run([Cell("mnist", "caps", 3.0)])
    all_of_them = follow(monkeypatch, tmp_path)[0].rows
    assert [r["recipe"]["method"] for r in all_of_them] == ["joint", "caps"]


def test_missing_packages_are_told_before_anything_runs(tmp_path, monkeypatch) -> None:
    figure, _, _ = follow(monkeypatch, tmp_path, trials=1)
    monkeypatch.setattr(_driver.importlib.util, "find_spec", lambda name: None if name == "opacus" else 1)
    figure.check([CELL])
    assert (tmp_path / "noise.json").exists()
    with pytest.raises(wc.WeightclipError, match="opacus is not installed"):
        figure.check([Cell("mnist", "opacus", 3.0)])


def test_the_command_from_training_to_page_and_audit(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(_driver, "load_images", fake_images)
    app = typer.Typer()
    _figure.register(app)
    out = tmp_path / "figure"
    options = ["--out", str(out), "--datasets", "mnist", "--methods", "joint,plain", "--epsilons", "3", "--trials", "2",
               "--seeds", "1", "--device", "cpu", "--change", "steps=2", "--change", "batch=100"]  # fmt: skip
    result = CliRunner().invoke(app, [*options, "--json"])
    assert result.exit_code == 0, result.output
    with (out / "figure.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(r["method"], r["epsilon"], r["trials"]) for r in rows] == [("joint", "3", "2"), ("plain", "inf", "2")]
    assert "learning_rate" in rows[0]["at_edge"]
    text = (out / "figure.md").read_text()
    assert "| exact cap over all layers | " in text and "at the edge" in text and "Without privacy" in text
    assert (out / "figure.png").stat().st_size > 5_000
    lines = [json.loads(line) for line in (out / "figure.jsonl").read_text().splitlines()]
    for row in lines:
        assert row["releases"] == 2 and (row["target"] is None or row["epsilon"] <= 3 * (1 + 1e-6))
    assert not list(out.glob("runs/*/step-*")) and list(out.glob("runs/*/ledger"))  # counts stay, checkpoints go
    monkeypatch.setattr(_audit, "audit_recipe", functools.partial(_audit.audit_recipe, restarts=1, steps=2))
    found = _audit.audit(out)
    assert [(r["method"], r["size"]) for r in found] == [("joint", 28)]
    assert "## Audit" in page(out).read_text()
    assert all(0.5 < r["falsifier"] <= 1 + 1e-6 and r["one_step"] <= 1 + 1e-6 for r in found)
    shown = CliRunner().invoke(app, ["--plan", "--datasets", "cifar10", "--methods", "joint", "--epsilons", "8"])
    assert shown.exit_code == 0 and "cifar10 joint 8: 1000 steps of 4096 x 4" in shown.output
    for wrong in (["--change", "colour=red"], ["--epsilons", "x"], ["--methods", "magic"], ["--epsilons", "-1"]):
        assert CliRunner().invoke(app, [*options, *wrong]).exit_code == 2


def test_a_machine_without_matplotlib_trains_and_another_one_draws(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(_driver, "load_images", fake_images)
    app, out, real = typer.Typer(), tmp_path / "figure", _figure.importlib.util.find_spec
    _figure.register(app)
    options = ["--out", str(out), "--datasets", "mnist", "--methods", "plain", "--epsilons", "3", "--trials", "1",
               "--seeds", "1", "--device", "cpu", "--change", "steps=2", "--change", "batch=100"]  # fmt: skip
    with monkeypatch.context() as lacking:
        lacking.setattr(
            _figure.importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else real(name, *a)
        )
        trained = CliRunner().invoke(app, options)
        assert trained.exit_code == 0 and "rows written" in trained.output and "--draw" in trained.output
        assert (out / "figure.jsonl").exists() and not list(out.glob("figure.[cmp]*"))
        again = CliRunner().invoke(app, [*options, "--json"])  # nothing is left to train
        assert json.loads(again.stdout)["files"] == [str(out / "figure.jsonl")]
        refused = CliRunner().invoke(app, ["--out", str(out), "--draw"])
        assert isinstance(refused.exception, wc.WeightclipError) and "matplotlib" in str(refused.exception)
    drawn = CliRunner().invoke(app, ["--out", str(out), "--draw"])
    assert drawn.exit_code == 0 and {p.name for p in out.glob("figure.*")} == {
        "figure.jsonl", "figure.csv", "figure.md", "figure.png"
    }  # fmt: skip


def test_pages_of_many_rows(tmp_path: Path) -> None:
    recipe = Cell("cifar10", "joint", 8.0).base().to_dict()
    row = {"stage": "final", "dataset": "cifar10", "trials": 0, "open_sides": [], "records": 40960, "seconds": 1.0,
           "step_ms": 250.0, "device": "cpu", "recipe": recipe, "target": 8.0, "cell": "a", "changes": {},
           "releases": 1000}  # fmt: skip
    rows = [row | {"seed": s, "accuracy": a} for s, a in enumerate((70.0, 71.0, 75.0))]
    rows += [row | {"cell": "b", "changes": {"views": 1}, "recipe": recipe | {"views": 1}, "seed": 0, "accuracy": 60.0}]
    (tmp_path / _driver.ROWS_FILE).write_text("".join(json.dumps(r) + "\n" for r in rows))
    table(tmp_path), draw(tmp_path), page(tmp_path)
    text = (tmp_path / "figure.md").read_text()
    assert "| exact cap over all layers | 71.00 ± 1.53 |" in text and "(views=1) | 60.00 |" in text
    assert "fewer than three seeds" in text and "nothing was chosen" in text
    assert "| CIFAR-10, WRN-16-4 | exact cap over all layers, ε = 8 | 4096 | 4 | 250 | 2.5 | cpu |" in text
    assert "(views=1), ε = 8 | 4096 | 1 | 250 | 2.5 |" in text
