"""The generators of random numbers that are not torch's: Python's and numpy's own, and those that modules hold."""

from __future__ import annotations

import contextlib
import ctypes
import random
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

Held = random.Random | np.random.Generator | np.random.RandomState | torch.Generator
_HELD = (random.Random, np.random.Generator, np.random.RandomState, torch._C.Generator)
_DEPTH = 3


def held_generators(modules: Iterable[nn.Module], values: Iterable[Any] = ()) -> list[Held]:
    """Return the generators among the modules' attributes, the globals of the files they are written in, and values."""
    found: dict[int, Held] = {}
    for value in values:
        _collect(value, found, _DEPTH)
    files: dict[str, None] = {}
    for module in modules:
        for value in vars(module).values():
            _collect(value, found, _DEPTH)
        files.update(dict.fromkeys(each.__module__ for each in type(module).__mro__))
    for name in files:
        if name.partition(".")[0] not in ("torch", "builtins"):
            for value in list(vars(sys.modules.get(name, object)).values()):
                if isinstance(value, _HELD):
                    found[id(value)] = value
    return [each for each in found.values() if not any(each is known for known in _global_generators())]


def _collect(value: Any, found: dict[int, Held], depth: int) -> None:
    if isinstance(value, _HELD):
        found[id(value)] = value
    elif depth and type(value) in (list, tuple):
        for item in value:
            _collect(item, found, depth - 1)
    elif depth and type(value) is dict:
        for item in value.values():
            _collect(item, found, depth - 1)


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
    return generator.get_state().clone()


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
