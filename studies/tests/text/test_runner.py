"""The plan of the text study and what runs it: in order, within a time, and on from where it was."""

from __future__ import annotations

import csv
import itertools
import json
import time

import pytest
import torch

from weightclip import WeightclipError
from weightclip_studies.text import (
    METHODS,
    RECIPES,
    Audit,
    Full,
    Head,
    Last,
    Lora,
    Recipes,
    Rows,
    Runner,
    Settings,
    Study,
    Timing,
    Trial,
    calibrate,
    plan,
    timings,
)
from weightclip_studies.text import _recipes as recipes_module
from weightclip_studies.text import _runner as runner_module
from weightclip_studies.text import _training as training_module
from weightclip_studies.text._study import RATES

STAGES = plan(Lora(), Last(), Full())


def test_the_plan_holds_every_row_once():
    found = [(stage.most, p.name, m, e) for stage in STAGES if isinstance(stage, Rows) for p, m, e in stage.rows]
    rows = [row for most, *row in found if most is None]
    assert len(set(map(tuple, rows))) == len(rows)
    early = [row for most, *row in found if most is not None]  # rows that have few seeds first get all of them later
    assert early and all(found.index((3, *row)) < found.index((None, *row)) for row in early)
    three = {("lora", m, e) for m in METHODS if m != "non-private" for e in (8.0, 3.0, 1.0)}
    others = {(p, m, e) for p in ("last", "full") for m in ("cap", "opacus") for e in (8.0, 3.0, 1.0)}
    others |= {(p, m, 8.0) for p in ("last", "full") for m in ("factors", "quantiles")}
    assert set(map(tuple, rows)) == three | others | {(p, "non-private", None) for p in ("lora", "last", "full")}
    timed = timings(Lora(), Last(), Full())
    assert {s.part.name for s in timed if isinstance(s, Timing)} == {"lora", "last", "full"} and len(timed) == 3
    assert not any(isinstance(s, Timing) for s in STAGES)  # which would wait for each other
    named = [n for s in STAGES if isinstance(s, Recipes) and s.epsilon == 8.0 for n in s.names]
    assert named == list(RECIPES) and any(isinstance(s, Audit) for s in STAGES)
    assert RATES["lora"] == (0.01,)  # chosen before, so that a row needs no run on dev


def run(data, folder, stages, **more) -> tuple[Runner, list[str]]:
    said: list[str] = []
    study = Study(data, folder / "runs", epochs=1, batch=64, length=12, records=128, **more)
    for epsilon, steps in itertools.product((8.0, 3.0), range(1, 9)):  # any noise will do
        for n, b in itertools.product(range(128, 193), (64, 128, 256)):
            study.noise.values[study.noise._key(epsilon, n, b, steps)] = 0.5
    study.noise.values[study.noise._key(8.0, 128, 64, 2) + "/50x1"] = 0.5
    runner = Runner(study, 2, 1, folder / "sst2.csv", said.append)
    runner.run(stages)
    return runner, said


def table(path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_all_kinds_of_stages_run_and_go_on(data, tmp_path, monkeypatch):
    monkeypatch.setattr(training_module, "WARM", 1)
    monkeypatch.setattr(training_module, "TIMED", 1)
    monkeypatch.setattr(recipes_module, "_SEEDS", (1000,))
    monkeypatch.setattr(recipes_module, "_RATES", {"head": (0.3,), "lora": (0.02,)})
    stages = (
        Rows(((Head(), "cap", 3.0), (Head(), "non-private", None))), Recipes(("plain",), 8.0, Lora(2)),
        Audit(Head(), "cap", 3.0, 64), Timing(Head(), ("non-private", "cap")),
    )  # fmt: skip
    _, said = run(data, tmp_path, stages)
    rows = {r["method"]: r for r in table(tmp_path / "sst2.csv")}
    assert float(rows["cap"]["median"]) > 0.4 and rows["non-private"]["epsilon"] == ""
    assert float(rows["cap"]["ratio"]) > 0  # times that were measured later are in the row
    assert table(tmp_path / "recipes.csv")[0]["recipe"] == "plain"
    (audit,) = table(tmp_path / "canaries.csv")
    assert audit["canaries"] == "48" and float(audit["epsilon_lower"]) <= 3.0
    assert (tmp_path / "sst2.png").stat().st_size > 5000 and any("stage 4 of 4: timing" in line for line in said)
    trials, tables = (tmp_path / "runs" / "trials.jsonl").read_text(), sorted(tmp_path.glob("*.csv"))
    before = [path.read_text() for path in tables]
    run(data, tmp_path, stages, until=0.0)  # from the file alone
    assert [path.read_text() for path in tables] == before
    assert (tmp_path / "runs" / "trials.jsonl").read_text() == trials


def test_a_row_that_fails_stops_no_other(data, tmp_path, monkeypatch):
    real = Study.row

    def row(self, part, method, *more):
        if method == "cap":
            raise RuntimeError("out of memory")
        return real(self, part, method, *more)

    monkeypatch.setattr(Study, "row", row)
    stages = (Rows(((Head(), "cap", 3.0),)), Rows(((Head(), "non-private", None),)))
    with pytest.raises(RuntimeError, match="out of memory"):
        run(data, tmp_path, stages)
    assert [r["method"] for r in table(tmp_path / "sst2.csv")] == ["non-private"]


def test_a_row_of_fewer_seeds_leaves_the_earlier_one(data, tmp_path):
    runner, said = run(data, tmp_path, (Rows(((Head(), "cap", 3.0),)),))
    (row,) = table(tmp_path / "sst2.csv")
    runner._table({**row, "seeds": 1, "median": "0"})
    assert table(tmp_path / "sst2.csv") == [row] and said[-1] == "head cap 3: 1 seeds only, left as it was"
    runner._table({**row, "seeds": 2, "device": "another"})  # one row, wherever it was run
    assert table(tmp_path / "sst2.csv") == [{**row, "device": "another"}]


def test_stages_end_with_the_time(data, tmp_path):
    _, said = run(data, tmp_path, (Rows(((Head(), "non-private", None),)),) * 2, until=time.time() - 1)
    assert said == ["no time left: stages 1 to 2 were not begun"] and not (tmp_path / "sst2.csv").exists()


def test_nothing_is_begun_that_will_not_end_in_time(data, tmp_path):
    study = Study(data, tmp_path / "runs", epochs=1, batch=64, until=time.time() + 1000)
    settings = Settings("non-private", 0.1, 1.0, 64, 1)
    entry = study.run(Trial(Head(), settings, None, 0, "dev"))
    assert entry is not None and entry["pace"] >= 0
    slow = json.dumps({**entry, "key": "another", "pace": 500.0})
    with (tmp_path / "runs" / "trials.jsonl").open("a") as file:
        file.write(slow + "\n" + slow[:40])  # and what a killed process left
    assert study.run(Trial(Head(), settings, None, 1, "dev")) is None
    assert study.run(Trial(Head(), settings, None, 0, "dev")) == entry
    study.until = time.time() + 1e6
    assert study.run(Trial(Head(), settings, None, 1, "dev")) is not None
    lines = (tmp_path / "runs" / "trials.jsonl").read_text().splitlines()
    assert len(lines) == 4 and json.loads(lines[-1])["kind"] == entry["kind"]


def test_what_is_missing_is_said_before_anything_runs(data, tmp_path, monkeypatch):
    stages = (Rows(((Head(), "opacus", 3.0),)),)
    monkeypatch.setattr(runner_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(WeightclipError, match="pip install opacus"):
        run(data, tmp_path, stages)
    if not torch.cuda.is_available():
        with pytest.raises(WeightclipError, match="torch finds no GPU"):
            run(data, tmp_path, (), device=torch.device("cuda"))
    (data.folder / "encoder.safetensors").unlink()
    with pytest.raises(WeightclipError, match=r"encoder.safetensors is missing: weightclip-study text --prepare"):
        run(data, tmp_path, ())
    assert not (tmp_path / "runs" / "trials.jsonl").exists()


def test_noise_is_calibrated_for_all_stages(data, tmp_path):
    study = Study(data, tmp_path / "runs")
    asked = []
    study.sigma = lambda settings, epsilon: asked.append((settings.batch, epsilon, settings.recipe.warm)) or 1.0
    counted = []
    study.multiplier = lambda epsilon, n, batch, steps: counted.append((epsilon, n, batch)) or 1.0
    assert all(found == 1.0 for found in calibrate(study, STAGES))
    assert [(e, b) for e, _, b in counted] == [(8.0, 4096)]  # the audit's, of more records than the study's
    assert study.size < counted[0][1] < study.size + 64
    assert {(4096, e, 0.0) for e in (8.0, 3.0, 1.0)} | {(8192, 8.0, 0.0), (16384, 8.0, 0.0), (4096, 8.0, 50.0)} <= set(
        asked
    )
