"""What is printed where: results on the standard output, everything else on the error output."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from typing import Any

from rich.console import Console, RenderableType

from memfit.cli.printable import escaped, printable
from memfit.cli.streams import result_stream, writing_results

_WIDTH = 100
"""Columns where no terminal says how many it has."""


def result_console() -> Console:
    """The console for results, as wide as the terminal that shows them, whatever the other streams lead to."""
    stream = result_stream()
    console = Console(file=stream, highlight=False)
    if "COLUMNS" in os.environ:
        return console
    width = console.width if console.is_terminal else _WIDTH
    with contextlib.suppress(OSError, ValueError):
        width = os.get_terminal_size(stream.fileno()).columns or width
    return Console(file=stream, highlight=False, width=width)


def show(result: RenderableType, *, soft_wrap: bool = False) -> None:
    """Print a result for people."""
    with writing_results():
        result_console().print(printable(result), soft_wrap=soft_wrap)


def show_text(text: str) -> None:
    """Print a result that is text for people."""
    _write(escaped(text))


def show_json(result: Any) -> None:
    """Print a result as one JSON document."""
    _write(to_json(result))


def _write(text: str) -> None:
    with writing_results():
        result_stream().write(text if text.endswith("\n") else f"{text}\n")


def to_json(result: Any) -> str:
    """A result as JSON, with a newline at its end; no room is imported for it that is not there already."""
    if isinstance(result, str):
        return result if result.endswith("\n") else f"{result}\n"
    if hasattr(result, "to_json"):
        return to_json(result.to_json())
    import msgspec

    return msgspec.json.format(msgspec.json.encode(plain(result)), indent=2).decode() + "\n"


def plain(result: Any) -> Any:
    """A result as the values that JSON has."""
    import msgspec

    found = dataclasses.asdict(result) if dataclasses.is_dataclass(result) else result
    return msgspec.to_builtins(found)


def say(text: str, *, style: str = "dim") -> None:
    """Tell the user something that is no result."""
    Console(stderr=True).print(escaped(text), style=style, highlight=False, markup=False, soft_wrap=True)


def say_problem(problem: str) -> None:
    """Tell the user what went wrong."""
    say(f"memfit: {problem}", style="red")


def close_quietly() -> None:
    """After the reader of a pipe has gone: write the rest to nowhere, so that Python does not complain at its end."""
    with contextlib.suppress(AttributeError, OSError, ValueError), open(os.devnull, "wb") as nowhere:
        if sys.stdout.fileno() == 1:
            os.dup2(nowhere.fileno(), 1)
