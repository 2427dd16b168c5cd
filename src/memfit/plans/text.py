"""JSON that people can read and compare line by line."""

from __future__ import annotations

from typing import Any

import msgspec

_DEPTH = 3
"""Below this many levels a value is on one line."""


def json_text(value: Any) -> str:
    """Lists of ops and parameters with an item to a line, everything smaller on one line, a newline at the end."""
    return _text(value, 0) + "\n"


def _text(value: Any, depth: int) -> str:
    items = value.values() if isinstance(value, dict) else value
    nested = isinstance(value, dict | list | tuple) and any(isinstance(each, dict | list | tuple) for each in items)
    if depth == _DEPTH or not (nested or (isinstance(value, dict) and value)):
        return msgspec.json.encode(value).decode()
    if isinstance(value, dict):
        inside = [f"{_text(key, _DEPTH)}: {_text(each, depth + 1)}" for key, each in value.items()]
        begin, end = "{", "}"
    else:
        inside = [_text(each, depth + 1) for each in value]
        begin, end = "[", "]"
    margin = "  " * (depth + 1)
    lines = ",\n".join(margin + each for each in inside)
    return f"{begin}\n{lines}\n{margin[2:]}{end}"
