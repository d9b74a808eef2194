"""Guides run, links lead somewhere, and files that the documentation names exist."""

from __future__ import annotations

import csv
import importlib
import inspect
import itertools
import math
import os
import re
from pathlib import Path

import pytest
from tools.theorems import slug

import weightclip as wc
from weightclip.cli._app import COMMANDS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)
TEXTS = [*PAGES, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "studies/README.md"))]
NO_GUIDES = {"images", "tabular", "method", "performance", "research", "notes/images", "notes/speed"}  # measurements
LONG = {"lora": ("peft", "transformers")}  # with WEIGHTCLIP_FULL=1 only: half a minute, and what they need
_FENCE = re.compile(r"^```(\w*).*?\n(.*?)^```", re.M | re.S)
_LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(?:#([\w-]+))?\)")
_NAMED = re.compile(r"`((?:src|studies|tests|docs|examples|benchmarks|tools|results|\.github)/[\w./-]*)`")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[str]:
    """The Python blocks of a page, in order."""
    return [code for language, code in _FENCE.findall(page.read_text()) if language == "python"]


def in_site(page: Path) -> str:
    """The name of a page in the site."""
    return page.relative_to(DOCS).with_suffix("").as_posix()


# pages with one line only (the start of the ledger in guarantees) show a call; every other page is run
GUIDES = [in_site(p) for p in PAGES if len("\n".join(blocks(p)).splitlines()) > 1 and in_site(p) not in NO_GUIDES]


def test_every_guide_is_among_those_that_run() -> None:
    expected = {"start", "epsilon", "bounds", "models", "opacus", "estimators", "vision", "text", "lora", "saving",
                "sharing", "auditing", "features"}  # fmt: skip
    assert all(len("\n".join(blocks(DOCS / f"{guide}.md")).splitlines()) > 10 for guide in expected)
    assert expected <= set(GUIDES) and sum(page.startswith("reference/") for page in GUIDES) >= 7


@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_runs_from_top_to_bottom(guide: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "\n".join(blocks(DOCS / f"{guide}.md"))
    for needed in LONG.get(guide, ()):
        if not os.environ.get("WEIGHTCLIP_FULL"):
            pytest.skip("long: WEIGHTCLIP_FULL=1")
        pytest.importorskip(needed)
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


_ENTRY = re.compile(
    r"^\.\. (?:auto(?:class|function|exception)|py:data|py:class|py:function):: (\w+)$|^\.\. currentmodule:: ([\w.]+)$",
    re.M,
)


def documented() -> set[str]:
    """Full names of everything in the reference."""
    found: set[str] = set()
    for page in sorted((DOCS / "reference").glob("*.md")):
        module = ""
        for name, other in _ENTRY.findall(page.read_text()):
            module = other or module
            if name:
                assert f"{module}.{name}" not in found, f"{name} is in the reference twice"
                found.add(f"{module}.{name}")
    return found


def test_every_public_name_is_in_the_reference_and_nothing_else() -> None:
    """Names of the door, and of every package at the door, under one name each."""
    shown = documented()
    missing = {name for name in wc._HOME if f"weightclip.{name}" not in shown} - {"PerRecordLoss"}  # among the losses
    for package in wc._PACKAGES:
        room = importlib.import_module(f"weightclip.{package}")
        names = {n for n, v in vars(room).items() if not n.startswith("_") and not inspect.ismodule(v)}
        names = set(getattr(room, "__all__", names))
        missing |= {
            f"{package}.{n}" for n in names - {"annotations"} - set(wc._HOME) if f"{room.__name__}.{n}" not in shown
        }
    assert missing == set()
    for full in shown:
        module, name = full.rsplit(".", 1)
        assert name in dir(importlib.import_module(module)), full


def test_every_command_is_in_the_reference() -> None:
    text = (DOCS / "reference" / "commands.md").read_text()
    assert [command for command in COMMANDS if f"| `weightclip {command} " not in text] == []


def table(name: str) -> list[dict[str, str]]:
    with (ROOT / "results" / name).open() as file:
        return list(csv.DictReader(file))


def test_numbers_of_the_readme_are_the_committed_ones() -> None:
    readme = (ROOT / "README.md").read_text()

    def row(begin: str) -> str:
        (line,) = [line for line in readme.splitlines() if line.startswith(f"| {begin}")]
        return line

    images = {
        (r["dataset"], r["model"], r["method"], r["epsilon"]): float(r["median"]) for r in table("images/accuracy.csv")
    }
    learned = "CIFAR-10, linear head on features learned"
    for begin, data, model, method, budgets in (
        (learned, "cifar10", "scattering+patches+grey+learned+linear", "lip-weights", "138"),
        (learned, "fashion_mnist", "scattering+patches+learned+linear", "lip-weights", "12"),
        ("CIFAR-10, linear head on fixed", "cifar10", "scattering+patches+grey+linear", "lip-weights", "138"),
        ("CIFAR-10, linear head on fixed", "cifar10", "scattering+patches+grey+linear", "dp-sgd", "138"),
        ("Fashion", "fashion_mnist", "scattering+patches+linear", "lip-weights", "123"),
        ("Fashion", "mnist", "scattering+linear", "lip-weights", "123"),
    ):
        assert " / ".join(f"{images[data, model, method, e]:.2f}" for e in budgets) in row(begin), (begin, method)
    figure = {(r["dataset"], r["method"], r["epsilon"]): r["median"] for r in table("figure/figure.csv")}
    for data, method in itertools.product(("mnist", "fashion_mnist"), ("joint", "opacus")):
        shown = " / ".join(figure[data, method, e] for e in "123")
        assert shown in row("the paper's ConvNet"), (data, method)
    tasks = {(r["task"], r["method"]): float(r["accuracy"]) for r in table("method/defaults_tasks.csv")}
    for task in {task for task, _ in tasks}:
        pair = " / ".join(f"{tasks[task, m]:.3f}".lstrip("0") for m in ("default", "Opacus"))
        assert pair in row("defaults without"), task
    compared = {
        r["estimator"]: r for r in table("estimators/compare.csv") if r["dataset"] == "adult" and r["epsilon"] == "1"
    }
    for name, text in (("LipDPClassifier", "Adult {:.1f} / AUC {:.1f}"), ("DP-EBM", "DP-EBM {:.1f} / {:.1f}")):
        shown = text.format(*(100 * float(compared[name][k]) for k in ("accuracy", "auc")))
        assert shown in row("`LipDPClassifier()`"), shown


def test_accuracy_and_time_of_the_same_mode_are_the_committed_ones() -> None:
    readme = (ROOT / "README.md").read_text()
    steps = {
        (r["model"], r["batch"], r["mode"], r["precision"]): float(r["ratio"])
        for r in table("bench/step.csv")
        if r["device"] == "NVIDIA H200"
    }
    text = {(r["part"], r["method"], r["epsilon"]): r for r in table("text/sst2.csv")}

    def shown(begin: str) -> list[str]:
        (line,) = [line for line in readme.splitlines() if line.startswith(f"| {begin}")]
        return [cell.replace("*", "").strip() for cell in line.split("|")[2:4]]

    def short(value: str | float) -> str:
        return f"{float(value):.3f}".lstrip("0")

    for begin, part in (("LoRA on MiniLM", "lora"), ("all of MiniLM", "full"), ("its last layer", "last")):
        rows = [text[part, method, "8"] for method in ("cap", "opacus")]
        assert shown(begin) == [f"{short(r['median'])}, {r['ratio']}" for r in rows], part
        (line,) = [line for line in readme.splitlines() if line.startswith(f"| {begin}")]
        assert f"without privacy {short(text[part, 'non-private', '']['median'])}" in line, part
        peaks = [text[part, *of]["peak_gib"] for of in (("cap", "8"), ("non-private", ""), ("opacus", "8"))]
        cap, plain, opacus = (f"{float(peak):.1f}" for peak in peaks)
        assert re.search(f"{cap}, {plain} and {opacus}( GiB)?[;.]", readme), part
    figure = {(r["dataset"], r["method"], r["epsilon"]): r for r in table("figure/figure.csv") if not r["changes"]}
    ours, theirs = (
        steps["convnet", "1024", "exact-joint-cap", "float32"],
        steps["convnet", "1024", "opacus-ghost", "float32"],
    )
    for begin, data in (("ConvNet (", "mnist"), ("the same, Fashion", "fashion_mnist")):
        for cell, method, ratio in zip(shown(begin), ("joint", "opacus"), (ours, theirs), strict=True):
            medians = " / ".join(f"{float(figure[data, method, e]['median']):.1f}" for e in "123")
            assert cell == f"{medians}, {ratio:.2f}", (data, method)
    below = readme[readme.index("In float32 the exact cap on WRN-16-4") :]
    for mode, words in (("exact-joint-cap", "{:.2f} to {:.2f} times"), ("opacus-hooks", "Opacus {:.2f} to {:.2f}")):
        assert words.format(*(steps["wrn-16-4", n, mode, "float32"] for n in ("1024", "256"))) in below, mode
    assert f"bf16 {steps['wrn-16-4', '1024', 'exact-joint-cap', 'bf16']:.2f};" in below
    assert f"{steps['encoder-base', '64', 'exact-joint-cap-graph', 'bf16']:.2f} times as one recorded graph" in below


def test_the_searches_find_what_they_look_for() -> None:
    text = "[a](b.md#theorem-1-x) `docs/nothing.md` [c](https://d.e)\n```python\nx = 1\n```\n"
    assert _LINK.findall(text) == [("b.md", "theorem-1-x")] and _NAMED.findall(text) == ["docs/nothing.md"]
    assert slug("Theorem 31. The ledger") == "theorem-31-the-ledger" and _FENCE.findall(text) == [("python", "x = 1\n")]
