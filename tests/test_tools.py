"""The scripts behind ``make test-torch``, ``test-install`` and ``test-full`` fit the repository as it is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def tools(monkeypatch):
    """The folder of the scripts on the path, as when one of them runs."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    yield
    for name in ("releases", "test_torch", "test_full"):
        sys.modules.pop(name, None)


def test_releases_are_read(tools, monkeypatch):
    import releases  # pyright: ignore[reportMissingImports]

    assert f'"torch>={releases.minimum()}"' in (ROOT / "pyproject.toml").read_text()
    assert releases.release("minimum") == releases.minimum() and releases.release("2.11") == "2.11"
    for wrong in ("2", "2.11.0", "old", "2.11; echo"):
        with pytest.raises(SystemExit, match="give a release as x.y"):
            releases.release(wrong)
    monkeypatch.setattr(sys, "argv", ["test_torch.py"])
    with pytest.raises(SystemExit, match="usage"):
        releases.only_argument("usage: ...")


def test_every_core_test_exists(tools):
    import test_torch  # pyright: ignore[reportMissingImports]

    assert len(test_torch.core()) > len(test_torch.CORE)


def test_full_runs_targets_of_the_makefile(tools):
    import test_full  # pyright: ignore[reportMissingImports]

    makefile = (ROOT / "Makefile").read_text()
    for target, *_ in test_full.STEPS:  # a rule, and a line in the help
        assert f"\n{target}:" in makefile and f'"make {target} ' in makefile
