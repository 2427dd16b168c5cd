"""The flat layout: where each parameter lies in the flat tensor of its unit, and which part of it each rank keeps."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

Member = TypeVar("Member")
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
class FlatLayout:
    """The slots of a flat tensor of `elements`, padding included, which `ranks` ranks divide evenly."""

    slots: tuple[Slot, ...]
    elements: int
    ranks: int

    @classmethod
    def of(cls, shapes: Iterable[tuple[tuple[str, ...], Sequence[int]]], ranks: int) -> FlatLayout:
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


class PartTable:
    """Which gradients go into the part that each rank gets of a sum, and which parts are complete.

    With `separate` every part is a tensor of its own, which can be filled once its gradients have come. Otherwise all
    are one tensor, as NCCL wants them, and they are complete together.
    """

    def __init__(self, layout: FlatLayout, *, separate: bool) -> None:
        elements = layout.shard_elements or 1
        self.separate = separate
        self.ranks_of = [range(slot.begin // elements, -(-slot.end // elements)) for slot in layout.slots]
        """For each slot the ranks that keep some of it."""
        self.slots_of = [
            [number for number, ranks in enumerate(self.ranks_of) if rank in ranks] for rank in range(layout.ranks)
        ]
        """For each rank the slots of which it keeps some."""

    def completed_by(self, number: int, has_come: Callable[[int], bool]) -> list[int]:
        """Return the parts that are complete now that the gradient of a slot has come."""
        ranks = self.ranks_of[number] if self.separate else range(len(self.slots_of))
        found = [rank for rank in ranks if all(has_come(each) for each in self.slots_of[rank])]
        return found if self.separate or len(found) == len(ranks) else []


def group_alike(members: Iterable[Member], kind: Callable[[Member], tuple[object, bool]]) -> list[list[Member]]:
    """Put members of a unit that lie in one flat tensor together, by their dtype and whether they train.

    Those that train lie apart from those that do not, since a frozen parameter has no gradient to reduce.
    """
    found: dict[tuple[object, bool], list[Member]] = defaultdict(list)
    for member in members:
        found[kind(member)].append(member)
    return list(found.values())


def aligned(elements: int) -> int:
    """The next multiple of the alignment."""
    return -(-elements // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS
