"""Every command says what it is for and shows an example that parses."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from weightclip_studies.cli._app import app


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, child in getattr(command, "commands", {}).items():
        yield from leaves(child, (*path, name))
    if not getattr(command, "commands", None):
        yield path, command


ROOT = typer.main.get_command(app)
COMMANDS = dict(leaves(ROOT))


def test_all_commands_are_found():
    names = {"reproduce", "extractor", "text", "tune", "bench", "data", "audit"}
    assert {p[0] for p in COMMANDS} == names


@pytest.mark.parametrize("path", list(COMMANDS), ids=" ".join)
def test_help_shows_an_example_that_parses(path):
    command = COMMANDS[path]
    example = re.search(r"Example: (weightclip-study .*)", command.help or "")
    assert example, f"weightclip-study {' '.join(path)} --help has no example"
    words = shlex.split(example[1].split(" > ")[0])
    assert tuple(words[1 : 1 + len(path)]) == path
    command.make_context(path[-1], words[1 + len(path) :])
