"""Every internal link and anchor of the built documentation leads somewhere: ``python tools/check_links.py FOLDER``."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """Links and anchors of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and (name == "id" or (tag == "a" and name == "name")):
                self.anchors.add(value)
            elif value and name in ("href", "src"):
                self.links.add(value)


def broken(folder: Path) -> list[str]:
    """Links of all pages that lead nowhere, as "page -> link"."""
    found = (path for path in sorted(folder.rglob("*.html")) if "_static" not in path.parts)  # the theme's templates
    pages = {path.resolve(): Page(path.read_text()) for path in found}
    wrong = []
    for path, page in pages.items():
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue  # other places, mail, data
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            there = target.is_file() and target.is_relative_to(folder.resolve())
            anchor = unquote(parts.fragment)
            if not there or (anchor and target in pages and anchor not in pages[target].anchors):
                wrong.append(f"{path.relative_to(folder.resolve()).as_posix()} -> {link}")
    return wrong


def main() -> None:
    """Exit code 1 if a link is broken."""
    if len(sys.argv) != 2 or not Path(sys.argv[1], "index.html").is_file():
        sys.exit("usage: python tools/check_links.py FOLDER, which holds index.html")
    wrong = broken(Path(sys.argv[1]))
    print("\n".join([*wrong, f"{len(wrong)} broken links"]))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
