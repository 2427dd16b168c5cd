"""The user's source line behind an op."""

from __future__ import annotations

import os
from types import CodeType

import torch

from memfit.torch_private.frames import frame_above

_COMMAND = os.path.join(os.path.dirname(os.path.dirname(__file__)), "cli", "command.py")
"""What is further out than the command is the program that started it, and no line of the user's."""
_OWN = (os.path.dirname(os.path.dirname(__file__)) + os.sep, os.path.dirname(torch.__file__) + os.sep)


class SourceTable:
    """Interns `file:line function` strings; a line is the innermost one outside torch and memfit."""

    def __init__(self) -> None:
        self.sources: list[str] = [""]
        self._index: dict[tuple[str, int], int] = {}
        self._foreign: dict[str, bool] = {}

    def here(self, depth: int) -> int:
        """The index of the user's line that is running now, seen from `depth` frames up."""
        frame = frame_above(depth)
        foreign = self._foreign
        while frame is not None:
            code = frame.f_code
            filename = code.co_filename
            own = foreign.get(filename)
            if own is None:
                own = self._is_users(filename)
            if own:
                return self._intern(code, frame.f_lineno)
            if filename == _COMMAND:
                return 0
            frame = frame.f_back
        return 0

    def raised(self, error: BaseException) -> int:
        """Return the index of the user's line at which an exception was raised, or that called what raised it."""
        found, place = 0, error.__traceback__
        while place is not None:
            code = place.tb_frame.f_code
            if self._is_users(code.co_filename):
                found = self._intern(code, place.tb_lineno)
            elif code.co_filename == _COMMAND:
                found = 0
            place = place.tb_next
        return found

    def _is_users(self, filename: str) -> bool:
        users = self._foreign.get(filename)
        if users is None:
            users = self._foreign[filename] = not filename.startswith((*_OWN, "<"))
        return users

    def _intern(self, code: CodeType, line: int) -> int:
        key = (code.co_filename, line)
        index = self._index.get(key)
        if index is None:
            index = self._index[key] = len(self.sources)
            self.sources.append(f"{_shorten(code.co_filename)}:{line} {code.co_name}")
        return index


def _shorten(filename: str) -> str:
    """Paths of installed packages from the package on, of the user's own files from the working folder on."""
    for marker in (f"site-packages{os.sep}", f"dist-packages{os.sep}"):
        if marker in filename:
            return filename.split(marker, 1)[1]
    relative = os.path.relpath(filename)
    return filename if relative.startswith("..") else relative
