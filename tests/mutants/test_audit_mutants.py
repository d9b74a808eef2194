"""Mutation bench: every deliberate bug of ``audit_mutants`` must be killed by an audit, or the audits have gone blind.

By default each mutant is audited until the first kill. With WEIGHTCLIP_AUDIT_TABLE=FOLDER all audits are run on every
mutant and the table (mutants.json, mutants.md) is written there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import tests.mutants.audit_mutants_engine  # noqa: F401 - the other mutants register themselves
from tests.mutants.audit_mutants import MUTANTS, Mutant

from weightclip.audit import AUDITS, QUICK, Examination, subjects
from weightclip.audit._checks import one_run_check

SHORT = replace(QUICK, releases=300, runs=40, run_steps=2)
TABLE = os.environ.get("WEIGHTCLIP_AUDIT_TABLE")


@pytest.fixture(scope="module")
def table() -> Iterator[dict[str, dict[str, str]]]:
    rows: dict[str, dict[str, str]] = {}
    yield rows
    if TABLE:
        _write(rows, Path(TABLE))


def _attack(mutant: Mutant, thorough: bool) -> dict[str, str]:
    """Audit -> what it found: "killed", "alive", or the error that the mutant caused (which is no kill)."""
    verdicts: dict[str, str] = {}
    examination = Examination(subjects()[mutant.subject], SHORT)
    audits = list(examination.every())
    if thorough:
        audits.append((AUDITS[-1], lambda: one_run_check(2.0, 1.0, SHORT, 0, 1e-5)))
    for name, audit in audits:
        try:
            verdict = "killed" if audit().violation else "alive"
        except ValueError as error:  # an error of ours stops the training, and the audit with it
            verdict = type(error).__name__
        if verdicts.get(name) != "killed":
            verdicts[name] = verdict
        if verdict == "killed" and not thorough:
            break
    return verdicts


def test_there_are_enough_of_them():
    assert len(MUTANTS) >= 15 and len({m.name for m in MUTANTS}) == len(MUTANTS)
    assert sum(m.origin == "printed algorithm" for m in MUTANTS) >= 10  # every row of SOUNDNESS section 2


@pytest.mark.parametrize("mutant", MUTANTS, ids=[m.name for m in MUTANTS])
def test_mutant_dies(mutant: Mutant, table: dict[str, dict[str, str]]):
    with pytest.MonkeyPatch.context() as patch:
        mutant.patch(patch)
        verdicts = _attack(mutant, thorough=TABLE is not None)
    table[mutant.name] = verdicts
    assert "killed" in verdicts.values(), f"survives: {verdicts}"


def test_the_patches_are_gone():
    """The unpatched library passes the audit that kills most mutants."""
    examination = Examination(subjects()["aligned dense net"])
    assert not examination.one_step().violation and not examination.falsifier().violation


def _write(rows: dict[str, dict[str, str]], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    origin = {m.name: m for m in MUTANTS}
    data = [{"mutant": name, "origin": origin[name].origin, "trainer": origin[name].subject, "audits": verdicts}
            for name, verdicts in rows.items()]  # fmt: skip
    (folder / "mutants.json").write_text(json.dumps(data, indent=1) + "\n")
    killed = sum("killed" in v.values() for v in rows.values())
    lines = [
        "# Mutation bench: which audit kills which bug", "",
        f"{killed} of {len(rows)} mutants killed. x: killed by it; e: the bug stops the audit by an error.", "",
        "| bug | origin | trainer | " + " | ".join(AUDITS) + " |", "|---|---|---|" + ":-:|" * len(AUDITS),
    ]  # fmt: skip
    marks = {"killed": "x", "alive": ""}
    for row in data:
        cells = [marks.get(row["audits"].get(a, "alive"), "e") for a in AUDITS]
        lines.append(f"| {row['mutant']} | {row['origin']} | {row['trainer']} | " + " | ".join(cells) + " |")
    (folder / "mutants.md").write_text("\n".join([*lines, ""]))
