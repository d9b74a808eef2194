"""Builds what is published, source archive and wheel: ``python tools/dist.py [FOLDER]`` (dist/ by default).

From a copy of the sources, so that nothing an older build left in the checkout gets in; and the wheel from the source
archive, so that the archive is known to hold everything. Needs setuptools, and no network.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from releases import ROOT

FILES = ("pyproject.toml", "README.md", "LICENSE", "NOTICE")
_BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"


def copy_sources(target: Path) -> None:
    """What a build needs, without caches."""
    shutil.copytree(ROOT / "src", target / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in FILES:
        shutil.copy(ROOT / name, target / name)


def build(target: Path) -> tuple[Path, Path]:
    """Source archive and wheel, in ``target``."""
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        copy_sources(Path(folder) / "source")
        _run("build_sdist", Path(folder) / "source", target)
        (archive,) = target.glob("*.tar.gz")
        with tarfile.open(archive) as file:
            file.extractall(Path(folder) / "unpacked", filter="data")
        (unpacked,) = (Path(folder) / "unpacked").iterdir()
        _run("build_wheel", unpacked, target)
    (wheel,) = target.glob("*.whl")
    return archive, wheel


def _run(what: str, source: Path, target: Path) -> None:
    settings = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    subprocess.run([sys.executable, "-c", _BUILD, what, str(target.resolve())], cwd=source, env=settings, check=True,
                   capture_output=True)  # fmt: skip


def main() -> None:
    """Build into an empty folder."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dist"
    if target.is_dir() and any(target.iterdir()):
        sys.exit(f"{target} is not empty: remove it first.")
    for path in build(target):
        print(f"{path} ({path.stat().st_size / 1024:.0f} KiB)")


if __name__ == "__main__":
    main()
