"""Names of a package that are imported when they are first used: one command or report needs few of a room's files."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, names: Mapping[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package, by module the names that it imports from there.

    For type checkers the package imports them under `TYPE_CHECKING` as well.
    """
    places = {name: module for module, found in names.items() for name in found}

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(places[name]), name)
        vars(sys.modules[package])[name] = value
        return value

    return find
