"""The report: failures are collected, numbers are JSON, files are written."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from weightclip.audit import (
    AUDITS,
    Caught,
    Check,
    Examination,
    ExtraAudit,
    Report,
    _suite,
    falsify,
    run_audit,
    subjects,
    tightness_figure,
    write_report,
)
from weightclip.audit._accountants import AccountantRow
from weightclip.audit._checks import FALSIFIER, ONE_STEP, QUICK, json_ready, one_run_check
from weightclip.audit._statistics import TwoWorlds
from weightclip.audit._suite import _tasks


@pytest.fixture
def report() -> Report:
    layer = {"layer": "0", "bound": 1.0, "found": 0.9, "typical": 0.1, "ratio": 0.9}
    scores = np.linspace(-1, 1, 50), np.linspace(0, 9, 50)
    caught = Caught("a flaw", 1.0, 1.0, 9.0, TwoWorlds(6.0, 9.0, 8.0, 50.0, 1e-5, 50, True, 0.5), "how", scores,
                    lambda e: 0.1 * math.exp(-e))  # fmt: skip
    return Report(0, True, 1e-5, (1.0,), [Check(FALSIFIER, "x", 0.9, 1.0, False, "", {"layers": [layer]}),
                                          Check(ONE_STEP, "x", math.inf, 1.0, False)],
                  [caught], [AccountantRow(1.0, 1.0, 1, 1e-5, 4.38, 4.73, None, None, None, 4.377)])  # fmt: skip


def test_a_sound_report_has_no_failures(report: Report):
    assert report.failures == []


def test_failures_are_collected(report: Report):
    report.checks[0] = replace(report.checks[0], violation=True, note="found it")
    report.accountants[0] = replace(report.accountants[0], pld=3.0)
    report.printed[0] = replace(report.printed[0], result=replace(report.printed[0].result, violation=False,
                                                                  epsilon_lower=2.0))  # fmt: skip
    assert len(report.failures) == 4
    assert "found it" in report.failures[0] and "accountants" in report.failures[1] and "below 5" in report.failures[3]


def test_the_report_is_json(report: Report):
    data = json.loads(report.to_json())
    assert data["checks"][1]["measured"] == "inf" and data["printed"][0]["epsilon_lower"] == 6.0
    assert json_ready({1: (math.nan, np.float64(2.0), None)}) == {"1": ["nan", 2.0, None]}


def test_files(report: Report, tmp_path: Path):
    files = write_report(report, tmp_path / "out")
    assert {f.name for f in files} >= {"report.json", "audit.png", "report.md", "accountants.md", "00-a-flaw.png"}
    assert all(f.stat().st_size > 0 for f in files)
    assert "| a flaw |" in (tmp_path / "out" / "report.md").read_text()


def test_every_trainer_and_claim_is_in_the_plan():
    for quick in (True, False):
        labels = [label for label, _ in _tasks(Report(0, quick, 1e-5, (1.0, 2.0, 4.0, 8.0)))]
        assert all(any(label.startswith(name) for label in labels) for name in subjects())
        for e in ("1", "2", "4", "8"):
            assert f"epsilon {e}: sampled releases" in labels and f"epsilon {e}: one run" in labels
        assert "independent accountants" in labels


def test_audits_can_be_added(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_suite, "_tasks", lambda report: [])
    found = Check(ONE_STEP, "somebody else's trainer", 2.0, 1.0, True, "leaks")
    seen: list[tuple[str, int, int]] = []
    extra = [ExtraAudit("another trainer", lambda report: report.checks.append(found))]
    report = run_audit(quick=True, extra=extra, progress=lambda *news: seen.append(news))
    assert report.failures == [f"{ONE_STEP}, somebody else's trainer: leaks"]
    assert seen == [("another trainer", 0, 1), ("done", 1, 1)]


def test_an_examination_names_known_audits():
    examination = Examination(subjects()["normalisation"], replace(QUICK, restarts=2, ascent=3))
    one = one_run_check(8.0, 1.0, replace(QUICK, canaries=80), 0, 1e-5)
    assert {one.audit, *(name for name, _ in examination.every())} == set(AUDITS)


def test_a_picture_of_one_model(tmp_path: Path):
    found = falsify(subjects()["normalisation"], restarts=2, steps=3)
    assert tightness_figure(found, tmp_path / "bars.png").stat().st_size > 0


def test_the_report_follows_from_its_seed():
    """Checks of each kind twice; in between the global generators move, on which nothing may depend."""
    little = replace(QUICK, restarts=2, ascent=4, steps=6, releases=40, runs=4, run_steps=2, canaries=80)

    def text(seed: int, restless: int) -> str:
        torch.manual_seed(restless)
        np.random.seed(restless)
        trainer = Examination(subjects()["joint cap"], little, seed)
        checks = [trainer.falsifier(), trainer.one_step(), trainer.run_law(), trainer.releases(4.0)]
        checks += [trainer.two_worlds(4.0), one_run_check(4.0, 1.0, little, seed, 1e-5)]
        return Report(seed, True, 1e-5, (4.0,), checks).to_json()

    first = text(0, 1)
    assert text(0, 2) == first
    assert one_run_check(4.0, 1.0, little, 1, 1e-5) != one_run_check(4.0, 1.0, little, 0, 1e-5)
