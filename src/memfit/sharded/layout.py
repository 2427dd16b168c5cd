"""Where every parameter lies in the flat tensor of its unit, and which part of it each rank keeps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ALIGNED_ELEMENTS = 32
"""Parameters and shards begin at multiples of this many elements, so that kernels read aligned addresses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One parameter, under all its names, at elements `begin` up to (not including) `end` of the flat tensor."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def elements(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The elements of one parameter that one rank keeps.

    They are elements `begin` up to `end` of the flattened parameter and begin at element `at` of the rank's shard.
    """

    begin: int
    end: int
    at: int

    @property
    def elements(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The slots of a flat tensor of `elements`, padding included, which `ranks` ranks divide evenly."""

    slots: tuple[Slot, ...]
    elements: int
    ranks: int

    @classmethod
    def of(cls, shapes: Iterable[tuple[tuple[str, ...], Sequence[int]]], ranks: int) -> Layout:
        """Put parameters one after another; what follows the last of them is padding."""
        slots: list[Slot] = []
        end = 0
        for names, shape in shapes:
            begin = aligned(end)
            end = begin + math.prod(shape)
            slots.append(Slot(names=names, shape=tuple(shape), begin=begin, end=end))
        shard = aligned(-(-end // ranks))
        return cls(slots=tuple(slots), elements=shard * ranks, ranks=ranks)

    @property
    def shard_elements(self) -> int:
        """Elements of one rank's shard."""
        return self.elements // self.ranks

    def gaps(self, rank: int) -> list[tuple[int, int]]:
        """The elements of a rank's shard that belong to no parameter, from and up to."""
        first, elements = rank * self.shard_elements, self.shard_elements
        ends = [0, *(slot.end for slot in self.slots)]
        begins = [*(slot.begin for slot in self.slots), self.elements]
        inside = [(max(begin - first, 0), min(end - first, elements)) for begin, end in zip(ends, begins, strict=True)]
        return [(begin, end) for begin, end in inside if begin < end]

    def part(self, slot: Slot, rank: int) -> Part:
        """What a rank keeps of a parameter; nothing, at the end of it, where its shard lies elsewhere."""
        first = rank * self.shard_elements
        begin = min(max(slot.begin, first), slot.end)
        end = max(min(slot.end, first + self.shard_elements), begin)
        at = begin - first if end > begin else 0
        return Part(begin=begin - slot.begin, end=end - slot.begin, at=at)


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A block of a tensor with as many dimensions, whose elements follow each other in the flattened tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def aligned(elements: int) -> int:
    """The next multiple of the alignment."""
    return -(-elements // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS


def boxes(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """The blocks, in order, that elements `begin` up to `end` of a flattened tensor consist of.

    At most two for every dimension but the last, and one more: the rest of a row, whole rows, the start of a row.
    """
    if end <= begin:
        return []
    if not shape:
        return [Box(offsets=(), sizes=())]
    if len(shape) == 1:
        return [Box(offsets=(begin,), sizes=(end - begin,))]
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row
    if first > last:  # inside one row
        return _in_row(shape[1:], last, begin - last * row, end - last * row)
    found: list[Box] = []
    if begin < first * row:
        found += _in_row(shape[1:], first - 1, begin - (first - 1) * row, row)
    if first < last:
        found.append(Box(offsets=(first, *(0 for _ in shape[1:])), sizes=(last - first, *shape[1:])))
    if last * row < end:
        found += _in_row(shape[1:], last, 0, end - last * row)
    return found


def _in_row(shape: Sequence[int], number: int, begin: int, end: int) -> list[Box]:
    return [Box(offsets=(number, *box.offsets), sizes=(1, *box.sizes)) for box in boxes(shape, begin, end)]
