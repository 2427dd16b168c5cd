"""Text of results: JSON to compare line by line, tables, counts, and guesses at misspelt names."""

from __future__ import annotations

import difflib
import io
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_WIDTH = 100
"""Columns where no terminal says how many it has."""
_DEPTH = 3
"""Below this many levels a value is on one line."""


def json_text(value: Any) -> str:
    """Lists of ops and parameters with an item to a line, everything smaller on one line, a newline at the end."""
    import msgspec  # not for `memfit --help`, which imports this module

    return _text(value, 0, lambda each: msgspec.json.encode(each).decode()) + "\n"


def _text(value: Any, depth: int, on_one_line: Callable[[Any], str]) -> str:
    items = value.values() if isinstance(value, dict) else value
    nested = isinstance(value, dict | list | tuple) and any(isinstance(each, dict | list | tuple) for each in items)
    if depth == _DEPTH or not (nested or (isinstance(value, dict) and value)):
        return on_one_line(value)
    if isinstance(value, dict):
        inside = [f"{on_one_line(key)}: {_text(each, depth + 1, on_one_line)}" for key, each in value.items()]
        begin, end = "{", "}"
    else:
        inside = [_text(each, depth + 1, on_one_line) for each in value]
        begin, end = "[", "]"
    margin = "  " * (depth + 1)
    lines = ",\n".join(margin + each for each in inside)
    return f"{begin}\n{lines}\n{margin[2:]}{end}"


def render_text(report: RenderableType) -> str:
    """Return a report as plain text, as wide as COLUMNS or the terminal says."""
    from rich.console import Console

    width = shutil.get_terminal_size((_WIDTH, 24)).columns
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as captured:
        console.print(report)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


class PrintedResult(ABC):
    """Base of results that print as their report, which `__rich__` asks the report room for."""

    __slots__ = ()

    @abstractmethod
    def __rich__(self) -> RenderableType: ...

    def __str__(self) -> str:
        return render_text(self.__rich__())


class PrintedDocument(PrintedResult):
    """Base of results that can also be written as JSON."""

    __slots__ = ()

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""

    def to_json(self) -> str:
        """Return `to_dict` as JSON text."""
        import msgspec

        return json_text(msgspec.to_builtins(self.to_dict()))


def edgeless_table(title: str | None = None) -> Table:
    """Return a table without edges; its columns are still to be added."""
    from rich.table import Table

    return Table(title=title, title_justify="left", show_edge=False, pad_edge=False)


def number_table(*names: str, title: str | None = None, left: int = 1, words: Collection[str] = ()) -> Table:
    """Return a table without edges: `left` columns of text, which fold, then columns of numbers, which do not.

    Columns whose names are in `words` are text too.
    """
    table = edgeless_table(title)
    for place, name in enumerate(names):
        if place < left or name in words:
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", no_wrap=True)
    return table


def caption_more(table: Table, rows: int, shown: int) -> None:
    """Say below a table how many rows are not shown."""
    if rows > shown:
        table.caption = f"and {rows - shown} more"
        table.caption_justify = "left"


def counted(number: int, name: str) -> str:
    """Return `1 unit`, `2 units`."""
    return f"{number} {name}" if number == 1 else f"{number} {name}s"


def close_names(name: str, names: Iterable[str], *, most: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return the names that may have been meant, the closest first."""
    return difflib.get_close_matches(name, list(names), n=most, cutoff=cutoff) if most else []


def did_you_mean(close: Iterable[str], otherwise: str) -> str:
    """Ask whether one of these was meant; say something else where there is none."""
    shown = " or ".join(dict.fromkeys(close))
    return f"did you mean {shown}?" if shown else otherwise
