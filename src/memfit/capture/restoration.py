"""Leave the user's objects as they were before a capture.

Note [Snapshot]: a step may keep a running average, a history or a counter anywhere: in a dict of the file that the
model is written in, in a variable of an enclosing function, in an attribute of a plain object. All that can be reached
from the model, its classes, the files these are written in and the user's functions is looked at before the capture and
put back after it. Only the user's own files and packages are: libraries keep state there that is none of the step's.
Tensors of the step that end up in caches which were not reachable are found by who refers to them, and removed.
"""

from __future__ import annotations

import argparse
import collections
import functools
import gc
import inspect
import os
import sys
import sysconfig
import threading
import types
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from memfit.torch_private.autograd import post_accumulate_hooks, tensor_hooks
from memfit.torch_private.modules import parameter_table
from memfit.torch_private.storages import key_of, storage_key

_MISSING = object()
_DEPTH = 10
"""How many objects lie between the model and what is still looked at."""
_LIMIT = 1_000_000
"""Items that are looked at before it is enough: a data set may be a global list."""
_ATOMS = frozenset(
    (
        *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type(NotImplemented)),
        *(torch.dtype, torch.device, torch.Size, range, slice),
    )
)
_CONTAINERS = (collections.OrderedDict, dict, list, set, collections.deque)
_PLAIN = (
    *(types.SimpleNamespace, argparse.Namespace, threading.local, collections.UserDict, collections.UserList),
    *(weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet),
)
"""Kinds of objects in Python's own library that programs keep values in."""
_LIBRARIES = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_NOT_USERS = {*sys.stdlib_module_names, "torch", "memfit", "numpy"} - {"__main__"}
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


class ValueSnapshot:
    """Holders of values as they are when this is made; `restore` puts the values back."""

    def __init__(self, modules: Sequence[nn.Module], functions: Iterable[Any]) -> None:
        self._before: dict[int, tuple[Any, Any]] = {}
        self._seen: set[int] = set()
        self._kept: list[Any] = []  # so that no other object comes to the address of one that was seen
        self._items = 0
        self._alone = _runs_alone()
        given = [each for each in functions if each is not None]
        self._packages = {_home(kind).partition(".")[0] for kind in set(map(type, (*modules, *given)))}
        self._packages |= {_home(each).partition(".")[0] for each in given}
        self._packages -= _NOT_USERS
        self._seen.update(map(id, modules))  # their own attributes are put back with their stand-ins
        self._collect(self._roots(modules, given))

    def restore(self) -> None:
        """Restore every value.

        Changes among mere numbers stay while other threads run code of the user's: they may have made them.
        """
        alone = self._alone and _runs_alone()
        for holder, before in self._before.values():
            if isinstance(holder, types.CellType):
                _restore_cell(holder, before, alone)
            elif isinstance(holder, type) or not isinstance(holder, _CONTAINERS):
                _restore_attributes(holder, before, alone)
            elif isinstance(holder, dict):
                _restore_dict(holder, before, alone)
            else:
                _restore_items(holder, before, alone)

    # -- looking ----------------------------------------------------------------------------------------------------

    def _roots(self, modules: Sequence[nn.Module], functions: list[Any]) -> Iterator[Any]:
        kinds: dict[type, None] = {}
        for kind in dict.fromkeys(map(type, modules)):
            kinds.update(dict.fromkeys(kind.__mro__))
        for module in modules:
            for name, value in vars(module).items():
                if name not in _MODULE_ATTRIBUTES or (value and name.endswith("_hooks")):
                    yield value
            for parameter in parameter_table(module).values():
                if parameter is not None:
                    yield tensor_hooks(parameter)
                    yield post_accumulate_hooks(parameter)
        yield from functions
        for kind in kinds:
            if _home(kind).partition(".")[0] not in _NOT_USERS:
                yield from self._class(kind)
                yield from self._file(_home(kind))
        for function in functions:
            yield from self._file(_home(function) or _home(type(function)))

    def _collect(self, roots: Iterable[Any]) -> None:
        """Look at what is reachable, the nearest first."""
        level = list(roots)
        for _ in range(_DEPTH):
            found: list[Any] = []
            for value in level:
                if type(value) in _ATOMS or issubclass(type(value), torch.Tensor) or id(value) in self._seen:
                    continue
                self._seen.add(id(value))
                self._kept.append(value)
                found.extend(self._parts(value))
                if self._items > _LIMIT:
                    return
            level = found

    def _parts(self, value: Any) -> Iterator[Any]:
        """Keep what a value holds, if that can change, and return it."""
        kind = type(value)  # `isinstance` would ask the value itself, which may be lazy and not able to say
        if issubclass(kind, dict):
            yield from self._keep(value, _items(value)).values()
        elif issubclass(kind, list | set | collections.deque):
            yield from self._keep(value, list(_container(value).__iter__(value)))
        elif issubclass(kind, tuple | frozenset):
            self._items += len(value)
            yield from value
        elif issubclass(kind, types.CellType):
            yield self._keep(value, _content(value))
        elif issubclass(kind, types.FunctionType):
            yield from self._function(value)
        elif issubclass(kind, types.MethodType):
            yield from (value.__self__, value.__func__)
        elif issubclass(kind, functools.partial):
            yield from (value.func, value.args, value.keywords)
        elif issubclass(kind, staticmethod | classmethod):
            yield value.__func__
        elif issubclass(kind, property):
            yield from (value.fget, value.fset)
        elif issubclass(kind, types.ModuleType):
            yield from self._file(value.__name__)
        elif issubclass(kind, type):
            if _is_users_file(_home(value)):
                yield from self._class(value)
                yield from self._file(_home(value))
            return
        elif issubclass(kind, functools._lru_cache_wrapper):
            yield value.__wrapped__
        if kind in _CONTAINERS:
            return
        if self._is_plain(value):
            yield from self._object(value)

    def _keep(self, holder: Any, before: Any) -> Any:
        self._before.setdefault(id(holder), (holder, before))
        self._items += len(before) if isinstance(before, dict | list) else 1
        return before

    def _is_plain(self, value: Any) -> bool:
        """Return whether an object is the user's own, or of a kind that is made to hold values."""
        if issubclass(type(value), nn.Module) or type(value) in _PLAIN:
            return True
        home = _home(type(value))
        return home.partition(".")[0] in self._packages or _is_users_file(home)

    def _object(self, value: Any) -> Iterator[Any]:
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self._seen.add(id(attributes))
            yield from self._keep(attributes, dict(attributes)).values()
        slots = [
            name
            for kind in type(value).__mro__
            for name, slot in vars(kind).items()
            if isinstance(slot, types.MemberDescriptorType) and _is_users_class(kind)
        ]
        if slots and not isinstance(value, _CONTAINERS):
            yield from self._keep(value, {name: getattr(value, name, _MISSING) for name in slots}).values()
        if isinstance(value, nn.Module):
            yield type(value)

    def _class(self, kind: type) -> Iterator[Any]:
        if id(kind) not in self._before:
            yield from self._keep(kind, dict(vars(kind))).values()

    def _function(self, function: types.FunctionType) -> Iterator[Any]:
        home = str(function.__globals__.get("__name__", ""))
        if home.partition(".")[0] in _NOT_USERS:
            return
        yield from function.__closure__ or ()
        yield from function.__defaults__ or ()
        yield function.__kwdefaults__
        if vars(function):
            yield vars(function)
        if _is_users_file(home):
            yield from self._file(home)

    def _file(self, name: str) -> Iterator[Any]:
        """Keep the globals of a file, and return what they stand for."""
        file = sys.modules.get(name)
        own = name.partition(".")[0] in self._packages or _is_users_file(name)
        if own and isinstance(file, types.ModuleType) and id(vars(file)) not in self._seen:
            self._seen.add(id(vars(file)))
            yield from self._keep(vars(file), dict(vars(file))).values()


@functools.lru_cache(maxsize=4096)
def _is_users_file(name: str) -> bool:
    """Return whether a module is neither Python's, nor torch's, nor installed as a library."""
    if name.partition(".")[0] in _NOT_USERS or name not in sys.modules:
        return False
    path = getattr(sys.modules[name], "__file__", None)
    if path is None:
        return name == "__main__"
    return not any(path.startswith(os.path.join(library, "")) for library in _LIBRARIES if library)


def _home(value: Any) -> str:
    """Return the name of the module in which a class or a function is written; that of some in C has no name."""
    name = getattr(value, "__module__", None)
    return name if isinstance(name, str) else ""


def _runs_alone() -> bool:
    """Return whether no other thread is in code of the user's."""
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)  # a frame that holds itself would keep all that called it
    for frame in frames.values():
        place: types.FrameType | None = frame
        while place is not None:
            if _is_users_file(str(place.f_globals.get("__name__", ""))):
                return False
            place = place.f_back
    return True


def _is_users_class(kind: type) -> bool:
    return _home(kind).partition(".")[0] not in _NOT_USERS


def _container(value: Any) -> Any:
    """Return the built-in kind of a container: what a subclass makes of reading and writing is not to be called."""
    return next(kind for kind in _CONTAINERS if isinstance(value, kind))


def _items(value: dict[Any, Any]) -> dict[Any, Any]:
    return {key: dict.__getitem__(value, key) for key in _container(value).__iter__(value)}


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing has been assigned yet
        return _MISSING


# -- putting back -----------------------------------------------------------------------------------------------------


def _stays(now: Any, before: Any, alone: bool) -> bool:
    """Return whether a value may stay: it is the one from before, or a number that another thread may have set."""
    return now is before or (not alone and _is_atom(now) and _is_atom(before))


def _is_atom(value: Any) -> bool:
    return value is _MISSING or type(value) in _ATOMS or isinstance(value, type | BaseException)


def _restore_cell(cell: types.CellType, before: Any, alone: bool) -> None:
    if _stays(_content(cell), before, alone):
        return
    if before is _MISSING:
        del cell.cell_contents
    else:
        cell.cell_contents = before


def _restore_attributes(holder: Any, before: dict[str, Any], alone: bool) -> None:
    """Put back the names of a class, or what the slots of an object hold."""
    is_class = isinstance(holder, type)
    now = dict(vars(holder)) if is_class else {name: getattr(holder, name, _MISSING) for name in before}
    for name in (*before, *(name for name in now if name not in before)):
        value = before.get(name, _MISSING)
        if _stays(now.get(name, _MISSING), value, alone) or (is_class and _is_made_by_python(now.get(name))):
            continue
        if value is _MISSING:
            type.__delattr__(holder, name) if is_class else object.__delattr__(holder, name)
        else:
            type.__setattr__(holder, name, value) if is_class else object.__setattr__(holder, name, value)


def _is_made_by_python(value: Any) -> bool:
    """Return whether Python itself gives a class this, when it is first asked for."""
    return isinstance(value, types.GetSetDescriptorType | types.MemberDescriptorType)


def _restore_dict(holder: dict[Any, Any], before: dict[Any, Any], alone: bool) -> None:
    """Put back the items of a dict, or the names of a file; what was imported meanwhile stays imported."""
    kind = _container(holder)
    is_file = "__name__" in before and before["__name__"] in sys.modules
    for key, value in _items(holder).items():
        imported = is_file and inspect.ismodule(value)
        if key not in before and not imported and not _stays(value, _MISSING, alone):
            kind.__delitem__(holder, key)
    for key, value in before.items():
        if not _stays(dict.get(holder, key, _MISSING), value, alone):
            kind.__setitem__(holder, key, value)
    if alone and not is_file and list(map(id, _items(holder))) != list(map(id, before)):  # in another order
        kind.clear(holder)
        for key, value in before.items():
            kind.__setitem__(holder, key, value)


def _restore_items(holder: Any, before: list[Any], alone: bool) -> None:
    """Put back the items of a list, a set or a deque."""
    kind = _container(holder)
    now = list(kind.__iter__(holder))
    if len(now) == len(before) and all(one is other for one, other in zip(now, before, strict=True)):
        return
    known, found = set(map(id, before)), set(map(id, now))
    changed = [*(each for each in now if id(each) not in known), *(each for each in before if id(each) not in found)]
    if not alone and all(map(_is_atom, changed)):
        return
    kind.clear(holder)
    kind.update(holder, before) if kind is set else kind.extend(holder, before)


# -- tensors of the step in caches that the snapshot did not reach ----------------------------------------------------


_CACHE_DEPTH = 5
"""How many containers deep a tensor may lie in a cache."""
_NO_HOLDERS = (types.FrameType, types.FunctionType, types.ModuleType)


def remove_leftovers(storages: Iterable[weakref.ref[Any]], error: BaseException | None = None) -> list[str]:
    """Empty the places that still hold tensors on these storages, and return notes of them.

    What was reachable before the capture has been put back (Note [Snapshot]); these places were not. An entry of a dict
    or a list goes, as if it had not been there: most are caches. If something else was there, it cannot be told what.
    `functools.lru_cache` is cleared, which costs its owner time alone. What only the functions hold that an error came
    through goes with the error.
    """
    storages = list(storages)
    for generation in (0, 2):  # what only cycles hold is gone: those of the step are young, and others are rare
        if not _alive(storages):
            return []
        gc.collect(generation)
    pointers = _alive(storages)
    tensors = [
        each
        for each in (gc.get_objects() if pointers else ())
        if issubclass(type(each), torch.Tensor) and each.layout is torch.strided and storage_key(each) in pointers
    ]
    emptied: dict[str, None] = {}
    if tensors:
        _release(tensors, emptied, _CACHE_DEPTH, {id(tensors)}, _frames_of(error))
    return [
        f"the step put a tensor of its own into {place}, which the capture could not look at before: it was taken out "
        "again. If something else was there before, set it again, or let an attribute of the model refer to it"
        for place in emptied
    ]


def _alive(storages: Iterable[weakref.ref[Any]]) -> set[int]:
    return {key_of(storage) for storage in (each() for each in storages) if storage is not None}


def _release(held: list[Any], emptied: dict[str, None], depth: int, own: set[int], raised: set[int]) -> None:
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
            _empty_names(_owner_of(holder) or holder, holder, wanted, emptied)
        elif isinstance(holder, list):
            emptied[f"a list ({_named(holder, own)})"] = None
            holder[:] = [each for each in holder if id(each) not in wanted]
        elif isinstance(holder, set):
            emptied[f"a set ({_named(holder, own)})"] = None
            holder.difference_update([each for each in holder if id(each) in wanted])
        elif isinstance(holder, collections.deque):
            emptied[f"a deque ({_named(holder, own)})"] = None
            kept = [each for each in holder if id(each) not in wanted]
            holder.clear()
            holder.extend(kept)
        elif isinstance(holder, functools._lru_cache_wrapper):
            holder.cache_clear()
        elif isinstance(holder, types.CellType):
            emptied["a variable of an enclosing function"] = None
            del holder.cell_contents  # reading it says that it has no value; None would pass for one
        elif isinstance(holder, tuple | frozenset) or dataclass_like(holder):
            further.append(holder)
        elif hasattr(holder, "__dict__"):
            _empty_names(holder, dict(vars(holder)), wanted, emptied)
    del referrers
    if further and depth > 1:
        _release(further, emptied, depth - 1, own, raised)


def _frames_of(error: BaseException | None) -> set[int]:
    """Return the frames, by identity, that an error came through."""
    found: set[int] = set()
    while error is not None:
        entry = error.__traceback__
        while entry is not None:
            found.add(id(entry.tb_frame))
            entry = entry.tb_next
        error = error.__cause__ or error.__context__
    return found


def _held_by(frames: set[int], value: Any, own: set[int], depth: int = _CACHE_DEPTH) -> bool:
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
    """Return whether a value is a record without a dictionary, whose holder lets go of it as a whole."""
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


def _empty_names(owner: Any, names: dict[Any, Any], wanted: set[int], emptied: dict[str, None]) -> None:
    attributes = owner is not names
    for name, value in list(names.items()):
        if id(value) not in wanted:
            continue
        if attributes:
            home = getattr(owner, "__qualname__", type(owner).__qualname__)
            emptied[f"{home}.{name}"] = None
            delattr(owner, name)
        else:
            emptied[f"a dict ({_named(names, set())}) under {name!r}"] = None
            names.pop(name)
