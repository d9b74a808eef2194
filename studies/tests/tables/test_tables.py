"""Tables from made-up runs: columns, marks, verdicts; and the page made from them."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from weightclip_studies.tables import _tables
from weightclip_studies.tables._output import _short, markdown, read_json, write_all, write_json
from weightclip_studies.tables._report import write_report
from weightclip_studies.tables._runs import prepare
from weightclip_studies.tables._search import Chosen
from weightclip_studies.tables._settings import settings_for
from weightclip_studies.tables._store import Store
from weightclip_studies.tables._tables import COLUMNS, judged_again, table_rows, verdicts

LEVELS = {"dp-sgd": 0.80, "dp-sgd-published": 0.81, "lip-published": 0.82,
          "fix-lip-published": 0.7, "lip-weights": 0.78, "lip-factors": 0.85,
          "joint-cap": 0.849, "fix-lip": 0.75, "non-private": 0.9, "majority": 0.6}  # fmt: skip
PAIRS = [(m, False) for m in LEVELS if m != "majority"] + [("dp-sgd", True), ("lip-factors", True)]


def fake(keys):
    values = []
    for k in keys:
        assert k["part"] == "test"
        accuracy = LEVELS[k["method"]] - 0.02 * k["group_norm"] + 0.001 * ((k["seed"] * 7) % 10)
        private = k["method"] not in ("majority", "non-private")
        values.append(
            {"accuracy": accuracy, "auc": accuracy, "log_loss": 0.4, "ece": 0.03, "wall_s": 0.5}
            | ({"epsilon": 1.3, "sigma": 2.0, "steps": 80, "q": 0.1} if private else {"epsilon": None})
        )
    return values


def chosen() -> dict[str, dict[str, Chosen]]:
    def entry(score: float) -> Chosen:
        return Chosen({"lr": 0.1}, score, score, score, 56, 100)

    names = {f"{m}+gn" if g else m: entry(LEVELS[m] - 0.02 * g) for m, g in PAIRS}
    return {"dropout": dict(names), "breast_cancer": dict(names)}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_tables, "compute_runs", fake)
        store = Store(tmp_path_factory.mktemp("tables") / "s.sqlite")
        return table_rows(store, chosen(), ["dropout", "breast_cancer"], PAIRS)


def test_rows(rows):
    assert len(rows) == 2 * (len(PAIRS) + 1)
    row = next(r for r in rows if r.dataset == "dropout" and r.method == "lip-factors" and not r.group_norm)
    assert row.median == pytest.approx(0.8545) and row.seeds == 10 and row.delta == 1 / 4424
    assert row.wilcoxon_p == pytest.approx(2 / 2**10, rel=0.6) and row.mark == "best" and row.paper == 0.819
    assert "not covered" in row.covered and row.epsilon_pld < row.epsilon * 2
    marks = {(r.method, r.group_norm): r.mark for r in rows if r.dataset == "dropout"}
    assert marks["joint-cap", False] == ""  # a thousandth below in every pair is significant
    assert "claimed" in next(r.covered for r in rows if r.method == "lip-published")


def test_verdicts_use_validation_only(rows):
    settings = chosen()
    best = settings["dropout"]["joint-cap"]
    settings["dropout"]["joint-cap"] = Chosen(best.config, 0.99, 0.99, 0.99, 56, 100)  # validation prefers it
    by_name = {v.dataset: v for v in verdicts(rows, settings)}
    assert by_name["dropout"].variant == "joint-cap" and by_name["breast_cancer"].variant == "lip-factors"
    assert by_name["dropout"].above_paper and by_name["dropout"].verdict == "above"
    assert not by_name["breast_cancer"].above_paper  # .924 in print


def test_files(rows, tmp_path: Path):
    judged = verdicts(rows, chosen())
    written = write_all(rows, judged, tmp_path / "out", "weightclip-study reproduce tables")
    assert [p.name for p in written] == ["table1.csv", "table1.json", "tables.md", "table1.png"]
    with written[0].open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert tuple(lines[0]) == COLUMNS == (
        "dataset", "method", "group_norm", "epsilon", "delta", "accountant", "covered", "seeds", "median", "mean", "sd",
        "wilcoxon_p", "paper",
    )  # fmt: skip
    assert {line["method"] for line in lines} == set(LEVELS)
    ceiling = next(line for line in lines if line["method"] == "non-private")
    assert ceiling["epsilon"] == "inf" and ceiling["accountant"] == "none"
    assert json.loads(written[1].read_text())["rows"][0]["accuracies"]
    assert "**.854**" in markdown(rows, judged, "x") or "**.855**" in markdown(rows, judged, "x")


def test_verdicts_are_corrected_for_the_number_of_tests(rows):
    judged = verdicts(rows, chosen())
    assert [v.verdict for v in judged] == ["above"] * 2
    assert all(v.p_holm == pytest.approx(2 * v.p) for v in judged)  # two data sets, the same pairs
    few = [replace(r, accuracies=r.accuracies[:6]) for r in rows]  # p = 1/32 by itself, 1/16 among two
    assert all(v.p < 0.05 < v.p_holm and v.verdict == "not different" for v in verdicts(few, chosen()))
    assert all(v.verdict == "above" for v in verdicts([r for r in few if r.dataset == "dropout"], chosen()))


def test_files_are_written_again_from_what_is_there(rows, tmp_path: Path):
    write_json(rows, verdicts(rows, chosen()), tmp_path / "table1.json", "a command", {"python": "3"})
    known, made = read_json(tmp_path / "table1.json")
    assert known == rows and made == {"python": "3"}
    again = judged_again([replace(r, mark="?", config={"width": 16}) for r in known])
    assert [r.mark for r in again] == [r.mark for r in rows]
    features = prepare("dropout").X.shape[1]
    assert {r.parameters for r in again if r.dataset == "dropout"} == {(features + 1) * 16 + 17 * 2}
    text = markdown(again, verdicts(again, chosen()), "x")
    assert f" | {(features + 1) * 16 + 17 * 2} |" in text and "140 to 2,120 in the paper" in text


def test_algorithm_2_as_printed_borrows_the_settings_of_dp_sgd(rows):
    settings = chosen()["dropout"]
    own = settings.pop("dp-sgd-published")
    assert settings_for(settings, "dp-sgd-published", False) is settings["dp-sgd"]
    assert settings_for(settings, "dp-sgd-published", True) is settings["dp-sgd+gn"]
    assert settings_for(settings | {"dp-sgd-published": own}, "dp-sgd-published", False) is own
    assert settings_for(settings, "fix-lip", True) is None
    row = next(r for r in rows if r.method == "dp-sgd-published")
    assert "claimed" in row.covered and row.mark == "" and row.paper == 0.773


def test_a_claimed_epsilon_is_not_ranked(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(LEVELS, "lip-published", 0.99)
    monkeypatch.setattr(_tables, "compute_runs", fake)
    rows = table_rows(Store(tmp_path / "s.sqlite"), chosen(), ["dropout"], PAIRS, seeds=6)
    marks = {(r.method, r.group_norm): r.mark for r in rows}
    assert marks["lip-published", False] == "" and marks["lip-factors", False] == "best"


def test_numbers_in_short():
    assert [_short(x) for x in (0.9998, 1.0, 0.8504, 0.0004, 1.275)] == ["1.000", "1.000", ".850", ".000", "1.275"]


def test_report_stands_alone(rows, tmp_path: Path):
    out = tmp_path / "out"
    write_all(rows, verdicts(rows, chosen()), out, "weightclip-study reproduce tables")
    page = write_report(out)
    text = page.read_text(encoding="utf-8")
    assert "data:image/png;base64," in text and "prefers-color-scheme: dark" in text
    assert not re.search(r'(?:src|href)="(?!data:|#)', text)  # nothing is fetched
    assert "dropout" in text and "lip-factors" in text
    with pytest.raises(FileNotFoundError):
        write_report(tmp_path / "empty")
