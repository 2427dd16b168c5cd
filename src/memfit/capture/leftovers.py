"""What a capture would leave behind in caches that it does not know: found by who refers to it, and taken out."""

from __future__ import annotations

import collections
import functools
import gc
import types
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from memfit.torch_private.storages import key_of, storage_key

_DEPTH = 5
"""How many containers deep a tensor may lie in a cache."""
_NO_HOLDERS = (types.FrameType, types.FunctionType, types.ModuleType)


def take_out(storages: Iterable[weakref.ref[Any]], error: BaseException | None = None) -> list[str]:
    """Empty the places that still hold tensors on these storages, and return notes of them.

    What was reachable before the capture has been put back (Note [Snapshot]); these places were not. An entry of a dict
    or a list goes, as if it had not been there: most are caches. If something else was there, it cannot be told what.
    `functools.lru_cache` is cleared, which costs its owner time alone. What only the functions hold that an error came
    through goes with the error.
    """
    pointers = {key_of(storage) for storage in (each() for each in storages) if storage is not None}
    if not pointers:
        return []
    gc.collect()  # what only cycles hold is gone; this is rare, and a cache is worth it
    tensors = [
        each
        for each in gc.get_objects()
        if issubclass(type(each), torch.Tensor) and each.layout is torch.strided and storage_key(each) in pointers
    ]
    places: dict[str, None] = {}
    if tensors:
        _release(tensors, places, _DEPTH, {id(tensors)}, _frames_of(error))
    return [
        f"the step put a tensor of its own into {place}, which the capture could not look at before: it was taken out "
        "again. If something else was there before, set it again, or let an attribute of the model refer to it"
        for place in places
    ]


def _release(held: list[Any], places: dict[str, None], depth: int, own: set[int], raised: set[int]) -> None:
    """Let go of these objects wherever they are referred to; through tuples and plain objects, of what holds them."""
    wanted = set(map(id, held))
    further: list[Any] = []
    referrers = gc.get_referrers(*held)
    own |= {id(referrers), id(further), id(held)}
    for holder in referrers:
        if id(holder) in own or isinstance(holder, _NO_HOLDERS) or (raised and _held_by(raised, holder, own)):
            continue
        if isinstance(holder, dict) and (cache := _lru_cache_of(holder)) is not None:
            cache.cache_clear()
        elif isinstance(holder, dict):
            _empty_names(_owner_of(holder) or holder, holder, wanted, places)
        elif isinstance(holder, list):
            places[f"a list ({_named(holder, own)})"] = None
            holder[:] = [each for each in holder if id(each) not in wanted]
        elif isinstance(holder, set):
            places[f"a set ({_named(holder, own)})"] = None
            holder.difference_update([each for each in holder if id(each) in wanted])
        elif isinstance(holder, collections.deque):
            places[f"a deque ({_named(holder, own)})"] = None
            kept = [each for each in holder if id(each) not in wanted]
            holder.clear()
            holder.extend(kept)
        elif isinstance(holder, functools._lru_cache_wrapper):
            holder.cache_clear()
        elif isinstance(holder, types.CellType):
            places["a variable of an enclosing function"] = None
            del holder.cell_contents  # reading it says that it has no value; None would pass for one
        elif isinstance(holder, tuple | frozenset) or dataclass_like(holder):
            further.append(holder)
        elif hasattr(holder, "__dict__"):
            _empty_names(holder, dict(vars(holder)), wanted, places)
    del referrers
    if further and depth > 1:
        _release(further, places, depth - 1, own, raised)


def _frames_of(error: BaseException | None) -> set[int]:
    """Return the frames, by identity, that an error came through."""
    found: set[int] = set()
    while error is not None:
        place = error.__traceback__
        while place is not None:
            found.add(id(place.tb_frame))
            place = place.tb_next
        error = error.__cause__ or error.__context__
    return found


def _held_by(frames: set[int], value: Any, own: set[int], depth: int = _DEPTH) -> bool:
    """Tell whether nothing but these frames holds a value, directly or inside of something else."""
    referrers = gc.get_referrers(value)
    known = own | {id(referrers), id(value)}  # a cycle leads back to the value
    for each in referrers:
        if isinstance(each, types.FrameType):
            if id(each) not in frames and each.f_code.co_filename != __file__:
                return False
        elif id(each) not in known and (
            depth == 0 or isinstance(each, type | types.ModuleType) or not _held_by(frames, each, known, depth - 1)
        ):
            return False
    return True


def dataclass_like(value: Any) -> bool:
    """Whether a value is a record without a dictionary, whose holder lets go of it as a whole."""
    return not isinstance(value, torch.Tensor) and not hasattr(value, "__dict__") and hasattr(type(value), "__slots__")


def _lru_cache_of(names: dict[Any, Any]) -> Any:
    """Return the `functools.cache` whose table this is; one with a limit refers to its results, and not by a table."""
    for each in gc.get_referrers(names):
        if isinstance(each, functools._lru_cache_wrapper) and vars(each) is not names:
            return each if each.cache_parameters()["maxsize"] is None else None  # type: ignore[attr-defined]
    return None


def _owner_of(names: dict[Any, Any]) -> Any:
    """Return the class or the object whose names these are; those of a class may not be written behind its back."""
    for each in gc.get_referrers(names):
        if isinstance(each, type) and "__module__" in names:
            return each
        if not isinstance(each, types.ModuleType) and getattr(each, "__dict__", None) is names:
            return each
    return None


def _named(holder: Any, own: set[int]) -> str:
    """Say what refers to a container, as far as that has a name."""
    for each in gc.get_referrers(holder):
        if id(each) not in own and isinstance(each, dict):
            name = next((name for name, value in list(each.items()) if value is holder), None)
            home = each.get("__name__") if "__name__" in each else type(_owner_of(each)).__name__
            if isinstance(name, str) and home != "NoneType":
                return f"{home}.{name}"
    return "without a name"


def _empty_names(owner: Any, names: dict[Any, Any], wanted: set[int], places: dict[str, None]) -> None:
    attributes = owner is not names
    for name, value in list(names.items()):
        if id(value) not in wanted:
            continue
        if attributes:
            home = getattr(owner, "__qualname__", type(owner).__qualname__)
            places[f"{home}.{name}"] = None
            delattr(owner, name)
        else:
            places[f"a dict ({_named(names, set())}) under {name!r}"] = None
            names.pop(name)
