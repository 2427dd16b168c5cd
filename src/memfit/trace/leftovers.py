"""What a capture would leave behind in caches of the user's program: found by who refers to it, and taken out."""

from __future__ import annotations

import functools
import gc
import sys
import types
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

_MISSING = object()
_DEPTH = 5
"""How many containers deep a tensor may lie in a cache."""
_NO_HOLDERS = (types.FrameType, types.FunctionType, types.ModuleType)


class Namespaces:
    """The names of the model's classes and of the files these are written in, as they are before a capture."""

    def __init__(self, modules: Iterable[nn.Module], functions: Iterable[Any]) -> None:
        kinds = {kind for module in modules for kind in type(module).__mro__}
        own = [kind for kind in kinds if kind.__module__.partition(".")[0] not in ("torch", "builtins", "abc")]
        files = {kind.__module__ for kind in own} | {getattr(each, "__module__", "") for each in functions}
        self._known = {id(kind): dict(vars(kind)) for kind in own}
        self._kept: list[Any] = [*own]  # so that no other object comes to their address
        for name in files:
            if isinstance(sys.modules.get(name), types.ModuleType):
                names = vars(sys.modules[name])
                self._kept.append(names)
                self._known[id(names)] = dict(names)

    def before(self, owner: Any, name: Any) -> Any:
        """Return what a name stood for in a class or in globals; None where that is not known."""
        known = self._known.get(id(owner))
        return None if known is None else known.get(name, _MISSING)


def take_out(storages: Iterable[weakref.ref[Any]], namespaces: Namespaces) -> None:
    """Empty the places that still hold tensors on these storages: caches, lists, attributes and globals.

    A name of a class or a file gets back what it stood for; an entry of a dict goes, as it would not have been there;
    `functools.lru_cache` is cleared.
    """
    pointers = {storage._cdata for storage in (each() for each in storages) if storage is not None}
    if not pointers:
        return
    gc.collect()  # what only cycles hold is gone; this is rare, and a cache is worth it
    tensors = [
        each
        for each in gc.get_objects()
        if issubclass(type(each), torch.Tensor)
        and each.layout is torch.strided
        and each.untyped_storage()._cdata in pointers
    ]
    if tensors:
        _release(tensors, namespaces, _DEPTH, {id(tensors)})


def _release(held: list[Any], namespaces: Namespaces, depth: int, own: set[int]) -> None:
    """Let go of these objects wherever they are referred to; through tuples and plain objects, of what holds them."""
    wanted = set(map(id, held))
    further: list[Any] = []
    referrers = gc.get_referrers(*held)
    own |= {id(referrers), id(further), id(held)}
    for holder in referrers:
        if id(holder) in own or isinstance(holder, _NO_HOLDERS):
            continue
        if isinstance(holder, dict):
            _empty_names(_class_of(holder) or holder, holder, wanted, namespaces)
        elif isinstance(holder, list):
            holder[:] = [each for each in holder if id(each) not in wanted]
        elif isinstance(holder, set):
            holder.difference_update([each for each in holder if id(each) in wanted])
        elif isinstance(holder, functools._lru_cache_wrapper):
            holder.cache_clear()
        elif isinstance(holder, types.CellType):
            holder.cell_contents = None
        elif isinstance(holder, tuple | frozenset) or dataclass_like(holder):
            further.append(holder)
        elif hasattr(holder, "__dict__"):
            _empty_names(holder, dict(vars(holder)), wanted, namespaces)
    del referrers
    if further and depth > 1:
        _release(further, namespaces, depth - 1, own)


def dataclass_like(value: Any) -> bool:
    """Whether a value is a record without a dictionary, whose holder lets go of it as a whole."""
    return not isinstance(value, torch.Tensor) and not hasattr(value, "__dict__") and hasattr(type(value), "__slots__")


def _class_of(names: dict[Any, Any]) -> type | None:
    """Return the class whose names these are; they may not be written to behind its back."""
    if "__module__" not in names:
        return None
    return next((each for each in gc.get_referrers(names) if isinstance(each, type)), None)


def _empty_names(owner: Any, names: dict[Any, Any], wanted: set[int], namespaces: Namespaces) -> None:
    attributes = owner is not names
    for name, value in list(names.items()):
        if id(value) not in wanted:
            continue
        before = namespaces.before(owner, name)
        is_globals = not attributes and names.get("__name__") in sys.modules
        if before is _MISSING or (before is None and not attributes and not is_globals):
            delattr(owner, name) if attributes else names.pop(name)
        elif attributes:
            setattr(owner, name, before)
        else:
            names[name] = before
