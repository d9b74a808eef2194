"""Hostile command lines, schemas, tables and model folders: each gives one line and an exit code, and leaves nothing.

Thirty of them run always, all of them with WEIGHTCLIP_FULL=1 (``make test-full``).
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
from tests.hostile import files, folders, options, schemas
from tests.hostile.kit import TABLE, Case, command, contents, in_a_process_of_its_own, judge, train

from weightclip.cli import main

ALL: tuple[Case, ...] = (*options.CASES, *schemas.CASES, *files.CASES, *folders.CASES)
FULL = os.environ.get("WEIGHTCLIP_FULL") == "1"
SOME = ALL if FULL else tuple(random.Random(4711).sample(ALL, 30))
ALONE = ("--epsilon 'nan' (3)", "schema: nested deeply", "certify: weights: NaN")

pytest.importorskip("pyarrow")


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """A folder with a good table and a good model."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "data.csv").write_text(TABLE)
    with pytest.raises(SystemExit) as exit:
        main(command(Case("", train("--out", "{model}")), folder))
    assert exit.value.code == 0
    return folder


@pytest.fixture
def place(good: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A copy of it, and an empty scratch folder."""
    shutil.copytree(good, tmp_path / "case")
    (tmp_path / "scratch").mkdir()
    return tmp_path / "case", tmp_path / "scratch"


def test_there_are_enough_of_them() -> None:
    assert len(ALL) >= 200 and len({case.name for case in ALL}) == len(ALL)
    assert len(SOME) == (len(ALL) if FULL else 30)


@pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
def test_one_line_and_nothing_left(case: Case, place: tuple[Path, Path], capsys, monkeypatch) -> None:
    folder, scratch = place
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    monkeypatch.chdir(folder)
    if case.prepare is not None:
        case.prepare(folder)
    before = contents(folder)
    with pytest.raises(SystemExit) as exit:
        main(command(case, folder))
    captured = capsys.readouterr()
    judge(case, exit.value.code, captured.out, captured.err)
    assert contents(folder) == before and contents(scratch) == {}


@pytest.mark.parametrize("name", ALONE)
def test_the_same_in_a_process_of_its_own(name: str, place: tuple[Path, Path]) -> None:
    folder, scratch = place
    case = next(c for c in ALL if c.name == name)
    if case.prepare is not None:
        case.prepare(folder)
    before = contents(folder)
    judge(case, *in_a_process_of_its_own(case, folder, scratch))
    assert contents(folder) == before and contents(scratch) == {}


def test_a_good_command_is_not_refused(place: tuple[Path, Path], capsys) -> None:
    """The suite would pass if everything failed."""
    folder, _ = place
    for arguments in (train(), ("predict", "{model}", "{data}", "--out", "{dir}/p.csv"), ("certify", "{model}")):
        with pytest.raises(SystemExit) as exit:
            main(command(Case("", arguments), folder))
        assert exit.value.code == 0, capsys.readouterr().err
    assert (folder / "p.csv").read_text().count("\n") == 121
