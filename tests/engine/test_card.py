"""The model card: a head that machines read, the report's numbers, and nothing that the report does not say."""

from __future__ import annotations

import json

import pytest
from tests.engine_kit import mlp, private, table
from tests.ledger_kit import killed, started, steps

from weightclip.engine import FORMAT, check_format, model_card, nist_answers
from weightclip.errors import WeightclipError

yaml = pytest.importorskip("yaml")


@pytest.fixture(scope="module")
def run():
    run = private(mlp(), table(16), sigma=1.0, batch=4)
    run.train()
    return run


def parts(card: str) -> tuple[dict, str]:
    empty, head, body = card.split("---\n", 2)
    assert empty == ""
    return yaml.safe_load(head), body


def test_the_head_has_tags_and_the_report_s_numbers(run) -> None:
    report = run.engine.report(delta=1e-5)
    head, body = parts(run.engine.card(1e-5, "Digits", license="apache-2.0"))
    assert {"differential-privacy", "dp-sgd"} <= set(head["tags"]) and head["license"] == "apache-2.0"
    privacy = head["differential_privacy"]
    assert privacy["epsilon"] == report["epsilon"] and privacy["delta"] == 1e-5 and privacy["accountant"] == "pld"
    assert privacy["adjacency"] == "add_or_remove_one" and privacy["report_format"] == report["format"] == FORMAT
    assert body.lstrip().startswith("# Digits\n") and f"epsilon = {report['epsilon']:.6g}, delta = 1e-05" in body
    assert all(f"- {line}" in body for line in report["not_covered"])
    (mechanism,) = report["mechanisms"]
    assert f"sigma {mechanism['sigma']:.4g} | {mechanism['q']:.4g} | {mechanism['steps']} |" in body


def test_the_hub_reads_it(run) -> None:
    hub = pytest.importorskip("huggingface_hub")
    data = hub.ModelCard(run.engine.card(1e-5)).data
    assert data.library_name == "weightclip" and "differential-privacy" in data.tags


def test_a_seeded_run_and_an_infinite_epsilon_are_said(run) -> None:
    report = {**run.engine.report(delta=1e-5), "secure_noise": False, "epsilon": "inf"}
    head, body = parts(model_card(report))
    assert head["differential_privacy"]["secret_noise"] is False and head["differential_privacy"]["epsilon"] == "inf"
    assert "epsilon = inf" in body and "A seed (experiments only)" in body


def test_names_stay_on_their_line(run) -> None:
    report = run.engine.report(delta=1e-5)
    report["mechanisms"][0]["label"] = "a | b\n# c"
    assert "| a \\| b # c | gaussian" in model_card(report)


def test_each_mechanism_states_what_it_costs_alone(tmp_path) -> None:
    """Two runs on one ledger: each line is smaller than the whole, which is smaller than their sum."""
    report = {}
    for sigma in (1.0, 2.0):
        made = started(tmp_path / "run.ledger", sigma=sigma)
        steps(made, 3)
        report = made.engine.report(delta=1e-5)
        killed(made)
    first, second = (m["epsilon"] for m in report["mechanisms"])
    assert second < first < report["epsilon"] < first + second


@pytest.mark.parametrize(("found", "text"), [("2.0", "use the version"), ("1", "version like"), (1.0, "version like"),
                                             ("1.x", "version like")])  # fmt: skip
def test_another_format_is_refused(run, found, text) -> None:
    with pytest.raises(WeightclipError, match=text):
        nist_answers({**run.engine.report(delta=1e-5), "format": found})


def test_formats_that_only_add_are_read(run) -> None:
    report = json.loads(json.dumps(run.engine.report(delta=1e-5)))
    check_format({**report, "format": "1.7", "new": 1})
    report.pop("format")  # version 0.1
    check_format(report)
