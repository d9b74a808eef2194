"""Which release of torch is meant: ``x.y``, ``minimum`` (declared in pyproject.toml) or ``newest`` (on the index)."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def minimum() -> str:
    """The declared minimum, as ``x.y``."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        wanted = tomllib.load(file)["project"]["dependencies"]
    found = [re.fullmatch(r"torch>=(\d+\.\d+)(\.\d+)*", line.replace(" ", "")) for line in wanted]
    (match,) = [m for m in found if m]
    return match[1]


def newest() -> str:
    """The newest release that pip would take, as ``x.y``."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "index", "versions", "torch"]
    listed = subprocess.run(pip, check=True, capture_output=True, text=True).stdout
    match = re.match(r"torch \((\d+\.\d+)", listed)
    if match is None:
        sys.exit(f"pip lists no release of torch: {listed.strip() or 'no output'}")
    return match[1]


def release(asked: str) -> str:
    """``x.y`` of what was asked for."""
    named = {"minimum": minimum, "newest": newest}
    if asked in named:
        return named[asked]()
    if not re.fullmatch(r"\d+\.\d+", asked):
        sys.exit(f"TORCH={asked}: give a release as x.y, or minimum, or newest.")
    return asked


def only_argument(usage: str) -> str:
    """The release that the script's one argument asks for."""
    if len(sys.argv) != 2 or not sys.argv[1]:
        sys.exit(usage)
    return release(sys.argv[1])
