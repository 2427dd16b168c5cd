"""A row of equal blocks of which five ran: where each block's records are, and what they refer to.

See Note [Replication] in replication.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memfit.capture.repeated_blocks import FIRST, LAST, NotRepeated
from memfit.capture.trace_types import BEFORE_STEP, NO_INDEX, ModuleCall, Op, Phase, Storage

TEMPLATE = FIRST - 1
"""The position whose records are copied."""
COMPARED = (TEMPLATE - 1, TEMPLATE, TEMPLATE + 1)
OUTSIDE = -1
OPS, STORAGES, CALLS = 0, 1, 2
"""Tables of a record."""
_POSITIONS = FIRST + LAST

Form = tuple[int, int]
"""A number of the whole record: that of position 2, and what is added for each block after it."""


@dataclass(slots=True)
class Pass:
    """One way through the row; `segments` has ranges of ops, storages and calls of each position."""

    up: bool
    segments: list[list[tuple[int, int]]]

    def insert_at(self, table: int) -> int:
        """Return where records of other blocks go, in numbers of the short record."""
        begin, end = self.segments[table][TEMPLATE]
        return end if self.up else begin

    def length(self, table: int) -> int:
        """Return how many records a block has."""
        begin, end = self.segments[table][TEMPLATE]
        return end - begin


class BlockRow:
    """A record of a step in which five blocks of a row ran, and where what they did is in the whole record.

    `passes` are the ways through the row. By table, `owner` has the pass, the position and the offset in the segment of
    each record, None outside of passes, and `moved` the number in the whole record of those outside.
    """

    def __init__(
        self,
        ops: Sequence[Op],
        storages: Sequence[Storage],
        calls: Sequence[ModuleCall],
        paths: Sequence[str],
        own: Sequence[Sequence[int]],
        stand_ins: dict[int, tuple[int, int]],
    ) -> None:
        self.ops, self.storages, self.calls = ops, storages, calls
        self.paths, self.own, self.stand_ins = paths, own, stand_ins
        self.blocks = len(paths)
        self.copies = self.blocks - _POSITIONS
        self.block_at = [*range(FIRST), *range(self.blocks - LAST, self.blocks)]
        self.call_position = self._call_positions()
        self.op_position = [self.call_position[op.call] if op.call != NO_INDEX else OUTSIDE for op in ops]
        self.passes: list[Pass] = []
        self.owner: list[list[tuple[int, int, int] | None]] = [[None] * len(table) for table in (ops, storages, calls)]
        self._find_passes()
        self._find_storages()
        self._find_calls()
        self.moved = [self._moved(table) for table in (OPS, STORAGES, CALLS)]
        self.own_place = {n: (block, i) for block, numbers in enumerate(own) for i, n in enumerate(numbers)}
        self.own_stride = self._own_stride()

    # -- where everything is ----------------------------------------------------------------------------------------

    def _call_positions(self) -> list[int]:
        by_path = {self.paths[block]: position for position, block in enumerate(self.block_at)}
        found: list[int] = []
        for call in self.calls:
            above = found[call.parent] if call.parent != NO_INDEX else OUTSIDE
            found.append(above if above != OUTSIDE else by_path.get(call.module, OUTSIDE))
        return found

    def _find_passes(self) -> None:
        positions = np.array(self.op_position, dtype=np.int64)
        edges = [0, *(np.flatnonzero(np.diff(positions)) + 1).tolist(), len(positions)]
        runs = [(int(positions[a]), a, b) for a, b in itertools.pairwise(edges) if a < b]
        order = [position for position, _, _ in runs]
        up, down = list(range(_POSITIONS)), list(range(_POSITIONS))[::-1]
        covered = 0
        for i in range(len(runs) - _POSITIONS + 1):
            window = order[i : i + _POSITIONS]
            if window not in (up, down):
                continue
            segments = sorted(runs[i : i + _POSITIONS])
            ranges = [(begin, end) for _, begin, end in segments]
            number = len(self.passes)
            self.passes.append(Pass(window == up, [ranges, [], []]))
            self._check_lengths(ranges)
            covered += 1
            for position, begin, end in segments:
                for index in range(begin, end):
                    self.owner[OPS][index] = (number, position, index - begin)
        if any(order.count(position) != covered for position in COMPARED) or not covered:
            raise NotRepeated("ops of other modules run between those of the blocks")

    def _check_lengths(self, ranges: list[tuple[int, int]]) -> None:
        if len({ranges[position][1] - ranges[position][0] for position in COMPARED}) != 1:
            raise NotRepeated("blocks differ in their ops")

    def _find_storages(self) -> None:
        found: list[list[list[int]]] = [[[] for _ in range(_POSITIONS)] for _ in self.passes]
        for number, storage in enumerate(self.storages):
            if number in self.stand_ins or storage.alloc_at == BEFORE_STEP or storage.alloc_at >= len(self.ops):
                continue
            owner = self.owner[OPS][storage.alloc_at]
            if owner is not None:
                found[owner[0]][owner[1]].append(number)
        for number, each in enumerate(self.passes):
            for position, numbers in enumerate(found[number]):
                begin, end = (numbers[0], numbers[-1] + 1) if numbers else (0, 0)
                if end - begin != len(numbers):
                    raise NotRepeated("storages of several blocks are mixed")
                each.segments[STORAGES].append((begin, end))
                for n in numbers:
                    self.owner[STORAGES][n] = (number, position, n - begin)
            self._check_adjacent(each, STORAGES)

    def _find_calls(self) -> None:
        tops: dict[tuple[int, bool], list[tuple[int, int]]] = {}
        for index, call in enumerate(self.calls):
            position = self.call_position[index]
            if position == OUTSIDE or (call.parent != NO_INDEX and self.call_position[call.parent] != OUTSIDE):
                continue
            end = index + 1
            while end < len(self.calls) and self.calls[end].parent >= index:
                end += 1
            tops.setdefault((position, call.phase is not Phase.BACKWARD), []).append((index, end))
        seen = {True: 0, False: 0}
        for number, each in enumerate(self.passes):
            turn = seen[each.up]
            seen[each.up] += 1
            for position in range(_POSITIONS):
                ranges = tops.get((position, each.up), [])
                begin, end = ranges[turn] if turn < len(ranges) else (0, 0)
                each.segments[CALLS].append((begin, end))
                for index in range(begin, end):
                    self.owner[CALLS][index] = (number, position, index - begin)
            self._check_adjacent(each, CALLS)
        for up, count in seen.items():
            if any(len(tops.get((position, up), [])) not in ((count,) if up else (0, count)) for position in COMPARED):
                raise NotRepeated("blocks are called in other ways than the step passes through them")

    def _check_adjacent(self, each: Pass, table: int) -> None:
        ranges = [each.segments[table][position] for position in (COMPARED if each.up else COMPARED[::-1])]
        self._check_lengths(each.segments[table])
        if ranges[0] != ranges[1] and any(a[1] != b[0] for a, b in itertools.pairwise(ranges)):
            raise NotRepeated("records of several blocks are mixed")

    def _moved(self, table: int) -> list[int]:
        """Return the number in the whole record of everything outside of the row, and of one behind the last."""
        size = len((self.ops, self.storages, self.calls)[table])
        moved = np.arange(size + 1)
        for each in self.passes:
            if each.length(table):
                moved[each.insert_at(table) :] += self.copies * each.length(table)
        if table == STORAGES:
            removed = np.zeros(size + 1, dtype=np.int64)
            removed[sorted(self.stand_ins)] = 1
            moved -= np.cumsum(removed)
        return moved.tolist()

    def _own_stride(self) -> int:
        template, following = self.own[TEMPLATE], self.own[TEMPLATE + 1]
        stride = following[0] - template[0] if template else 0
        for block, numbers in enumerate(self.own):
            if list(numbers) != [n + (block - TEMPLATE) * stride for n in template]:
                raise NotRepeated("parameters of blocks are not in order")
        return stride

    def in_row(self, table: int, number: int, block: int, offset: int) -> int:
        """Return the number in the whole record of what a block, neither the first nor the last, has in a pass."""
        each = self.passes[number]
        length = each.length(table)
        if each.up:
            return self.moved[table][each.segments[table][1][0]] + (block - 1) * length + offset
        begin = each.segments[table][_POSITIONS - LAST][0]
        return self.moved[table][begin] + (self.blocks - LAST - block) * length + offset

    # -- what positions 1, 2 and 3 have in common -------------------------------------------------------------------

    def form(self, table: int, numbers: Sequence[int]) -> Form:
        """Return the form of a reference, given those of positions 1, 2 and 3."""
        first = self._kind(table, numbers[0], numbers[1], COMPARED[0], of_first=False)
        if first is None or first != self._kind(table, numbers[1], numbers[2], COMPARED[1], of_first=True):
            raise NotRepeated("blocks differ in what they use")
        kind, number, relative, offset = first
        if kind == "rel":
            stride = self.passes[number].length(table) * (1 if self.passes[number].up else -1)
            return self.in_row(table, number, TEMPLATE + relative, offset), stride
        if kind == "own":
            return self.moved[table][offset], self.own_stride
        return (NO_INDEX if offset == NO_INDEX else self.moved[table][offset]), 0

    def _kind(self, table: int, one: int, other: int, position: int, *, of_first: bool) -> Any:
        """Return how a position and the next one refer to the same thing; None when they do not."""
        if one == NO_INDEX or other == NO_INDEX:
            return ("abs", 0, 0, NO_INDEX) if one == other else None
        mine, theirs = self.owner[table][one], self.owner[table][other]
        if mine is not None and theirs is not None and mine[0] == theirs[0]:
            relative = mine[1] - position
            if relative == theirs[1] - position - 1 and -1 <= relative <= 1:
                ends = self.passes[mine[0]].segments[table]
                from_end = mine[2] - (ends[mine[1]][1] - ends[mine[1]][0])
                same_end = from_end == theirs[2] - (ends[theirs[1]][1] - ends[theirs[1]][0])
                if mine[2] == theirs[2] or same_end:
                    return ("rel", mine[0], relative, mine[2] if of_first else theirs[2])
        if one == other and (mine is None or mine[1] not in COMPARED):
            return ("abs", 0, 0, one) if one not in self.own_place or table != STORAGES else None
        if table == STORAGES and one in self.own_place and other in self.own_place:
            places = self.own_place[one], self.own_place[other]
            blocks = self.block_at[position], self.block_at[position + 1]
            if (places[0][0], places[1][0]) == blocks and places[0][1] == places[1][1]:
                return ("own", 0, 0, self.own[TEMPLATE][places[0][1]])
        return None

    def forms(self, table: int, groups: Sequence[Sequence[int]]) -> list[Form]:
        if len({len(group) for group in groups}) != 1:
            raise NotRepeated("blocks differ in what they use")
        return [self.form(table, numbers) for numbers in zip(*groups, strict=True)]
