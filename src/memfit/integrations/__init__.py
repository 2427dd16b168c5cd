"""Plans in other projects' training loops, one file a project. A project is imported when its file is used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memfit.integrations import accelerate, lightning, torchtitan, transformers

__all__ = ["accelerate", "lightning", "torchtitan", "transformers"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"memfit.integrations.{name}")
    raise AttributeError(f"module 'memfit.integrations' has no attribute {name!r}")
