"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from memfit.errors import InputError


def write_whole(path: str | os.PathLike[str], content: bytes, example: str) -> Path:
    """Write a file and give its path; a reader sees all of it or nothing. `example` is a name that would do."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise InputError(f"give the path of a file to write, not {path!r}, for example {example!r}")
    target = Path(path)
    if target.is_dir():
        raise InputError(f"{target} is a folder; give the path of a file in it, such as {target / example}")
    if not target.parent.is_dir():
        raise InputError(f"there is no folder {target.parent} to write {target.name} to; make it first")
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as file:
            file.write(content)
        os.replace(temporary, target)
    except PermissionError as error:
        temporary.unlink(missing_ok=True)
        raise InputError(f"{target} cannot be written: {error.strerror}; give another path") from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return target
