"""The study's tables on a page, and its commands on a machine without a typer that runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from weightclip import WeightclipError
from weightclip_studies.text import write, write_page
from weightclip_studies.text._report import BEGIN, END, lines

ROOT = Path(__file__).resolve().parents[3]


def row(part, method, epsilon, median, **more):
    return {"part": part, "method": method, "epsilon": epsilon, "seeds": "5", "median": median, "sem": "0.0010",
            "steps": "60", "batch": "4096", "seconds": "", "ratio": "", "device": "a GPU", **more}  # fmt: skip


def test_a_page_gets_its_tables_and_keeps_the_rest(tmp_path):
    table, page = tmp_path / "sst2.csv", tmp_path / "text.md"
    write(table, [
        row("head", "cap", "8", "0.8100"), row("lora", "non-private", "", "0.9000", seeds="3"),
        row("lora", "cap", "8", "0.8500", seconds="4.20", ratio="1.10", peak_gib="15.00"),
        row("lora", "opacus", "8", "0.8450", seconds="9.00", ratio="2.30", peak_gib="16.00"),
    ])  # fmt: skip
    audit = {"part": "lora", "method": "cap", "epsilon": "8", "device": "cuda", "canaries": "4000", "guesses": "100",
             "correct": "60", "epsilon_lower": "0.3"}  # fmt: skip
    write(tmp_path / "canaries.csv", [audit], tuple(audit))
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_page(page, table)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "+4.0 ± 0.3 points to the head, +0.5 ± 0.3 points to Opacus, -5.0 ± 0.3 points to training" in text
    assert "A step takes 1.10 times that of ordinary training, Opacus' 2.30 times; memory: 15.0 GiB, Opacus 16" in text
    assert ".900 ± .001 (3 seeds)" in text and "guesses 60 of 100 rightly, so that ε is at least 0.30" in text
    write_page(page, table)
    assert page.read_text() == text


def test_times_of_two_machines_stand_apart_and_recipes_are_told(tmp_path):
    table = tmp_path / "sst2.csv"
    timed = {"seconds": "4.20", "ratio": "1.10", "peak_gib": "15.00"}
    write(table, [
        row("head", "cap", "8", "0.8100", **timed, device="a CPU"), row("lora", "cap", "8", "0.8500", **timed),
        row("lora", "cap", "3", "0.8400", **timed | {"seconds": "9.00"}, steps="120"),
        row("lora", "opacus", "8", "0.8450", sem="", seeds="1"),
        row("lora", "non-private", "", "0.9", **timed | {"seconds": "3.60"}, steps="236", batch="1024"),
    ])  # fmt: skip
    (tmp_path / "recipes.csv").write_text(
        "part,recipe,epsilon,dev,sem,above_plain\nlora,plain,8,0.85,0.001,0\nlora,smaller,8,0.84,,-0.01\n"
    )
    text = lines(table)
    cpu, gpu = (text.split(f"Alone on the device ({name}):")[1].split("\n\n")[1] for name in ("a CPU", "a GPU"))
    assert "| head |" in cpu and "low-rank" not in cpu and "| head |" not in gpu
    assert "| low-rank updates | cap | 60 | 4.20 | 70.0 | 1.10 | 15.00 |" in gpu and gpu.count("| cap |") == 1
    assert "| low-rank updates | none | 60 | 3.60 | 60.0 | 1.10 | 15.00 |" in gpu  # seconds of as many steps as cap's
    assert "| 120 of 4096 (ε = 3), 60 of 4096 (ε = 8) |" in text and ".845 (1 seed)" in text
    assert "+0.5 points to Opacus" in text  # no standard error of one seed
    assert "Recipes at ε = 8" in text and "| low-rank updates | smaller | 84.00 |  | -1.00 |" in text


def test_a_page_without_marks_or_table_is_refused(tmp_path):
    page = tmp_path / "text.md"
    page.write_text("nothing here\n")
    with pytest.raises(WeightclipError, match="holds no line"):
        write_page(page, tmp_path / "sst2.csv")
    page.write_text(f"{BEGIN}\n{END}\n")
    with pytest.raises(WeightclipError, match="missing"):
        write_page(page, tmp_path / "sst2.csv")


def plain(*words):
    return subprocess.run(
        [sys.executable, ROOT / "studies/benchmarks/plain.py", *words], capture_output=True, text=True
    )


def test_commands_run_without_typer(tmp_path):
    there = tmp_path / "prepared"
    missing = plain("text", "--plan", "--within", "0", "--prepared", str(there), "--runs", str(tmp_path / "runs"))
    assert missing.returncode == 1 and missing.stderr.startswith("error: ") and "--prepare writes it" in missing.stderr
    assert "choose from head" in plain("text", "--part", "head", "--part", "tail").stderr
    assert plain("text", "--plann").returncode == 2
    assert "--part" in plain("text", "--help").stdout and plain("extractor:plan", "--help").returncode == 0
