"""timm's models without torchvision, whose wheels of the package index cannot be loaded beside a CPU build of torch.

timm imports torchvision for transforms of images, one frozen norm and feature extraction; no model here uses them.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import nn


class _Named(type):
    """A class that has every name, such as the members of an enum."""

    def __getattr__(cls, name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(name)
        made = f"{cls.__name__}.{name}"
        setattr(cls, name, made)
        return made


class _Empty(types.ModuleType):
    """A module in which every name is an empty class."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Named(name, (nn.Module,), {})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of torchvision, empty."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def has_timm() -> bool:
    """Whether timm is installed."""
    return importlib.util.find_spec("timm") is not None


def load_timm() -> Any:
    """Import timm with torchvision's modules empty, which are taken away again: other packages ask for them."""
    if "timm" in sys.modules:
        return sys.modules["timm"]
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        return importlib.import_module("timm")
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
