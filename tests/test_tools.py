"""The scripts behind ``make test-torch``, ``test-install`` and ``test-full`` fit the repository as it is."""

from __future__ import annotations

import email
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import weightclip as wc

ROOT = Path(__file__).parents[1]


@pytest.fixture
def tools(monkeypatch):
    """The folder of the scripts on the path, as when one of them runs."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    yield
    for name in ("releases", "test_torch", "test_full", "dist", "check_links", "draw_concepts", "walk", "trace_step"):
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


def test_what_is_published_is_complete_and_runs_by_itself(tools, tmp_path):
    """Wheel from the source archive, installed into an empty folder, used outside the checkout."""
    pytest.importorskip("setuptools")
    import dist  # pyright: ignore[reportMissingImports]

    archive, wheel = dist.build(tmp_path / "dist")
    held = set(zipfile.ZipFile(wheel).namelist())
    assert "weightclip/py.typed" in held and {name.split("/")[0] for name in held} == {
        "weightclip", f"weightclip-{wc.__version__}.dist-info"}  # fmt: skip
    ours = {p.relative_to(ROOT / "src").as_posix() for p in (ROOT / "src" / "weightclip").rglob("*.py")}
    assert {name for name in held if name.endswith(".py")} == ours
    assert wheel.stat().st_size < 1_000_000
    with zipfile.ZipFile(wheel) as file:
        about = email.message_from_bytes(file.read(f"weightclip-{wc.__version__}.dist-info/METADATA"))
        typed = [n for n in file.namelist() if "/licenses/" in n]
    assert about["Version"] == wc.__version__ and {"table", "onnx"} <= set(about.get_all("Provides-Extra", []))
    assert {Path(name).name for name in typed} == {"LICENSE", "NOTICE"}
    with tarfile.open(archive) as file:
        names = {name.split("/", 1)[-1] for name in file.getnames()}
    assert {"LICENSE", "NOTICE", "README.md", "pyproject.toml", "src/weightclip/py.typed"} <= names

    pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--no-index", "--no-compile", "--target"]
    subprocess.run([*pip, str(tmp_path / "there"), str(wheel)], check=True)
    code = "import weightclip as wc; print(wc.__file__, wc.__version__, wc.PrivacyEngine().accountant)"
    settings = {**os.environ, "PYTHONPATH": str(tmp_path / "there")}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=tmp_path, env=settings, capture_output=True, text=True, check=True)
    place, version, accountant = run.stdout.split()
    assert Path(place).is_relative_to(tmp_path / "there") and (version, accountant) == (wc.__version__, "pld")


@pytest.mark.skipif(not os.environ.get("WEIGHTCLIP_FULL"), reason="minutes and downloads: WEIGHTCLIP_FULL=1")
def test_the_wheel_in_an_empty_environment():
    """README's example and an estimator, with nothing but what pip brings."""
    subprocess.run([sys.executable, str(ROOT / "tools" / "fresh_install.py"), "newest"], check=True)


def test_pictures_are_drawn_from_committed_results(tools, tmp_path):
    import draw_concepts  # pyright: ignore[reportMissingImports]

    draw_concepts.main(tmp_path)
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in (ROOT / "docs" / "pictures").iterdir()}
    assert all(5_000 < (tmp_path / name).stat().st_size < 100_000 for name in drawn)


def test_broken_links_of_the_built_site_are_found(tools, tmp_path):
    import check_links  # pyright: ignore[reportMissingImports]

    (tmp_path / "sub").mkdir()
    (tmp_path / "index.html").write_text(
        '<h1 id="top">x</h1><a href="sub/a.html#there">1</a><a href="#top">2</a><a href="https://e.org/x">3</a>'
    )
    (tmp_path / "sub" / "a.html").write_text('<p id="there"></p><a href="../index.html">back</a>')
    assert check_links.broken(tmp_path) == []
    page = '<a href="none.html">1</a><a href="../index.html#gone">2</a><img src="p.png"><a href="../../out.html">3</a>'
    (tmp_path / "sub" / "a.html").write_text(f'<p id="there"></p>{page}')
    assert [line.split(" -> ")[1] for line in check_links.broken(tmp_path)] == [
        "../../out.html", "../index.html#gone", "none.html", "p.png"]  # fmt: skip


def test_the_walk_visits_pages_that_exist(tools):
    import walk  # pyright: ignore[reportMissingImports]

    shown = (ROOT / "docs" / "walk.md").read_text()
    table = [line for line in shown.splitlines() if line.startswith("| ") and " s |" in line]
    assert len(table) == len(walk.STATIONS)
    for code in (walk._ROWS, walk._TRAINING):
        compile(code, "walk", "exec")


@pytest.mark.parametrize("fused", [False, True], ids=["loop", "fused step"])
def test_a_private_step_runs_through_few_files(tools, fused):
    """A reader who follows a step opens at most 15 files; the fused step has one of its own on top."""
    import trace_step  # pyright: ignore[reportMissingImports]

    calls, _ = trace_step.trace_step(fused)
    assert 5 < len(calls) <= 15 + fused, sorted(calls)
