"""The site builds without a warning, its links lead somewhere, and theorems lead to code and tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tools.check_links import Page, broken
from tools.theorems import PROOFS, ROOT, theorems


@pytest.mark.skipif(not os.environ.get("WEIGHTCLIP_FULL"), reason="half a minute: WEIGHTCLIP_FULL=1, or make docs")
def test_the_site(tmp_path: Path) -> None:
    for needed in ("sphinx", "sphinx_book_theme", "myst_parser"):
        pytest.importorskip(needed)
    build = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-b",
        "html",
        str(ROOT / "docs"),
        str(tmp_path),
    ]
    subprocess.run(build, check=True)
    assert broken(tmp_path) == []
    proofs = Page((tmp_path / f"{PROOFS.stem}.html").read_text())
    named = {name for t in theorems().values() for heading in ("Used by", "Checked by") for name in t.names(heading)}
    assert len([link for link in proofs.links if link.startswith("code/")]) > 0.9 * len(named)  # some share a line
    release = Page((tmp_path / "code/src/weightclip/noise/_release.html").read_text())
    assert any(f"{PROOFS.stem}.html#theorem-" in link for link in release.links)
