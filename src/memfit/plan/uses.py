"""What rooms after this one do with a plan: a plan's methods find them here, so that no room imports a later one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from memfit.errors import StateError

_F = TypeVar("_F", bound=Callable[..., Any])
_uses: dict[str, Callable[..., Any]] = {}


def use(name: str) -> Callable[[_F], _F]:
    """Make a function what `Plan.<name>` calls, with the plan as its first argument."""

    def register(function: _F) -> _F:
        _uses[name] = function
        return function

    return register


def used(name: str) -> Callable[..., Any]:
    """The function of a name."""
    if name not in _uses:
        raise StateError(f"Plan.{name} needs the whole package; write `import memfit` first")
    return _uses[name]
