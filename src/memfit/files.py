"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from memfit.errors import InputError


def write_whole(path: str | os.PathLike[str], content: bytes, example: str) -> Path:
    """Write a file and give its path; a reader sees all of it or nothing. `example` is a name that would do."""
    target = _target(path, example)
    try:
        if _is_special(target):
            target.write_bytes(content)
            return target
        temporary = _beside(target)
        try:
            with open(temporary, "xb") as file:
                file.write(content)
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise InputError(f"{target} cannot be written: {error.strerror}; give another path") from error
    return target


def check_can_write(path: str | os.PathLike[str], example: str) -> None:
    """Refuse a file that `write_whole` could not write, before the work that would fill it; nothing is left behind."""
    target = _target(path, example)
    if _is_special(target):
        return
    temporary = _beside(target)
    try:
        with open(temporary, "xb"):
            pass
        temporary.unlink()
    except OSError as error:
        raise InputError(f"{target} cannot be written: {error.strerror}; give another path") from error


def _target(path: str | os.PathLike[str], example: str) -> Path:
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise InputError(f"give the path of a file to write, not {path!r}, for example {example!r}")
    target = Path(path)
    try:
        if target.is_dir():
            raise InputError(f"{target} is a folder; give the path of a file in it, such as {target / example}")
        if not target.parent.is_dir():
            raise InputError(f"there is no folder {target.parent} to write {target.name} to; make it first")
    except OSError as error:
        raise InputError(f"{target} cannot be written: {error.strerror}; give another path") from error
    return target


def _is_special(target: Path) -> bool:
    """Return whether a path is an existing non-regular file (a pipe, a device), which must not be replaced."""
    return target.exists() and not target.is_file()


def _beside(target: Path) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(8)}")
