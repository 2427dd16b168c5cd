"""Steps from other projects' own configurations, one file a project. A project is imported when its step is made."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memfit.integrations import torchtitan

__all__ = ["torchtitan"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"memfit.integrations.{name}")
    raise AttributeError(f"module 'memfit.integrations' has no attribute {name!r}")
