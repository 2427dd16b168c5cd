"""Random numbers: generators on the host and their states, and the distributions that torch's random ops draw from.

The generators are Python's and numpy's own, and those that modules and functions hold.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import random
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from memfit.torch_private.dispatch import schema_of
from memfit.torch_private.storages import Generator

HostGenerator = random.Random | np.random.Generator | np.random.RandomState | torch.Generator
_HELD = (random.Random, np.random.Generator, np.random.RandomState, Generator)
_DEPTH = 3
_MOST_VALUES = 10_000
"""How many values are looked at for each module: some hold all of a data set."""
_OWN = ("torch", "builtins", "numpy", "random")
"""Packages whose objects and functions are not looked into."""


def held_generators(modules: Iterable[nn.Module], values: Iterable[Any] = ()) -> list[HostGenerator]:
    """Return the generators among the attributes of modules and their classes, the globals of their files, and values.

    Objects, containers and functions among them are looked into to a small depth.
    """
    found: dict[int, HostGenerator] = {}
    _GeneratorSearch(found).all_of(values)
    classes: dict[type, None] = {}
    for module in modules:
        held = [
            value
            for name, value in vars(module).items()
            if type(value) not in _ATOMS and name not in _TABLES and (type(value) not in _COLLECTIONS or value)
        ]
        if held:
            _GeneratorSearch(found).all_of(held)
        classes.update(dict.fromkeys(type(module).__mro__))
    own = [each for each in classes if each.__module__.partition(".")[0] not in _OWN]
    for kind in own:
        _GeneratorSearch(found).all_of(list(vars(kind).values()), depth=1)
    for name in dict.fromkeys(each.__module__ for each in own):
        _GeneratorSearch(found).all_of(list(vars(sys.modules.get(name, object)).values()), depth=1)
    return [each for each in found.values() if not any(each is known for known in _global_generators())]


_ATOMS = frozenset((bool, int, float, str, type(None), torch.Tensor, nn.Parameter))
_COLLECTIONS = frozenset((dict, OrderedDict, set, list, tuple))
_TABLES = frozenset(("_parameters", "_buffers", "_modules"))
"""What a module keeps there is looked at where it belongs, or is a tensor."""


class _GeneratorSearch:
    """Looks for generators in values, and in what these hold."""

    def __init__(self, found: dict[int, HostGenerator]) -> None:
        self._found = found
        self._seen: dict[int, Any] = {}

    def all_of(self, values: Iterable[Any], depth: int = _DEPTH) -> None:
        """Look at each value and this deep into it."""
        for value in values:
            self._look(value, depth)

    def _look(self, value: Any, depth: int) -> None:
        if type(value) in _ATOMS or (isinstance(value, dict) and not value):
            return
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


def state_of(generator: HostGenerator) -> Any:
    """Return a generator's state."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.get_state()  # a copy of its own; another op would be part of a captured step


def set_state(generator: HostGenerator, state: Any) -> None:
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


def host_state(held: Iterable[HostGenerator] = ()) -> HostState:
    """Return the states of the generators that are not torch's own, in 10 microseconds when modules hold none."""
    return random.getstate(), _numpy_state.read(), tuple(map(state_of, held))


def set_host_state(state: HostState, held: Iterable[HostGenerator] = ()) -> None:
    """Restore the host's generators to a state."""
    python, numpy, others = state
    random.setstate(python)
    if _numpy_state.read() is not numpy:
        np.random.set_state(numpy)
    for generator, each in zip(held, others, strict=True):
        set_state(generator, each)


@contextlib.contextmanager
def same_generators(held: list[HostGenerator]) -> Iterator[None]:
    """Restore the states of these generators after the block."""
    states = list(map(state_of, held))
    try:
        yield
    finally:
        for generator, state in zip(held, states, strict=True):
            set_state(generator, state)


@contextlib.contextmanager
def with_host_state(state: HostState, held: list[HostGenerator]) -> Iterator[None]:
    """Draw from this state inside the block; afterwards generators are as if nothing had been drawn."""
    now = host_state(held)
    set_host_state(state, held)
    try:
        yield
    finally:
        set_host_state(now, held)


# -- The distributions that torch's random ops draw from, and their values at a quantile ------------------------------
#
# Extremes are the ends of a distribution, or for one without ends what lies six standard deviations away. A tensor
# has the same value everywhere at the extremes and in the middle; at other quantiles its elements are spread evenly
# over the distribution, beginning with the quantile, so that the place of the largest (`argmax`, `argsort`) changes
# with it.


_FEW = 8
_FARTHEST = 6.0
_EVEN = (0.0, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class Distribution:
    """What an op draws from."""

    at: Callable[[float], torch.Tensor]
    """Return values at a quantile, in the result's shape."""
    count: int | None = None
    """How many values each element can have, when these are few."""

    @classmethod
    def of(cls, func: Any, args: Any, kwargs: dict[str, Any], result: torch.Tensor) -> Distribution | None:
        """Return the distribution of a call; None when its op's is not known or it has no values to choose from."""
        schema = schema_of(func)
        named = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
        make = _DISTRIBUTIONS.get(schema.name.partition("::")[2])
        return None if make is None or result.numel() == 0 else make(named, result)


def _fractions(quantile: float, result: torch.Tensor) -> torch.Tensor:
    n = result.numel()
    if quantile in _EVEN:
        return torch.full(result.shape, quantile, dtype=torch.float64)
    return ((torch.arange(n, dtype=torch.float64) / n + quantile) % 1).view(result.shape)


def _normal_fractions(quantile: float, result: torch.Tensor) -> torch.Tensor:
    """Return standard normal values at a quantile."""
    z = math.sqrt(2) * torch.erfinv(2 * _fractions(quantile, result) - 1)
    return z.clamp(-_FARTHEST, _FARTHEST)


def _uniform(named: dict[str, Any], result: torch.Tensor) -> Distribution:
    low, high = named.get("from", 0.0), named.get("to", 1.0)
    below_one = 1 - torch.finfo(result.dtype).eps / 2
    return Distribution(lambda q: low + (high - low) * below_one * _fractions(q, result))


def _normal(named: dict[str, Any], result: torch.Tensor) -> Distribution:
    mean, std = named.get("mean", 0.0), named.get("std", 1.0)
    return Distribution(lambda q: mean + std * _normal_fractions(q, result))


def _log_normal(named: dict[str, Any], result: torch.Tensor) -> Distribution:
    mean, std = named.get("mean", 1.0), named.get("std", 2.0)
    return Distribution(lambda q: (mean + std * _normal_fractions(q, result)).exp())


def _exponential(named: dict[str, Any], result: torch.Tensor) -> Distribution:
    rate, least = named.get("lambd", 1.0), torch.finfo(result.dtype).eps
    return Distribution(lambda q: -torch.log1p(-_fractions(q, result).clamp(least, 1 - 1e-12)) / rate)


def _cauchy(named: dict[str, Any], result: torch.Tensor) -> Distribution:
    median, sigma = named.get("median", 0.0), named.get("sigma", 1.0)
    return Distribution(
        lambda q: median + sigma * torch.tan(math.pi * (_fractions(q, result).clamp(1e-6, 1 - 1e-6) - 0.5))
    )


def _geometric(named: dict[str, Any], result: torch.Tensor) -> Distribution | None:
    p = named["p"]
    if not 0 < p < 1:
        return None
    return Distribution(
        lambda q: 1 + (torch.log1p(-_fractions(q, result).clamp(0, 1 - 1e-12)) / math.log1p(-p)).floor()
    )


def _integers(named: dict[str, Any], result: torch.Tensor) -> Distribution:
    low, high = named.get("low", named.get("from")) or 0, named.get("high", named.get("to"))
    if high is None:
        whole = not result.is_floating_point() and result.dtype is not torch.bool
        high = torch.iinfo(result.dtype).max if whole else 2 if result.dtype is torch.bool else 1 << 11
    span = min(high - low, 1 << 53)  # above, not every integer is a float64
    return Distribution(lambda q: low + _index(_fractions(q, result), span), span if span <= _FEW else None)


def _index(fractions: torch.Tensor, count: int) -> torch.Tensor:
    return (fractions * count).long().clamp(max=count - 1)


def _coin(named: dict[str, Any], result: torch.Tensor) -> Distribution:
    p = named["p"] if "p" in named else named["self"]
    p = p.double() if isinstance(p, torch.Tensor) else torch.tensor(float(p), dtype=torch.float64)
    sure = bool(((p <= 0) | (p >= 1)).all())
    return Distribution(lambda q: (_fractions(q, result) >= 1 - p) & (p > 0), 1 if sure else 2)


def _coin_in_place(named: dict[str, Any], result: torch.Tensor) -> Distribution:
    return _coin({"p": 0.5, **named}, result)


def _binomial(named: dict[str, Any], result: torch.Tensor) -> Distribution:
    count, p = named["count"].double(), named["prob"].double()
    spread = (count * p * (1 - p)).sqrt()

    def at(quantile: float) -> torch.Tensor:
        if quantile in (0.0, 1.0):
            return (count * quantile).where((p > 0) & (p < 1), count * p)
        return (count * p + spread * _normal_fractions(quantile, result)).round().clamp(min=0).minimum(count)

    return Distribution(at)


def _poisson(named: dict[str, Any], result: torch.Tensor) -> Distribution:
    rate = named["self"].double()
    return Distribution(lambda q: (rate + rate.sqrt() * _normal_fractions(q, result)).round().clamp(min=0))


def _permutation(named: dict[str, Any], result: torch.Tensor) -> Distribution:
    n = result.numel()

    def at(quantile: float) -> torch.Tensor:
        places = torch.arange(n)
        return places.flip(0) if quantile == 1 else places.roll(-int(quantile * n))

    return Distribution(at, 1 if n == 1 else None)


def _multinomial(named: dict[str, Any], result: torch.Tensor) -> Distribution:
    weights = named["self"].reshape(-1, named["self"].size(-1))
    possible = [row.nonzero().flatten() for row in weights]
    again = named.get("replacement", False)
    samples = result.size(-1)

    def at(quantile: float) -> torch.Tensor:
        rows = []
        for places in possible:
            first = min(int(quantile * len(places)), len(places) - 1)
            rows.append(places[first].expand(samples) if again else places.roll(-first)[:samples])
        return torch.stack(rows).view(result.shape)

    most = max(map(len, possible))
    return Distribution(at, most if most <= _FEW else None)


_DISTRIBUTIONS: dict[str, Callable[[dict[str, Any], torch.Tensor], Distribution | None]] = {
    **dict.fromkeys(("rand", "rand_like", "uniform", "uniform_"), _uniform),
    **dict.fromkeys(("randn", "randn_like", "normal", "normal_", "normal_functional"), _normal),
    **dict.fromkeys(("randint", "randint_like", "random", "random_"), _integers),
    "bernoulli": _coin,
    "bernoulli_": _coin_in_place,
    **dict.fromkeys(("exponential", "exponential_"), _exponential),
    **dict.fromkeys(("log_normal", "log_normal_"), _log_normal),
    **dict.fromkeys(("cauchy", "cauchy_"), _cauchy),
    **dict.fromkeys(("geometric", "geometric_"), _geometric),
    "binomial": _binomial,
    "poisson": _poisson,
    "randperm": _permutation,
    "multinomial": _multinomial,
}
