"""Checks a built site: links, anchors and images lead somewhere, and nothing is loaded from the network.

python tests/docs/built_site.py site
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
"""Tags whose attribute a browser loads by itself."""


class Page(HTMLParser):
    """The anchors of a page, where its links lead and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {given[name] or "" for name in ("id", "name") if name in given}
        if tag == "a" and given.get("href") is not None:
            self.links.append(given["href"] or "")
        elif tag in LOADED and given.get(LOADED[tag]):
            self.loaded.append(given[LOADED[tag]] or "")


def find_faults(site: Path) -> list[str]:
    """Return what is wrong, one line each."""
    pages = {path: Page(path.read_text()) for path in sorted(site.resolve().rglob("*.html"))}
    faults = []
    for path, page in pages.items():
        for link in (*page.links, *page.loaded):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            place = (
                site.resolve() / parts.path.lstrip("/")
                if parts.path.startswith("/")
                else path.parent / unquote(parts.path)
            )
            goal = place.resolve() if parts.path else path
            goal = goal / "index.html" if goal.is_dir() else goal
            if not goal.exists():
                faults.append(f"{path.name}: {link} does not exist")
            elif parts.fragment and goal in pages and unquote(parts.fragment) not in pages[goal].anchors:
                faults.append(f"{path.name}: {link} has no such anchor")
        faults += [f"{path.name}: loads {url}" for url in page.loaded if urlsplit(url).netloc]
    for sheet in sorted(site.rglob("*.css")):
        loaded = re.findall(r"(?:@import|url\()\s*[\"'(]*((?:https?:)?//[^\"')]+)", sheet.read_text())
        faults += [f"{sheet.name}: loads {url}" for url in loaded]
    if not (site / "search" / "search_index.js").exists():
        faults.append("there is no index to search in from disk")
    return faults


if __name__ == "__main__":
    found = find_faults(Path(sys.argv[1]))
    sys.exit("\n".join(found) if found else None)
