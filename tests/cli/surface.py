"""The command line as data: commands, options and defaults. `python tests/cli/surface.py` writes surface.json anew."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

from memfit.cli.command import COMMANDS, command_class

FILE = Path(__file__).with_name("surface.json")
Option = dict[str, Any]


def surface() -> dict[str, dict[str, Option]]:
    """Every command's options by name, with their type, other names and default."""
    return {name: dict(_options(command_class(name))) for name in COMMANDS}


def text() -> str:
    return json.dumps(surface(), indent=2) + "\n"


def _options(kind: type[Any]) -> Iterator[tuple[str, Option]]:
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from _options(hint)
            continue
        markers = getattr(hint, "__metadata__", ())
        positional = tyro.conf.Positional[int].__metadata__[0] in markers
        aliases = [alias for each in markers for alias in getattr(each, "aliases", None) or ()]
        name = field.name.upper() if positional else f"--{field.name.replace('_', '-')}"
        yield name, {"type": _type(hint), "default": _default(field), **({"aliases": aliases} if aliases else {})}


def _type(hint: Any) -> str:
    """A type in words that are the same on every Python."""
    if hasattr(hint, "__metadata__"):
        hint = hint.__origin__
    if hint is ...:
        return "..."
    if hint is type(None):
        return "None"
    origin, inside = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " | ".join(map(repr, inside))
    if origin in (Union, UnionType):
        return " | ".join(map(_type, inside))
    return f"{origin.__name__}[{', '.join(map(_type, inside))}]" if origin else hint.__name__


def _default(field: dataclasses.Field[Any]) -> Any:
    return "required" if field.default is dataclasses.MISSING else field.default


if __name__ == "__main__":
    FILE.write_text(text())
