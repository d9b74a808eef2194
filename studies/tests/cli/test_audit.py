"""``weightclip-study audit --quick`` end to end: everything of ``weightclip audit``, and the studies' own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from weightclip_studies.audit import extra_audits
from weightclip_studies.cli import main


def _run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["audit", *arguments])
    assert isinstance(stop.value.code, int)
    return stop.value.code


@pytest.mark.skipif(
    os.environ.get("WEIGHTCLIP_FULL") != "1", reason="three minutes: WEIGHTCLIP_FULL=1, or make audit-quick"
)
def test_the_quick_audit_finds_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert _run("--quick", "--seed", "1", "--out", str(tmp_path), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["failures"] == [] and report["quick"] and report["seed"] == 1
    assert report["epsilons"] == [1.0, 2.0, 4.0, 8.0]
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert (tmp_path / "audit.png").stat().st_size > 50_000
    sampled = [c for c in report["checks"] if c["audit"] in ("one step, sampled", "two worlds", "one run")]
    assert all(c["measured"] <= c["allowed"] for c in sampled)
    sharp = [c for c in sampled if c["audit"] == "one step, sampled" and c["details"]["rate"] == 1]
    assert len(sharp) == 4
    assert all(abs(c["details"]["result"]["epsilon_gdp"] / c["allowed"] - 1) < 0.25 for c in sharp)
    assert any(c["audit"] == "image heads, one record" for c in report["checks"])
    printed = report["printed"][0]
    assert printed["claimed"] == 1 and printed["epsilon_lower"] >= 5


def test_the_studies_add_their_own():
    labels = [one.label for one in extra_audits()]
    assert "the printed algorithm" in labels and sum(label.startswith("image heads") for label in labels) == 5
