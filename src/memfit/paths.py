"""Module paths that differ in numbers only, shown as one."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from math import prod

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_BLOCK = re.compile(r"^(?P<list>.*?)\.?(?P<number>\d+)$")
_FEWEST_BLOCKS = 2
MODEL_LABEL = "(model)"


def alike(path: str) -> str:
    """Replace the numbers in a path: `layers.0.norm` and `layers.31.norm` are both `layers.*.norm`."""
    return _NUMBER.sub("*", path)


def folded(paths: Iterable[str]) -> str:
    """Write paths that are alike as one: `layers.0-15.norm`, `layers.0-3,7`; stars where ranges would say too much."""
    different = sorted(set(paths))
    numbers = zip(*map(_NUMBER.findall, different), strict=True)
    columns = [sorted(set(map(int, column))) for column in numbers]
    every = prod(len(column) for column in columns) == len(different)
    shown = iter([ranges(column) if every or len(column) == 1 else "*" for column in columns])
    return _NUMBER.sub(lambda _: next(shown), different[0])


def ranges(numbers: Iterable[int]) -> str:
    """Write numbers with those in a row as one: `0-3,7`."""
    parts = []
    for _, run in groupby(enumerate(sorted(set(numbers))), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        parts.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ",".join(parts)


def around(path: str) -> list[str]:
    """Return the paths of the modules that contain a module, from the model itself on."""
    parts = path.split(".") if path else []
    return [".".join(parts[:count]) for count in range(len(parts))]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedDifferences:
    """How two sides of named things differ.

    `counts` are paths with another number of numbered parts on each side, and the two numbers. `groups` are what the
    first and the second side have under names that differ in numbers only, None where a side has no such name; names
    of numbered parts that only one side has are left to `counts`.
    """

    counts: tuple[tuple[str, int, int], ...]
    groups: tuple[tuple[str | None, str | None, tuple[str, ...]], ...]


def named_differences(one: Mapping[str, str], other: Mapping[str, str]) -> NamedDifferences:
    """Compare what two sides have under each name."""
    numbers, other_numbers = _numbers(one), _numbers(other)
    uneven = {
        path: numbers[path] ^ other_numbers[path]
        for path in numbers
        if path in other_numbers and len(numbers[path]) != len(other_numbers[path])
    }

    def in_uneven(name: str) -> bool:
        parts = name.split(".")
        return any(part in uneven.get(".".join(parts[:index]), ()) for index, part in enumerate(parts))

    groups: dict[tuple[str, str | None, str | None], list[str]] = defaultdict(list)
    for name in dict.fromkeys((*one, *other)):
        first, second = one.get(name), other.get(name)
        if first != second and not (None in (first, second) and in_uneven(name)):
            groups[alike(name), first, second].append(name)
    counts = dict.fromkeys((alike(path), len(numbers[path]), len(other_numbers[path])) for path in uneven)
    found = tuple((first, second, tuple(names)) for (_, first, second), names in groups.items())
    return NamedDifferences(counts=tuple(counts), groups=found)


def _numbers(names: Iterable[str]) -> dict[str, set[str]]:
    """Return the numbers that follow each path: `layers` has 0 to 31."""
    found: dict[str, set[str]] = defaultdict(set)
    for name in names:
        parts = name.split(".")
        for index, part in enumerate(parts):
            if part.isdecimal():
                found[".".join(parts[:index])].add(part)
    return found


def unwrapped(kinds: Mapping[str, str], inner_names: Iterable[str]) -> dict[str, str]:
    """Return each module's kind, a wrapper's being that of what it wraps; what is wrapped is left out.

    `inner_names` are the attributes under which wrappers keep a module.
    """
    names = tuple(inner_names)
    inner = {path: found for path in kinds for name in names if (found := f"{path}.{name}" if path else name) in kinds}
    wrapped = set(inner.values())

    def kind_of(path: str) -> str:
        return kind_of(inner[path]) if path in inner else kinds[path]

    return {path: kind_of(path) for path in kinds if path not in wrapped}


def repeated_blocks(kinds: Mapping[str, str]) -> tuple[str, ...]:
    """Return the outermost modules, of those given with their kinds, that are alike and numbered in a row."""
    lists: dict[str, list[str]] = defaultdict(list)
    for path in kinds:
        if match := _BLOCK.match(path):
            lists[match["list"]].append(path)
    found: list[str] = []
    for name in sorted(lists, key=lambda each: (each.count("."), each)):
        blocks = lists[name]
        inside = any(name == block or name.startswith(f"{block}.") for block in found)
        if len(blocks) >= _FEWEST_BLOCKS and len({kinds[block] for block in blocks}) == 1 and not inside:
            found += blocks
    return tuple(found)


def module_label(module: str) -> str:
    """Return a module's path as people read it: `(model)` for the model itself, whose path is empty."""
    return module or MODEL_LABEL
