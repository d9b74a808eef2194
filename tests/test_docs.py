"""Guides run, links lead somewhere, and files that the documentation names exist."""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)
TEXTS = [*PAGES, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "studies/README.md"))]
GUIDES = ["auditing", "bounds", "epsilon", "estimators", "features", "models", "opacus", "saving"]
_FENCE = re.compile(r"^```(\w*).*?\n(.*?)^```", re.M | re.S)
_LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(?:#([\w-]+))?\)")
_NAMED = re.compile(r"`((?:src|studies|tests|docs|examples|benchmarks|tools|results|\.github)/[\w./-]*)`")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[str]:
    """The Python blocks of a page, in order."""
    return [code for language, code in _FENCE.findall(page.read_text()) if language == "python"]


def slug(heading: str) -> str:
    """The anchor that Sphinx and GitHub give a heading."""
    plain = re.sub(r"[^\w\- ]", "", re.sub(r"`|\*", "", heading).strip().lower())
    return plain.replace(" ", "-")


@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_runs_from_top_to_bottom(guide: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "\n".join(blocks(DOCS / f"{guide}.md"))
    assert len(code.splitlines()) > 10
    monkeypatch.chdir(tmp_path)
    exec(compile(code, f"docs/{guide}.md", "exec"), {"__name__": guide})


@pytest.mark.parametrize("page", TEXTS, ids=name)
def test_python_in_the_documentation_is_python(page: Path) -> None:
    for code in blocks(page):
        if ">>>" not in code:  # doctests are run by themselves
            compile(code, name(page), "exec")


@pytest.mark.parametrize("page", TEXTS, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for target, anchor in _LINK.findall(_FENCE.sub("", page.read_text())):
        path = page.parent / target
        if not path.exists():
            wrong.append(target)
        elif anchor and anchor not in map(slug, re.findall(r"^#+ (.+)$", path.read_text(), re.M)):
            wrong.append(f"{target}#{anchor}")
    assert wrong == []


@pytest.mark.parametrize("page", TEXTS, ids=name)
def test_named_files_exist(page: Path) -> None:
    named = _NAMED.findall(page.read_text())  # from the root of the repository, or beside the page
    assert [path for path in named if not (ROOT / path).exists() and not (page.parent / path).exists()] == []


def test_the_table_of_defaults_is_the_committed_one() -> None:
    with (ROOT / "results/method/defaults_tasks.csv").open() as file:
        rows = list(csv.DictReader(file))
    text = (DOCS / "bounds.md").read_text()
    for task in {row["task"] for row in rows}:
        found = {row["method"]: float(row["accuracy"]) for row in rows if row["task"] == task}
        shown = [found[name] for name in ("default", "layer caps", "weights", "Opacus")]
        cells = ["refused" if math.isnan(value) else f"{value:.3f}" for value in shown]
        assert f"| {task} | {' | '.join(cells)} |" in text


def test_the_table_of_ranks_is_the_committed_one() -> None:
    with (ROOT / "results/bench/ranks.csv").open() as file:
        rows = {(r["model"], r["batch"], r["ranks"], r["what"]): r for r in csv.DictReader(file)}
    text, whats = (DOCS / "scale.md").read_text(), ("plain", "private", "private, integer sums", "exchange", "noise")
    for model, batch, ranks in {key[:3] for key in rows}:
        found = [rows[model, batch, ranks, what] for what in whats]
        cells = [float(row["cpu_s"]) for row in found]
        cells.insert(2, float(found[1]["model_s"]))
        assert f"| {model} | {batch} | {ranks} | {' | '.join(f'{1e3 * cell:.1f}' for cell in cells)} |" in text


def test_the_table_beside_opacus_is_the_committed_one() -> None:
    with (ROOT / "results/method/opacus_tasks.csv").open() as file:
        rows = list(csv.DictReader(file))
    text, methods = (DOCS / "opacus.md").read_text(), ("weightclip", "Opacus", "Opacus ghost")
    for task in {row["task"] for row in rows}:

        def mean(column: str, method: str, task: str = task) -> float:
            found = [float(r[column]) for r in rows if (r["task"], r["method"]) == (task, method)]
            return sum(found) / len(found)

        shown = [mean("accuracy", method) for method in methods[:2]]
        cells = ["" if math.isnan(value) else f"{value:.3f}" for value in shown]
        cells += [f"{mean('ms_per_step', method):.1f}" for method in methods]
        cells += [f"{mean('extra_mib', method):.0f}" for method in methods]
        assert f"| {task} | {' | '.join(cells)} |" in text
    seeds = {len({r["seed"] for r in rows if (r["task"], r["method"]) == key}) for key in
             {(r["task"], r["method"]) for r in rows}}  # fmt: skip
    assert f"{seeds.pop()} seeds" in text and not seeds


def test_the_map_shows_every_room() -> None:
    shown = set(re.findall(r"`src/weightclip/(\w+)/`", (DOCS / "ARCHITECTURE.md").read_text()))
    rooms = {path.parent.name for path in (ROOT / "src" / "weightclip").glob("*/__init__.py")}
    assert shown == rooms


def test_every_page_has_its_place() -> None:
    listed = re.findall(r"```\{toctree\}\n(?::.*\n)*((?:[\w/-]+\n)+)```", (DOCS / "index.md").read_text())
    placed = [page for part in listed for page in part.split()]
    assert sorted(placed) == sorted(
        p.relative_to(DOCS).with_suffix("").as_posix() for p in PAGES if p.name != "index.md"
    )


def test_the_searches_find_what_they_look_for() -> None:
    text = "[a](b.md#theorem-1-x) `docs/nothing.md` [c](https://d.e)\n```python\nx = 1\n```\n"
    assert _LINK.findall(text) == [("b.md", "theorem-1-x")] and _NAMED.findall(text) == ["docs/nothing.md"]
    assert slug("Theorem 31. The ledger") == "theorem-31-the-ledger" and _FENCE.findall(text) == [("python", "x = 1\n")]
