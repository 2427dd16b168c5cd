"""What is printed where: results on the standard output, everything else on the error output."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from typing import Any

from rich.console import Console, RenderableType

_WIDTH = 100
"""Columns where no terminal says how many it has."""


def result_console() -> Console:
    """The console for results."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        return Console(highlight=False, width=_WIDTH)
    return console


def show(result: RenderableType, *, soft_wrap: bool = False) -> None:
    """Print a result for people."""
    result_console().print(result, soft_wrap=soft_wrap)


def show_json(result: Any) -> None:
    """Print a result as one JSON document."""
    print(json_of(result), end="")


def json_of(result: Any) -> str:
    """A result as JSON, with a newline at its end."""
    if hasattr(result, "to_json"):
        text: str = result.to_json()
        return text if text.endswith("\n") else f"{text}\n"
    from memfit.plan.text import json_text

    return json_text(plain(result))


def plain(result: Any) -> Any:
    """A result as the values that JSON has."""
    import msgspec

    found = dataclasses.asdict(result) if dataclasses.is_dataclass(result) else result
    return msgspec.to_builtins(found)


def say(text: str, *, style: str = "dim") -> None:
    """Tell the user something that is no result."""
    Console(stderr=True).print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def say_problem(problem: str) -> None:
    """Tell the user what went wrong."""
    say(f"memfit: {problem}", style="red")


class Work:
    """Shows on a terminal what is being done, while it is being done."""

    def __init__(self, doing: str) -> None:
        self._doing = doing
        console = Console(stderr=True)
        self._spinner = console.status(f"{doing} …") if console.is_terminal else None

    def heard(self, more: str) -> None:
        """Say more of it."""
        if self._spinner is not None:
            self._spinner.update(f"{self._doing}: {more} …")

    def __enter__(self) -> Work:
        if self._spinner is not None:
            self._spinner.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._spinner is not None:
            self._spinner.stop()


def close_quietly() -> None:
    """After the reader of a pipe has gone: write the rest to nowhere, so that Python does not complain at its end."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
