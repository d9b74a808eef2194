"""``weightclip audit``: what the command line does with violations and bad options."""

from __future__ import annotations

from pathlib import Path

import pytest

import weightclip.audit as audit
from weightclip.audit import Check, Report
from weightclip.cli import main


def _run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["audit", *arguments])
    assert isinstance(stop.value.code, int)
    return stop.value.code


def _fake(monkeypatch: pytest.MonkeyPatch, violation: bool) -> None:
    layer = {"layer": "0", "bound": 1.0, "found": 2.0, "typical": 0.1, "ratio": 2.0}
    check = Check("falsifier", "some trainer", 2.0, 1.0, violation, "layer 0", {"layers": [layer], "rate": 1.0})
    monkeypatch.setattr(audit, "run_audit", lambda **options: Report(3, True, 1e-5, (1.0,), [check]))


def test_a_violation_is_shown_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    _fake(monkeypatch, True)
    assert _run("--out", str(tmp_path)) == 1
    shown = capsys.readouterr()
    assert "VIOLATION falsifier, some trainer: layer 0" in shown.err and "some trainer" in shown.out


def test_without_one_it_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    _fake(monkeypatch, False)
    assert _run("--out", str(tmp_path)) == 0
    assert "VIOLATION" not in capsys.readouterr().err


def test_checks_of_other_trainers_have_no_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Estimators and image heads are audited beside the engine, by what they have."""
    layer = {"layer": "0", "bound": 1.0, "found": 0.5, "typical": 0.1, "ratio": 0.5}
    checks = [
        Check("falsifier", "some trainer", 0.5, 1.0, False, "layer 0", {"layers": [layer], "rate": 1.0}),
        Check("estimators, two worlds", "a row far away", 0.1, 1.0, False, "", {"epsilon_gdp": 0.2, "trials": 9}),
        Check("image heads, one record", "linear", 0.9, 1.0, False, "", {"alone": 0.9}),
    ]
    monkeypatch.setattr(audit, "run_audit", lambda **options: Report(3, True, 1e-5, (1.0,), checks))
    assert _run("--out", str(tmp_path)) == 0
    assert "a row far away" in (shown := capsys.readouterr().out) and "linear" in shown


@pytest.mark.parametrize("options", [("--epsilon", "-1"), ("--epsilon", "x"), ("--delta", "2"), ("--nope",)])
def test_bad_options_are_named_in_one_line(options: tuple[str, ...], capsys: pytest.CaptureFixture[str]):
    assert _run(*options) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ") and "\n" not in error and options[0] in error


def test_errors_of_ours_are_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    from weightclip.errors import WeightclipError

    def fail(**options: object) -> Report:
        raise WeightclipError("what, where,\nhow to fix")

    monkeypatch.setattr(audit, "run_audit", fail)
    assert _run("--out", str(tmp_path)) == 1
    assert capsys.readouterr().err.strip().splitlines()[-1] == "error: what, where, how to fix"
    monkeypatch.setenv("WEIGHTCLIP_DEBUG", "1")
    with pytest.raises(WeightclipError):
        main(["audit", "--out", str(tmp_path)])
