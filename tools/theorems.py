"""The proofs as data: sections and theorems of docs/SOUNDNESS.md, and where the code and the tests they name are.

Read by ``tests/test_citations.py``, which keeps the names alive, and by the documentation, which makes links of them.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROOFS = ROOT / "docs" / "SOUNDNESS.md"


@dataclass(frozen=True)
class Place:
    """Where a name is defined."""

    path: Path
    line: int


@dataclass(frozen=True)
class Theorem:
    """One numbered theorem of the page: its whole text, and the names under its two headings."""

    number: int
    section: int
    text: str

    @property
    def anchor(self) -> str:
        """The anchor of its heading."""
        return slug(f"Theorem {self.number}. {self.text.splitlines()[0]}")

    def names(self, heading: str) -> list[str]:
        """Names in backticks behind ``*Used by*`` or ``*Checked by*``."""
        found = re.search(rf"^\*{heading}\*(.*?)(?=^\*|\Z|\n\n)", self.text, re.M | re.S)
        return re.findall(r"`([\w.]+)`", found.group(1)) if found else []


def slug(heading: str) -> str:
    """The anchor that Sphinx and GitHub give a heading."""
    plain = re.sub(r"[^\w\- ]", "", re.sub(r"`|\*", "", heading).strip().lower())
    return plain.replace(" ", "-")


@functools.cache
def sections() -> dict[int, str]:
    """The numbered sections, by number."""
    parts = re.split(r"^## (\d+)\. ", PROOFS.read_text(), flags=re.M)
    return {int(number): text for number, text in zip(parts[1::2], parts[2::2], strict=True)}


@functools.cache
def theorems() -> dict[int, Theorem]:
    """The numbered theorems, by number."""
    found: dict[int, Theorem] = {}
    for section, whole in sections().items():
        parts = re.split(r"^### Theorem (\d+)\. ", whole, flags=re.M)
        for number, text in zip(parts[1::2], parts[2::2], strict=True):
            assert int(number) not in found, f"two theorems {number}"
            found[int(number)] = Theorem(int(number), section, text)
    return found


@functools.cache
def definitions() -> dict[str, list[Place]]:
    """Functions, classes and ``Class.method`` of the package and of the studies, with the places they are at."""
    return _index([ROOT / "src", ROOT / "studies" / "src"], "")


@functools.cache
def checks() -> dict[str, list[Place]]:
    """Test functions, with the places they are at."""
    return _index([ROOT / "tests", ROOT / "studies" / "tests"], "test_")


def _index(folders: list[Path], begin: str) -> dict[str, list[Place]]:
    found: dict[str, list[Place]] = {}
    for path in (path for folder in folders if folder.is_dir() for path in sorted(folder.rglob("*.py"))):
        for name, line in _defined(ast.parse(path.read_text()), ""):
            if name.startswith(begin):
                found.setdefault(name, []).append(Place(path, line))
    return found


def _defined(tree: ast.AST, inside: str) -> Iterator[tuple[str, int]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield inside + node.name, node.lineno
            if isinstance(node, ast.ClassDef):
                yield from _defined(node, f"{node.name}.")
