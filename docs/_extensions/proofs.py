"""Sphinx: links from each theorem to the code that uses it and the tests that check it, and back.

Names behind *Used by* and *Checked by* become links to pages with the source; where such a page or a docstring cites a
theorem, that becomes a link to the proof. The reference links to the same pages.
"""

from __future__ import annotations

import functools
import html
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from theorems import PROOFS, ROOT, Place, checks, definitions, theorems

PAGE = PROOFS.stem
_INDEX = {"Used by": definitions, "Checked by": checks}


def page_of(path: Path) -> str:
    """The name of the page that shows a file."""
    return f"code/{path.relative_to(ROOT).with_suffix('').as_posix()}"


def cited() -> Iterator[tuple[str, Place]]:
    """Every name that a theorem names, and where it is."""
    for theorem in theorems().values():
        for heading, index in _INDEX.items():
            for name in theorem.names(heading):
                yield from ((name, place) for place in index().get(name, [])[:1])


def link_names(app: Any, tree: nodes.document, page: str) -> None:
    """Names in the page of proofs become links to their source."""
    if page != PAGE or app.builder.format != "html":
        return
    for paragraph in list(tree.findall(nodes.paragraph)):
        index: dict[str, list[Place]] = {}
        for child in list(paragraph.children):
            if isinstance(child, nodes.emphasis):
                index = _INDEX.get(child.astext(), dict)()
            elif isinstance(child, nodes.literal) and child.astext() in index:
                place = index[child.astext()][0]
                target = f"{app.builder.get_relative_uri(page, page_of(place.path))}#line-{place.line}"
                paragraph.replace(child, nodes.reference("", "", child.deepcopy(), refuri=target, internal=True))


def source_of(module: str, name: str) -> str | None:
    """The page and line of a name's source, from the root of the site; None for what has none here."""
    value: Any = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    value = inspect.unwrap(getattr(value, "fget", value)) if callable(value) or isinstance(value, property) else None
    try:
        path, line = Path(inspect.getsourcefile(value) or "").resolve(), inspect.getsourcelines(value)[1]
    except (TypeError, OSError):
        return None
    return f"{page_of(path)}.html#line-{line}" if path in _shown() else None


@functools.cache
def _shown() -> frozenset[Path]:
    """Files that have a page: the library, and whatever a theorem names."""
    return frozenset((ROOT / "src" / "weightclip").rglob("*.py")) | {place.path for _, place in cited()}


def source_pages(app: Any) -> Iterator[tuple[str, dict[str, Any], str]]:
    """One page for each file of the library, and for each that a theorem names."""
    if app.builder.format != "html":
        return
    layout = HtmlFormatter(lineanchors="line", cssclass="highlight")
    for path in sorted(_shown()):
        page, name = page_of(path), html.escape(path.relative_to(ROOT).as_posix())
        back = app.builder.get_relative_uri(page, PAGE)
        body = _linked(highlight(path.read_text(), PythonLexer(), layout), back)
        yield (
            page,
            {"title": name, "body": f'<div class="source-page"><h1><code>{name}</code></h1>\n{body}</div>'},
            "page.html",
        )


def _linked(text: str, proofs: str) -> str:
    """The highlighted source with its citations as links."""

    def link(found: re.Match[str]) -> str:
        theorem = theorems().get(int(found[1]))
        return found[0] if theorem is None else f'<a href="{proofs}#{theorem.anchor}">{found[0]}</a>'

    return re.sub(r"Theorem (\d+)", link, text)


def link_theorems(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Citations in docstrings become links to the proofs."""
    del what, name, obj, options
    proofs = app.builder.get_relative_uri(app.env.docname, PAGE)

    def link(found: re.Match[str]) -> str:
        return f"`{found[0]} <{proofs}#{theorems()[int(found[1])].anchor}>`__"

    lines[:] = [re.sub(rf"{PAGE} Theorem (\d+)", link, line) for line in lines]
    lines[:] = [line if ">>>" in line else _without_substitutions(line) for line in lines]


def _without_substitutions(line: str) -> str:
    """Bars of sizes and absolute values, |V|, are no substitutions; inside literals they stay."""
    parts = line.split("``")
    return "``".join(part if i % 2 else part.replace("|", "\\|") for i, part in enumerate(parts))


def setup(app: Any) -> dict[str, bool]:
    app.connect("doctree-resolved", link_names)
    app.connect("html-collect-pages", source_pages)
    app.connect("autodoc-process-docstring", link_theorems)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
