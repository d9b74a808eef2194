"""The script of all speed rows on a GPU machine: every line is one the benchmark takes, and none runs twice."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from weightclip_studies.bench import GRAPHED, MODES, PRECISIONS, models

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "studies" / "benchmarks" / "speed.sh"
FAKE = """#!/bin/sh
case "$*" in *need.py*) exit 0 ;; esac
echo "$@" >> "$CALLS"
case "$*" in *resnet50*) exit 1 ;; esac
"""


def lines() -> list[str]:
    """What the script measures."""
    found = SCRIPT.read_text().split("<<'LINES'\n")[1].split("LINES")[0].splitlines()
    return [line.split(" ", 1)[1] for line in found]


def words(line: str, option: str) -> list[str]:
    """The words behind an option."""
    found = re.search(rf"--{option} ([^-][^ ]*(?: (?!--)[^ ]+)*)", line)
    return found[1].split() if found else []


def test_every_line_is_one_the_benchmark_takes() -> None:
    assert len(lines()) > 10
    for line in lines():
        modes = words(line, "modes")
        assert modes and set(modes) <= {*MODES, *GRAPHED}, line
        assert set(words(line, "models")) <= set(models()) and words(line, "models"), line
        assert set(words(line, "precision")) <= set(PRECISIONS), line
        for base in {"plain-graph" if mode in GRAPHED else "plain" for mode in modes}:
            assert base in modes, f"no ratio without {base}: {line}"


def run(folder: Path, *only: str, within: int = 10_000) -> tuple[list[str], str]:
    """What one call of the script asks the benchmark for, and what it prints; with a benchmark that does nothing."""
    fake, calls = folder / "python3", folder / "calls"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    calls.write_text("")
    there = {"PATH": f"{folder}:{os.environ['PATH']}", "OUT": str(folder / "out"), "WITHIN": str(within)}
    call = ["sh", str(SCRIPT), *only]
    done = subprocess.run(
        call, cwd=ROOT, env={**os.environ, **there, "CALLS": str(calls)}, capture_output=True, text=True
    )
    return calls.read_text().splitlines(), done.stdout


def test_a_second_call_runs_what_failed_and_nothing_else(tmp_path: Path) -> None:
    calls, printed = run(tmp_path)
    assert len(calls) == len(lines()) and printed.count("failed or too long") == 1
    assert sum("draws.csv" in call for call in calls) == sum("--draws" in line for line in lines()) == 1
    again, _ = run(tmp_path)
    assert len(again) == 1 and "resnet50" in again[0]


def test_no_line_begins_that_may_not_end(tmp_path: Path) -> None:
    calls, printed = run(tmp_path, within=30)
    assert not calls and printed.count("left for another call") == len(lines())
    calls, _ = run(tmp_path, "encoder-base")
    assert len(calls) == sum("encoder-base" in line for line in lines()) == 3
