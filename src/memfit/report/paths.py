"""Module paths that differ in numbers only, shown as one."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def alike(path: str) -> str:
    """`layers.0.norm` and `layers.31.norm` are both `layers.*.norm`."""
    return _NUMBER.sub("*", path)
