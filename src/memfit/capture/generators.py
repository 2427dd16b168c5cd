"""The generators of random numbers that are not torch's: Python's and numpy's own, and those that modules hold."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import random
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from memfit.torch_private.storages import Generator

Held = random.Random | np.random.Generator | np.random.RandomState | torch.Generator
_HELD = (random.Random, np.random.Generator, np.random.RandomState, Generator)
_DEPTH = 3
_MOST_VALUES = 10_000
"""How many values are looked at for each module: some hold all of a data set."""
_OWN = ("torch", "builtins", "numpy", "random")
"""Packages whose objects and functions are not looked into."""


def held_generators(modules: Iterable[nn.Module], values: Iterable[Any] = ()) -> list[Held]:
    """Return the generators among the attributes of modules and their classes, the globals of their files, and values.

    Objects, containers and functions among them are looked into to a small depth.
    """
    found: dict[int, Held] = {}
    _Search(found).all_of(values)
    classes: dict[type, None] = {}
    for module in modules:
        _Search(found).all_of(vars(module).values())
        classes.update(dict.fromkeys(type(module).__mro__))
    own = [each for each in classes if each.__module__.partition(".")[0] not in _OWN]
    for kind in own:
        _Search(found).all_of(list(vars(kind).values()), depth=1)
    for name in dict.fromkeys(each.__module__ for each in own):
        _Search(found).all_of(list(vars(sys.modules.get(name, object)).values()), depth=1)
    return [each for each in found.values() if not any(each is known for known in _global_generators())]


class _Search:
    """Looks for generators in values, and in what these hold."""

    def __init__(self, found: dict[int, Held]) -> None:
        self._found = found
        self._seen: dict[int, Any] = {}

    def all_of(self, values: Iterable[Any], depth: int = _DEPTH) -> None:
        """Look at each value and this deep into it."""
        for value in values:
            self._look(value, depth)

    def _look(self, value: Any, depth: int) -> None:
        if isinstance(value, _HELD):
            self._found[id(value)] = value
        elif depth and id(value) not in self._seen and len(self._seen) < _MOST_VALUES:
            inside = _inside(value)
            if inside:
                self._seen[id(value)] = value  # held, so that no other value gets its address
                self.all_of(inside, depth - 1)


def _inside(value: Any) -> list[Any]:
    """Return what a container, a function or an object of a class of the user's holds."""
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, type | types.ModuleType | nn.Module | torch.Tensor):
        return []  # modules are looked at one by one
    if str(getattr(value, "__module__", None) or type(value).__module__).partition(".")[0] in _OWN:
        return []
    if isinstance(value, types.FunctionType):
        used = [value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__]
        return used + [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]
    attributes = getattr(value, "__dict__", None)
    return list(attributes.values()) if isinstance(attributes, dict) else []


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # of a name that is not bound yet
        return False


def _global_generators() -> tuple[Any, ...]:
    return (getattr(random, "_inst", None), np.random.mtrand._rand, torch.default_generator)


def state_of(generator: Held) -> Any:
    """Return a generator's state."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.get_state()  # a copy of its own; another op would be part of a captured step


def set_state(generator: Held, state: Any) -> None:
    """Put a generator back to a state."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


class _NumpyState:
    """The state of numpy's global generator, read in full only when it has changed: that takes 25 microseconds.

    `RandomState` keeps a second normal number for the next call. Only while it has one can its state change without
    that of the bit generator.
    """

    def __init__(self) -> None:
        self._owner: Any = None
        self._address = 0
        self._bytes = b""
        self._state: Any = None

    def read(self) -> Any:
        """Return the state as it is now."""
        source = np.random.mtrand._rand._bit_generator
        if source is not self._owner:
            self._owner, self._bytes = source, b""
            # the words of the Mersenne twister, and its place among them, are one block of memory
            self._address = source.ctypes.state_address if isinstance(source, np.random.MT19937) else 0
        here = ctypes.string_at(self._address, _TWISTER_BYTES) if self._address else b""
        if not here or here != self._bytes or self._state["has_gauss"]:
            self._state, self._bytes = np.random.get_state(legacy=False), here
        return self._state


_TWISTER_BYTES = 4 * (624 + 1)
_numpy_state = _NumpyState()

HostState = tuple[Any, Any, tuple[Any, ...]]
"""States of Python's generator, of numpy's, and of those that modules hold."""


def host_state(held: Iterable[Held] = ()) -> HostState:
    """Return the states of the generators that are not torch's own, in 10 microseconds when modules hold none."""
    return random.getstate(), _numpy_state.read(), tuple(map(state_of, held))


def set_host_state(state: HostState, held: Iterable[Held] = ()) -> None:
    """Put them back."""
    python, numpy, others = state
    random.setstate(python)
    if _numpy_state.read() is not numpy:
        np.random.set_state(numpy)
    for generator, each in zip(held, others, strict=True):
        set_state(generator, each)


@contextlib.contextmanager
def same_generators(held: list[Held]) -> Iterator[None]:
    """After the block these generators are as they were before it."""
    states = list(map(state_of, held))
    try:
        yield
    finally:
        for generator, state in zip(held, states, strict=True):
            set_state(generator, state)


@contextlib.contextmanager
def with_host_state(state: HostState, held: list[Held]) -> Iterator[None]:
    """Inside the block random numbers come as they did from this state; afterwards as if nothing had been drawn."""
    now = host_state(held)
    set_host_state(state, held)
    try:
        yield
    finally:
        set_host_state(now, held)
