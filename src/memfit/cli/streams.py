"""The standard output for results alone: what other code prints while a command runs goes to the error output."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TextIO

from memfit.errors import StateError

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
    """The stream to write results to."""
    return _kept[-1] if _kept else sys.stdout


@contextlib.contextmanager
def writing_results() -> Iterator[None]:
    """Results that are written in here are all written when it ends, or it is said why not."""
    try:
        yield
        result_stream().flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise StateError(f"the result cannot be written to the standard output: {error.strerror}") from error


def _stream_for_results() -> tuple[TextIO, bool]:
    """A stream to where the standard output leads now, and whether it was opened here."""
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
    """Lead what is written by number to the error output; a copy of where it led before, None when to nowhere."""
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
    """What Python and C still hold for the standard output goes where it was meant to go when it was written."""
    import ctypes

    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.__stdout__.flush()  # type: ignore[union-attr]
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).fflush(None)
