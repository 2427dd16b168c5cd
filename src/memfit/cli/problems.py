"""What the user is told when something is wrong: the option it came from, and what to write instead."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator
from pathlib import Path

from memfit.errors import InputError

DONE, FAILED, USAGE, INFEASIBLE, STOPPED = 0, 1, 2, 3, 130
"""Exit codes."""
_STANDARD_OUTPUT = ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")
_EXAMPLES = {
    "--html": "report.html",
    "--perfetto": "step.perfetto.json",
    "--snapshot": "step.pickle",
    "--markdown": "plan.md",
}
"""Names that would do, by option."""


class UsageError(InputError):
    """An option or a value on the command line is wrong: exit code 2."""


@contextlib.contextmanager
def about(option: str) -> Iterator[None]:
    """What is wrong in here came from this option."""
    try:
        yield
    except UsageError:
        raise
    except InputError as error:
        raise UsageError(f"{option}: {error}") from error


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The name that may have been meant."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1)), None)


def check_files(files: dict[str, Path | None]) -> None:
    """Refuse files that cannot be written, by option, before minutes of work are done."""
    from memfit.files import check_can_write

    for option, path in files.items():
        if path is None:
            continue
        if str(path) in _STANDARD_OUTPUT:
            raise UsageError(f"{option}: {path} is where results are printed; leave {option} out, or write --json")
        with for_file(option):
            check_can_write(path, _EXAMPLES.get(option, "plan.json"))
    given = [path.absolute() for path in files.values() if path is not None]
    if len(set(given)) < len(given):
        raise UsageError(f"two of {', '.join(files)} write to the same file; give each its own")


@contextlib.contextmanager
def for_file(option: str) -> Iterator[None]:
    """What goes wrong with writing in here is an error of the file that this option names, and no wrong usage."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{option}: {error}") from error
    except OSError as error:
        named = f"{error.filename} cannot be written: " if error.filename else ""
        raise InputError(f"{option}: {named}{error.strerror}; give another path") from error
