"""How a hostile case is run, and what must hold after it: one line, an exit code, nothing written, nothing repeated."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SECRET = "SECRET4711"  # a private value: it stands in tables and must stand in no message
ROWS = [(i % 7 / 3 - 1, "abc"[i % 3], "yes" if i % 3 == 0 else "no") for i in range(120)]
TABLE = "a,b,label\n" + "".join(f"{a:.3f},{b},{y}\n" for a, b, y in ROWS)
TRAIN = ("train", "{data}", "--target", "label", "--epsilon", "3", "--delta", "1e-5", "--epochs", "1", "--seed", "0",
         "--accountant", "rdp", "--out", "{dir}/m")  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One thing that must fail.

    Attributes:
        name: What is wrong.
        arguments: The command line; {dir}, {data}, {model} stand for the case's folder, a good table, a good model.
        match: Text the one line must hold.
        prepare: Makes files in the case's folder, which holds a good table and a good model; None for nothing.
    """

    name: str
    arguments: tuple[str, ...]
    match: str = ""
    prepare: Callable[[Path], object] | None = None


def train(*more: str) -> tuple[str, ...]:
    """A command line that would work, with options after it: the last of each counts."""
    return (*TRAIN, *more)


def tune(*more: str) -> tuple[str, ...]:
    """As `train`, for a search."""
    return ("tune", "{data}", "--target", "label", "--epsilon", "3", "--delta", "1e-5", "--out", "{dir}/m", *more)


def contents(folder: Path) -> dict[str, str]:
    """Every file under a folder, by name, with what it holds."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"link to {os.readlink(path)}"
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[name] = "folder" if path.is_dir() else "other"
    return found


def command(case: Case, folder: Path) -> list[str]:
    """The command line of a case in its folder."""
    places = {"dir": str(folder), "data": str(folder / "data.csv"), "model": str(folder / "model")}
    arguments = list(case.arguments)
    for name, place in places.items():
        arguments = [a.replace("{" + name + "}", place) for a in arguments]
    return arguments


def judge(case: Case, code: object, out: str, err: str) -> None:
    """What must hold of a failed command."""
    lines = [line for line in err.splitlines() if line.strip()]
    assert code in (1, 2), (code, err)
    assert len(lines) == 1 and lines[0].startswith("error: "), err
    assert "Traceback" not in err and "error: unexpected" not in err, err
    assert case.match in lines[0], lines[0]
    assert SECRET not in out + err, err
    assert len(lines[0]) < 1200, lines[0]


def in_a_process_of_its_own(case: Case, folder: Path, scratch: Path) -> tuple[int, str, str]:
    """Runs the command line as a user does."""
    start = [sys.executable, "-c", "from weightclip.cli import main; main()", *command(case, folder)]
    done = subprocess.run(
        start, capture_output=True, text=True, timeout=120, env={**os.environ, "TMPDIR": str(scratch)}
    )
    return done.returncode, done.stdout, done.stderr
