"""The door is light, complete and honest: what it imports, what it offers, what it tells type checkers."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import weightclip as wc

HEAVY = ("torch._dynamo", "scipy", "matplotlib", "sklearn", "typer", "rich", "dp_accounting", "pandas")


def modules_after(code: str) -> tuple[set[str], float]:
    """Modules that a fresh interpreter holds after the code, and the CPU seconds it took."""
    tail = "\nprint(time.process_time() - began, *sys.modules)"
    command = f"import sys, time\nbegan = time.process_time()\n{code}{tail}"
    words = subprocess.run([sys.executable, "-c", command], check=True, capture_output=True, text=True).stdout.split()
    first = next(i for i, word in enumerate(words) if word.replace(".", "").replace("e-", "").isdigit())
    return set(words[first + 1 :]), float(words[first])


def test_import_brings_nothing_heavy():
    found, seconds = modules_after("import weightclip")
    assert not found & {"torch", *HEAVY}
    assert seconds < 0.5  # 0.02 s on an idle core


def test_after_torch_it_costs_next_to_nothing():
    found, seconds = modules_after("import torch\nbegan = time.process_time()\nimport weightclip")
    assert not found & set(HEAVY) and seconds < 0.5


def test_help_needs_no_torch():
    code = "import contextlib, weightclip.cli as c\nwith contextlib.suppress(SystemExit):\n    c.main(['--help'])"
    found, seconds = modules_after(code)
    assert not found & {"torch", "numpy", "sklearn", "scipy", "matplotlib", "dp_accounting"}
    assert {"typer", "weightclip.cli._train", "weightclip.cli._tune"} <= found and seconds < 2  # 0.3 s on an idle core


def test_type_checkers_see_what_python_sees():
    tree = ast.parse(Path(str(wc.__file__)).read_text())
    (block,) = [n for n in tree.body if isinstance(n, ast.If)]
    seen = {(n.module, a.name) for n in block.body if isinstance(n, ast.ImportFrom) for a in n.names}
    told = {(home, name) for name, home in wc._HOME.items()} | {("weightclip", name) for name in wc._PACKAGES}
    assert seen == told


def test_every_name_is_there():
    assert len(set(wc.__all__)) == len(wc.__all__) and set(wc.__all__) <= set(dir(wc))
    for name in wc.__all__:
        assert getattr(wc, name) is not None
    for name, home in wc._HOME.items():
        assert getattr(wc, name) is getattr(import_module(home), name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = wc.nothing
    with pytest.raises(ImportError):
        from weightclip import nothing  # noqa: F401


def test_star_import_works():
    names: dict[str, object] = {}
    exec("from weightclip import *", names)
    assert set(wc.__all__) <= set(names)
