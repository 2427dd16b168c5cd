"""Names as a terminal can show them: characters that would move or colour it, or break a row, are written out."""

from __future__ import annotations

import re
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_IN_A_ROW = re.compile(rf"[\t\n]|{_CONTROL.pattern}")


def escaped(text: str, *, row: bool = False) -> str:
    r"""The text with `\x1b` for an escape; in a row of a table also with `\n` for a newline."""
    return (_IN_A_ROW if row else _CONTROL).sub(lambda found: _written(found[0]), text)


def printable(result: Any, *, row: bool = False) -> Any:
    """A result with nothing in it that a terminal would act on: the one place where names of others reach it.

    In a row of a table a newline is a name's, and written out; memfit's own lines there are the parts of a group.
    """
    result = result.__rich__() if hasattr(result, "__rich__") else result
    if isinstance(result, str):
        return escaped(result, row=row)
    if isinstance(result, Text):
        return _text(result, row=row)
    if isinstance(result, Group):
        return Group(*(printable(part, row=row) for part in result.renderables), fit=result.fit)
    if isinstance(result, Table):
        result.title, result.caption = printable(result.title), printable(result.caption)
        for column in result.columns:
            column._cells[:] = [printable(cell, row=True) for cell in column.cells]
    return result


def _text(text: Text, *, row: bool) -> Text:
    shown = escaped(text.plain, row=row)
    if shown == text.plain:
        return text
    copy = text.copy()
    copy.plain = shown
    return copy


def _written(character: str) -> str:
    return ascii(character)[1:-1]
