"""Every citation of the proofs resolves, and every theorem names code and tests that exist."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tools.theorems import PROOFS, ROOT, checks, definitions, sections, theorems

_TEXT = {".py", ".md", ".toml", ".yml", ".yaml", ".cff"}
_GAP = r"(?:[\s#]|\*\*)+"  # citations may run over the end of a line, inside a comment too
_CITATION = re.compile(
    rf"SOUNDNESS(?:\.md)?,?{_GAP}(?P<kind>Theorems?|sections?|§)?\s*"
    r"(?P<numbers>\d+(?:\.\d+)?(?:(?:, | and | to )\d+(?:\.\d+)?)*)"
    rf"(?:,{_GAP}(?:(?P<what>rule|step|condition|assumption){_GAP}(?P<label>\w+)|(?P<roman>i{{1,3}}|iv)\b"
    r"|\"(?P<quoted>[^\"]+)\")|\s\((?P<letter>[a-e])\))?"
)


@functools.cache
def texts() -> tuple[Path, ...]:
    """Every file in which a citation may stand."""
    folders = [
        ROOT / name for name in ("src", "studies", "tests", "docs", "examples", "benchmarks", "tools", ".github")
    ]
    files = [path for folder in folders if folder.is_dir() for path in folder.rglob("*") if path.suffix in _TEXT]
    files += [path for path in ROOT.iterdir() if path.suffix in _TEXT]
    return tuple(path for path in files if "_build" not in path.parts and path != Path(__file__))


def problems(text: str) -> list[str]:
    """What is wrong with the citations of a text."""
    wrong = []
    for place in re.finditer(r"SOUNDNESS(?![\w-])", text):
        found = _CITATION.match(text, place.start())
        if found is None:
            whole_line = text[place.start() - 1 : place.end() + 1] == "\nSOUNDNESS\n"  # an entry of a table of contents
            if not whole_line and not text.startswith("SOUNDNESS.md", place.start()):
                wrong.append(f"no section in {text[place.start() : place.start() + 40]!r}")
            continue
        wrong += [f"{why} ({found.group().split()})" for why in _unresolved(found)]
    return wrong


def _unresolved(found: re.Match[str]) -> Iterator[str]:
    known = theorems() if (found["kind"] or "").startswith("Theorem") else sections()
    for number in re.findall(r"[\d.]+", found["numbers"]):
        whole, _, rule = number.partition(".")
        if int(whole) not in known:
            yield f"there is no {found['kind'] or 'section'} {whole}"
        elif rule and f"\n{rule}. **" not in sections()[int(whole)]:
            yield f"section {whole} has no rule {rule}"
    if known is not sections():
        return
    body = sections().get(int(re.findall(r"\d+", found["numbers"])[-1]), "")
    if found["what"] in ("rule", "step") and f"\n{found['label']}. **" not in body:
        yield f"no rule {found['label']}"
    item = found["label"] if found["what"] in ("condition", "assumption") else None
    label = found["letter"] or found["roman"] or item
    if label and f"**({label})**" not in body:
        yield f"no item ({label})"
    if found["quoted"] and found["quoted"].lower() not in body.lower():
        yield f"it does not speak of {found['quoted']!r}"


def test_citations_resolve() -> None:
    found = {path.relative_to(ROOT).as_posix(): problems(path.read_text()) for path in texts()}
    assert {path: wrong for path, wrong in found.items() if wrong} == {}
    cited = sum(len(_CITATION.findall(path.read_text())) for path in texts() if "src" in path.parts)
    assert cited >= 40, "the search no longer finds citations"


def test_the_search_finds_what_is_wrong() -> None:
    right = ["SOUNDNESS section 7", "SOUNDNESS\n    # section 6)", "SOUNDNESS 7 (a)", "SOUNDNESS, sections 1.5 and 3",
             "docs/SOUNDNESS.md", "SOUNDNESS Theorem 22", 'SOUNDNESS, section 3, "Conv"', "SOUNDNESS section 7, iii",
             "SOUNDNESS section 1, rule 4", "SOUNDNESS section 7, condition c"]  # fmt: skip
    wrong = ["SOUNDNESS section 13", "SOUNDNESS Theorem 99", "SOUNDNESS 7 (a) and SOUNDNESS 5 (a)", "SOUNDNESS says so",
             "SOUNDNESS, sections 1.9 and 3", 'SOUNDNESS section 3, "Cooking"', "SOUNDNESS section 2, iii",
             "SOUNDNESS section 1, rule 8", "SOUNDNESS section 6, condition c"]  # fmt: skip
    assert [text for text in right if problems(text)] == []
    assert [text for text in wrong if len(problems(text)) == 1] == wrong


def test_sections_and_theorems_are_numbered_in_order() -> None:
    assert list(sections()) == list(range(1, 13))
    assert list(theorems()) == list(range(1, len(theorems()) + 1))
    assert len(theorems()) >= 30


@pytest.mark.parametrize("number", theorems())
def test_a_theorem_is_proved_used_and_checked(number: int) -> None:
    theorem = theorems()[number]
    assert theorem.text.count("*Proof.*") == 1 and theorem.text.count("∎") == 1
    assert theorem.text.index("*Proof.*") < theorem.text.index("∎") < theorem.text.index("*Used by*")
    used, checked = theorem.names("Used by"), theorem.names("Checked by")
    assert used and checked
    assert [name for name in used if name not in definitions()] == [], "no such code"
    assert [name for name in checked if name not in checks()] == [], "no such test"


@pytest.mark.parametrize("number", theorems())
def test_code_that_rests_on_a_theorem_says_so(number: int) -> None:
    """At least one of the files that the theorem names cites it, or its section."""
    theorem = theorems()[number]
    files = {place.path for name in theorem.names("Used by") for place in definitions().get(name, [])}
    cited = [m for path in files for m in _CITATION.finditer(path.read_text())]
    wanted = {"Theorem": {number}, "section": {theorem.section}}
    assert any(
        int(whole) in wanted["Theorem" if (m["kind"] or "").startswith("Theorem") else "section"]
        for m in cited for whole in re.findall(r"\d+", m["numbers"])
    ), f"none of {sorted(path.name for path in files)} cites Theorem {number} or section {theorem.section}"  # fmt: skip


def test_theorems_mentioned_on_the_page_exist() -> None:
    mentioned = {int(n) for n in re.findall(r"(?<!### )Theorems? (\d+)(?!\. [A-Z].*\n\n)", PROOFS.read_text())}
    assert mentioned <= set(theorems())


def test_the_trusted_core_is_named_by_code_that_exists() -> None:
    text = (ROOT / "docs" / "guarantees.md").read_text()
    table = text[text.index("### What is trusted") :].split("\n\n")[1]
    names = re.findall(r"`(\w+)`", "\n".join(row.split("|")[1] for row in table.splitlines()))
    assert len(names) >= 10 and [name for name in names if name not in definitions()] == []


def test_the_map_of_the_code_names_code_that_exists() -> None:
    names = re.findall(r"`([A-Z]\w+(?:\.\w+)?)`", (ROOT / "docs" / "ARCHITECTURE.md").read_text())
    assert len(names) >= 8 and [name for name in names if name not in definitions()] == []
