"""The commands `reproduce` and `tune`, end to end on a small data set."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from weightclip.errors import WeightclipError
from weightclip_studies.cli._reproduce import app
from weightclip_studies.cli._tune import tune
from weightclip_studies.tables._search import QUICK, Chosen
from weightclip_studies.tables._settings import save_chosen

COMMON = {"width": 8, "batches": 4, "epochs": 2, "lr": 0.05, "final_lr": 1.0, "averaging": 0.0}
CONFIGS = {
    "dp-sgd": {**COMMON, "clip": 1.0},
    "lip-factors": {**COMMON, "cap": 0.2, "temperature": 0.5, "input_radius": 1.0, "bias_scale": 0.3,
                    "hidden_radius": 1.0, "cotangent": 0.5, "allocation": "equal"},
    "lip-published": {**COMMON, "weight_norm": 2.0},
    "non-private": COMMON,
}  # fmt: skip


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    path = tmp_path / "chosen.json"
    entries = {name: Chosen(config, 0.9, 0.9, 0.9, 1, 1) for name, config in CONFIGS.items()}
    save_chosen({"breast_cancer": entries}, QUICK, path)
    return path


def test_tables_then_report(tmp_path: Path, settings: Path):
    out, store = tmp_path / "out", tmp_path / "s.sqlite"
    arguments = ["tables", "--out", str(out), "--store", str(store), "--datasets", "breast_cancer", "--seeds", "2",
                 "--settings", str(settings), "--workers", "1", "--json"]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    summary = json.loads(result.output)
    assert summary["data_sets"] == 1
    with (out / "table1.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {r["method"] for r in rows} == {*CONFIGS, "dp-sgd-published", "majority"}  # which has dp-sgd's settings
    before = (out / "table1.csv").read_bytes()
    again = CliRunner().invoke(app, [*arguments, "--again"])
    assert again.exit_code == 0 and (out / "table1.csv").read_bytes() == before
    nothing = CliRunner().invoke(app, [*arguments, "--again", "--out", str(tmp_path / "empty")])
    assert isinstance(nothing.exception, WeightclipError) and "no table1.json" in str(nothing.exception)
    assert (out / "table1_pld.csv").exists() and (out / "table1_public.csv").exists()
    before = (out / "table1.csv").read_bytes()
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert (out / "table1.csv").read_bytes() == before
    wall = json.loads((out / "wall.json").read_text())["tables"]
    assert wall["seconds"] >= 0 and wall["workers"] == 1 and wall["runs_seconds"] > 0
    result = CliRunner().invoke(app, ["report", "--out", str(out)])
    assert result.exit_code == 0 and (out / "report.html").exists()


def test_errors_name_the_option(tmp_path: Path):
    result = CliRunner().invoke(app, ["tables", "--datasets", "iris"])
    assert result.exit_code != 0 and "--datasets" in result.output and "iris" in result.output
    result = CliRunner().invoke(app, ["search", "--methods", "magic"])
    assert result.exit_code != 0 and "--methods" in result.output
    result = CliRunner().invoke(app, ["report", "--out", str(tmp_path / "empty")])
    assert result.exit_code != 0 and "reproduce tables" in str(result.exception)


def test_quick_search_writes_beside(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(
        app, ["search", "--quick", "--datasets", "breast_cancer", "--methods", "dp-sgd", "--workers", "1", "--json"]
    )
    assert result.exit_code == 0, result.output
    assert "breast_cancer" in json.loads(result.output)
    assert (tmp_path / "runs/quick/chosen.json").exists() and not (tmp_path / "src").exists()


def single() -> typer.Typer:
    command = typer.Typer()
    command.command()(tune)
    return command


def test_tune_prints_a_front_and_an_accounted_total(tmp_path: Path):
    where = ["--out", str(tmp_path), "--store", str(tmp_path / "t.sqlite"), "--json"]
    result = CliRunner().invoke(
        single(), ["breast_cancer", "--methods", "dp-sgd", "--trials", "4", "--seeds", "1", *where]
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["fronts"]["dp-sgd"] and (tmp_path / "pareto_breast_cancer_ours.png").exists()
    result = CliRunner().invoke(
        single(), ["breast_cancer", "--methods", "dp-sgd", "--accounted", "--mean-runs", "2", "--seed", "3", *where]
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["dp-sgd"]["epsilon"] <= 1.672
    result = CliRunner().invoke(single(), ["breast_cancer", "--methods", "lip-published", "--accounted", *where])
    assert result.exit_code != 0
