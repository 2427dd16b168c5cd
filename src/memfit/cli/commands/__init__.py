"""The commands of `memfit`: a module for each, or for some that are alike. Torch is imported when one runs."""

from __future__ import annotations

import importlib
from typing import Any


def command_class(name: str) -> type[Any]:
    """Return the class of a command, which is in the module of that name; its fields are the command's options."""
    return getattr(importlib.import_module(f"memfit.cli.commands.{name}"), name.capitalize())
