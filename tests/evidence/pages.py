"""Sections of docs/evidence.md: each between two marks, so that one is written without the others."""

from __future__ import annotations

from pathlib import Path

TITLE = "# Evidence: predictions beside published measurements\n"


def write_section(path: Path, name: str, text: str) -> None:
    """Put the text between the marks of this name, or at the end of a page that has none."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before = path.read_text() if path.exists() else TITLE
    section = f"{begin}\n{text.strip()}\n{end}"
    if begin in before:
        head, rest = before.split(begin, 1)
        path.write_text(head + section + rest.split(end, 1)[1])
    else:
        path.write_text(f"{before.rstrip()}\n\n{section}\n")
