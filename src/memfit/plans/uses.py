"""What rooms after this one do with a plan: a plan's methods find them here, so that no room imports a later one."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])
_uses: dict[str, Callable[..., Any]] = {}
_ROOMS = {"apply": "memfit.engines", "remove": "memfit.engines", "loss": "memfit.engines", "verify": "memfit.verify"}


def use(name: str) -> Callable[[_F], _F]:
    """Make a function what `Plan.<name>` calls, with the plan as its first argument."""

    def register(function: _F) -> _F:
        _uses[name] = function
        return function

    return register


def used(name: str) -> Callable[..., Any]:
    """The function of a name; its room is imported when it is asked for the first time."""
    if name not in _uses:
        importlib.import_module(_ROOMS[name])
    return _uses[name]
