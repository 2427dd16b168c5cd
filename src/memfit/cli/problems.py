"""What the user is told when something is wrong: the option it came from, and what to write instead."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator
from pathlib import Path

from memfit.errors import InputError


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
    for option, path in files.items():
        if path is None:
            continue
        if path.is_dir():
            raise UsageError(f"{option}: {path} is a folder; give the path of a file in it")
        if not path.parent.is_dir():
            raise UsageError(f"{option}: there is no folder {path.parent} to write {path.name} to; make it first")
    given = [path.absolute() for path in files.values() if path is not None]
    if len(set(given)) < len(given):
        raise UsageError(f"two of {', '.join(files)} write to the same file; give each its own")
