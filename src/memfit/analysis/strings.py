"""Texts that occur many times, kept once."""

from __future__ import annotations


class Strings:
    """Numbers for texts, in the order in which they first come."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def __getitem__(self, text: str) -> int:
        """The number of a text."""
        return self._numbers.setdefault(text, len(self._numbers))

    @property
    def texts(self) -> list[str]:
        """Every text, by its number."""
        return list(self._numbers)


def named(module: str) -> str:
    """A module's path as people read it."""
    return module or "(model)"
