"""The Python of a page of the documentation, in order, with what a reader is taken to have.

What a page does not show, because it is the reader's own (a model, a loader), stands in an HTML comment before the
block that needs it: `<!-- given: ... -->` with Python in it. `<!-- ranks: 2 -->` at the top of a page has all of its
code run by so many processes that torchrun starts; `<!-- needs: name -->` before a block says which module it cannot do
without.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
_PIECES = re.compile(
    r"<!-- (?P<kind>given|ranks|needs):\s*(?P<value>.*?)-->|^```(?:py|python)(?P<options>[^\n]*)\n(?P<code>.*?)^```",
    flags=re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Block:
    """Python of a page: shown, or given."""

    line: int
    code: str
    shown: bool


@dataclass(frozen=True, slots=True)
class Page:
    """All Python of one page, to be run in order in one namespace; `ranks` is how many processes run it."""

    path: Path
    blocks: tuple[Block, ...]
    ranks: int

    @property
    def name(self) -> str:
        """The page's path inside of the documentation."""
        return self.path.relative_to(DOCS).as_posix()

    def script(self) -> str:
        """Return all of it as one file, in which lines have the numbers of the page."""
        lines: list[str] = []
        for block in self.blocks:
            lines += [""] * (block.line - 1 - len(lines))
            lines += block.code.splitlines()
        return "\n".join(lines) + "\n"


def read_pages() -> list[Page]:
    """Return the pages that show Python."""
    pages = [_read(path) for path in sorted(DOCS.rglob("*.md"))]
    return [page for page in pages if any(block.shown for block in page.blocks)]


def _read(path: Path) -> Page:
    text = path.read_text()
    ranks = re.search(r"<!-- ranks: (\d+) -->", text)
    return Page(path, tuple(_blocks(text)), int(ranks[1]) if ranks else 1)


def _blocks(text: str) -> Iterator[Block]:
    missing = False
    for match in _PIECES.finditer(text):
        if match["kind"] == "needs":
            missing = importlib.util.find_spec(match["value"].strip()) is None
        elif match["kind"] == "given":
            line = text.count("\n", 0, match.start("value")) + 1
            yield Block(line, match["value"], shown=False)
        elif match["code"] is not None:
            if not missing:
                yield Block(text.count("\n", 0, match.start("code")) + 1, match["code"], shown=True)
            missing = False
