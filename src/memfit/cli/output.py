"""What is printed where: results on the standard output, everything else on the error output."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from memfit.cli.options import FileOptions
from memfit.cli.problems import for_file
from memfit.errors import StateError
from memfit.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memfit.analysis import Lever, Report
    from memfit.plans import DeviceSearch, MeshSearch, Search


_WIDTH = 100
"""Columns where no terminal says how many it has."""


def result_console() -> Console:
    """Return the console for results, as wide as the terminal that shows them, whatever the other streams lead to."""
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
        result_console().print(make_printable(result), soft_wrap=soft_wrap)


def show_result(result: Any, *, json: bool) -> None:
    """Print a result as a JSON document, or for people."""
    if json:
        show_json(result)
    else:
        show(result)


def show_text(text: str) -> None:
    """Print a result that is text for people."""
    _write(escape(text))


def show_json(result: Any) -> None:
    """Print a result as one JSON document."""
    _write(to_json(result))


def _write(text: str) -> None:
    with writing_results():
        result_stream().write(text if text.endswith("\n") else f"{text}\n")


def to_json(result: Any) -> str:
    """Return a result as JSON, with a newline at its end; imports no room that is not loaded already."""
    if isinstance(result, str):
        return result if result.endswith("\n") else f"{result}\n"
    if hasattr(result, "to_json"):
        return to_json(result.to_json())
    import msgspec

    return msgspec.json.format(msgspec.json.encode(plain(result)), indent=2).decode() + "\n"


def plain(result: Any) -> Any:
    """Return a result as the values that JSON has."""
    import msgspec

    found = dataclasses.asdict(result) if dataclasses.is_dataclass(result) else result
    return msgspec.to_builtins(found)


def say(text: str, *, style: str = "dim") -> None:
    """Tell the user something that is no result."""
    Console(stderr=True).print(escape(text), style=style, highlight=False, markup=False, soft_wrap=True)


def say_problem(problem: str) -> None:
    """Tell the user what went wrong."""
    say(f"memfit: {problem}", style="red")


def close_quietly() -> None:
    """Discard further output once the reader of a pipe has gone, so that Python does not complain at exit."""
    with contextlib.suppress(AttributeError, OSError, ValueError), open(os.devnull, "wb") as nowhere:
        if sys.stdout.fileno() == 1:
            os.dup2(nowhere.fileno(), 1)


# The standard output for results alone: what other code prints goes to the error output


_STANDARD_OUTPUT, _ERROR_OUTPUT = 1, 2
_kept: list[TextIO] = []
"""Where results go, while a command runs."""


@contextlib.contextmanager
def only_results(*, to_the_end: bool) -> Iterator[None]:
    """Keep the standard output for results, whatever the step's own code, its libraries and its children print.

    `to_the_end`: of the program, so that what other code prints when it exits is no part of a document either.
    """
    if sys.stdout is not None:
        sys.stdout.flush()
    stream, opened = _stream_for_results()
    before = _standard_output_to_errors()
    stdout, sys.stdout = sys.stdout, sys.stderr
    _kept.append(stream)
    try:
        yield
    finally:
        _kept.pop()
        if opened:
            with contextlib.suppress(OSError):
                stream.close()
        if not to_the_end:
            _flush_what_others_wrote()
            sys.stdout = stdout
            if before is not None:
                os.dup2(before, _STANDARD_OUTPUT)
        if before is not None:
            os.close(before)


def result_stream() -> TextIO:
    """Return the stream to write results to."""
    return _kept[-1] if _kept else sys.stdout


@contextlib.contextmanager
def writing_results() -> Iterator[None]:
    """Flush results of the block at its end, or raise the reason why they could not be written."""
    try:
        yield
        result_stream().flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise StateError(f"the result cannot be written to the standard output: {error.strerror}") from error


def _stream_for_results() -> tuple[TextIO, bool]:
    """Return a stream to where the standard output leads now, and whether it was opened here."""
    stdout = sys.stdout
    if stdout is None:
        return open(os.devnull, "w"), True
    try:
        number = stdout.fileno()
    except (AttributeError, OSError, ValueError):  # one that only Python knows, as tests have
        return stdout, False
    if number != _STANDARD_OUTPUT:
        return stdout, False
    return open(os.dup(number), "w", encoding=stdout.encoding, errors=stdout.errors), True


def _standard_output_to_errors() -> int | None:
    """Redirect file descriptor 1 to the error output; return a copy of where it led before, None when to nowhere."""
    try:
        before = os.dup(_STANDARD_OUTPUT)
    except OSError:
        return None
    try:
        os.dup2(_ERROR_OUTPUT, _STANDARD_OUTPUT)
    except OSError:  # there is no error output
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), _STANDARD_OUTPUT)
    return before


def _flush_what_others_wrote() -> None:
    """Flush what Python and C still hold for the standard output to where it led when they wrote it."""
    import ctypes

    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.__stdout__.flush()  # type: ignore[union-attr]
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).fflush(None)


# Names as a terminal can show them: control characters are written out


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_IN_A_ROW = re.compile(rf"[\t\n]|{_CONTROL.pattern}")


def escape(text: str, *, row: bool = False) -> str:
    r"""Return the text with `\x1b` for an escape; in a row of a table also with `\n` for a newline."""
    return (_IN_A_ROW if row else _CONTROL).sub(lambda found: _written(found[0]), text)


def make_printable(result: Any, *, row: bool = False) -> Any:
    """Return a result without control characters: the one place where names from other code reach a terminal.

    In a row of a table a newline is a name's, and written out; memfit's own lines there are the parts of a group.
    """
    result = result.__rich__() if hasattr(result, "__rich__") else result
    if isinstance(result, str):
        return escape(result, row=row)
    if isinstance(result, Text):
        return _text(result, row=row)
    if isinstance(result, Group):
        return Group(*(make_printable(part, row=row) for part in result.renderables), fit=result.fit)
    if isinstance(result, Table):
        result.title, result.caption = make_printable(result.title), make_printable(result.caption)
        for column in result.columns:
            column._cells[:] = [make_printable(cell, row=True) for cell in column.cells]
    return result


def _text(text: Text, *, row: bool) -> Text:
    shown = escape(text.plain, row=row)
    if shown == text.plain:
        return text
    copy = text.copy()
    copy.plain = shown
    return copy


def _written(character: str) -> str:
    return ascii(character)[1:-1]


# The files that show a report


def write_search(found: Search | MeshSearch | DeviceSearch, path: Path | None) -> None:
    """Write the page about a search where one is wanted."""
    if path is None:
        return
    from memfit.plans import MeshSearch
    from memfit.report import write_search_page

    assert not isinstance(found, MeshSearch), "there is no page about meshes"
    with Progress("drawing the page"), for_file("--html"):
        write_search_page(found, path)
    say(f"wrote {path}, open it in a browser")


def write_files(files: FileOptions, report: Report, levers: Sequence[Lever] = ()) -> None:
    """Write what was asked for, and say so; levers are shown on the page and in the Markdown."""
    from memfit.report import to_markdown, to_torch_policy, write_page, write_perfetto, write_snapshot

    if files.html is not None:
        with Progress("drawing the page"), for_file("--html"):
            write_page(report, files.html, levers=levers)
        say(f"wrote {files.html}, open it in a browser")
    if files.perfetto is not None:
        with for_file("--perfetto"):
            write_perfetto(report, files.perfetto)
        say(f"wrote {files.perfetto}, open it at ui.perfetto.dev")
    if files.snapshot is not None:
        with for_file("--snapshot"):
            write_snapshot(report, files.snapshot)
        say(f"wrote {files.snapshot}, open it at pytorch.org/memory_viz")
    if files.markdown is not None:
        write_text("--markdown", files.markdown, to_markdown(report, levers))
    if files.torch_policy is not None and report.plan is not None:
        write_text("--torch-policy", files.torch_policy, to_torch_policy(report.plan))


def write_text(option: str, path: Path, text: str) -> None:
    """Write the file of an option, and say so."""
    from memfit.files import write_whole

    with for_file(option):
        write_whole(path, text.encode(), path.name)
    say(f"wrote {path}")
