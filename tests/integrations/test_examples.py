"""The examples of the integrations run, and differ from the usual scripts by five lines at most."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = {"hf_trainer.py": ("peft", "96"), "accelerate_loop.py": ("accelerate", "1"),
           "lightning_module.py": ("lightning", "1"), "skorch_net.py": ("skorch", "1")}  # fmt: skip
OURS = ("weightclip", "rivacy", "Private", "epsilon", "engine")


def differing(text: str) -> tuple[int, list[str]]:
    """How many lines of a script are marked, and which are not though they name something of ours."""
    lines = text.split('"""', 2)[2].splitlines()
    marked = [line for line in lines if "# private" in line]
    return len(marked), [line for line in lines if any(w in line for w in OURS) and "# private" not in line]


@pytest.mark.parametrize("script", SCRIPTS)
def test_at_most_five_lines_differ(script: str) -> None:
    count, forgotten = differing((EXAMPLES / script).read_text())
    assert 0 < count <= 5 and forgotten == []


def test_a_forgotten_mark_shows() -> None:
    assert differing('"""x"""\nimport weightclip\ny = 1  # private\n') == (1, ["import weightclip"])


@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize("script", SCRIPTS)
def test_it_runs(script: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    package, size = SCRIPTS[script]
    pytest.importorskip(package, reason=f"{package} is missing: pip install weightclip[test-stock]")
    monkeypatch.setattr(sys, "argv", [script, size])
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    out = capfd.readouterr().out
    assert "epsilon" in out and "loss: " not in out
