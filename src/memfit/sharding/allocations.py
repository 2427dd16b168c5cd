"""Levels of a step from which storages are taken and to which allocations are added, also those between two ops.

Note [Between ops]: what sharding makes and frees between op k-1 and op k it does in an order, and the highest point of
that is a moment of its own. `before[k]` is what is there after all of it, when a unit that is recomputed would begin.
The highest point goes to `during[k-1]`, when it is higher than that (to `during[0]` at the beginning of the step).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from memfit.capture import NEVER, Category
from memfit.memory import CATEGORIES, Bytes, Interval, Timeline

_ROW = {category: row for row, category in enumerate(CATEGORIES)}


class Levels:
    """Collects changes in the order in which they happen between the same two ops."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self._ops = len(timeline.trace.ops)
        self._made: list[Interval] = []
        self._ended: dict[int, tuple[int, int]] = {}
        self._taken: set[int] = set()
        self._between: list[tuple[int, int, int, int]] = []  # moment, order, row, bytes

    @property
    def removed(self) -> frozenset[int]:
        """The storages that were taken."""
        return frozenset(self._taken)

    @property
    def allocations(self) -> tuple[Interval, ...]:
        """Everything that was made, in that order."""
        return tuple(
            replace(each, end=self._ended[number][0], freed_order=self._ended[number][1])
            if number in self._ended
            else each
            for number, each in enumerate(self._made)
        )

    def has_taken(self, storage: int) -> bool:
        """Whether a storage was taken away."""
        return storage in self._taken

    def rounded(self, n_bytes: int) -> int:
        """Bytes as the device's allocator gives them."""
        rounding = self.timeline.rounding_bytes
        return -(-n_bytes // rounding) * rounding

    def take(self, storage: int) -> None:
        """Take a storage of the step away."""
        self._taken.add(storage)

    def make(self, category: Category, n_bytes: int, begin: int, *, module: str = "", by_op: bool = False) -> int:
        """Make an allocation before op `begin`, or by it, and give its number; it stays until it is ended."""
        order = NEVER
        if not by_op and begin != NEVER:
            order = self._note(begin, _ROW[category], self.rounded(n_bytes))
        self._made.append(
            Interval(
                category=category,
                size_bytes=n_bytes,
                begin=begin,
                end=NEVER,
                ahead=not by_op,
                made_order=order,
                module=module,
            )
        )
        return len(self._made) - 1

    def end(self, allocation: int, moment: int) -> None:
        """Free an allocation before op `moment`, after what was noted there until now."""
        made = self._made[allocation]
        order = self._note(moment, _ROW[made.category], -self.rounded(made.size_bytes))
        self._ended[allocation] = (moment, order)

    def end_with(self, allocation: int, free_after: int) -> None:
        """Free an allocation as the step frees it, after op `free_after` and before anything else."""
        if free_after != NEVER:
            self._ended[allocation] = (free_after + 1, NEVER)
            made = self._made[allocation]
            self._between.append((free_after + 1, NEVER, _ROW[made.category], -self.rounded(made.size_bytes)))

    def replace(self, storage: int, category: Category, n_bytes: int, module: str = "") -> None:
        """Put other bytes in the place of a storage, with its life."""
        alloc_at, free_after = int(self.timeline.alloc_at[storage]), int(self.timeline.free_after[storage])
        self.take(storage)
        if free_after == NEVER or free_after >= alloc_at:
            self.end_with(self.make(category, n_bytes, alloc_at, module=module, by_op=alloc_at != NEVER), free_after)

    def levels(self) -> tuple[Bytes, Bytes]:
        """Bytes before and during each op, a row for each category (Note [Between ops])."""
        allocated = np.zeros((len(CATEGORIES), self._ops + 2), np.int64)
        freed = np.zeros_like(allocated)
        start = np.zeros(len(CATEGORIES), np.int64)
        storages = self.timeline.trace.storages
        for storage in self._taken:
            alloc_at, free_after = int(self.timeline.alloc_at[storage]), int(self.timeline.free_after[storage])
            if free_after != NEVER and free_after < alloc_at:
                continue
            row, n_bytes = _ROW[storages[storage].category], int(self.timeline.allocation_bytes[storage])
            if alloc_at == NEVER:
                start[row] -= n_bytes
            else:
                allocated[row, alloc_at] -= n_bytes
            if free_after != NEVER:
                freed[row, free_after + 1] -= n_bytes
        for made in self._made:
            if made.begin == NEVER:
                start[_ROW[made.category]] += self.rounded(made.size_bytes)
            elif not made.ahead:
                allocated[_ROW[made.category], made.begin] += self.rounded(made.size_bytes)
        change = start[:, None] + np.cumsum(allocated, axis=1) - allocated - np.cumsum(freed, axis=1)
        between = np.zeros_like(allocated)
        for moment, _, row, n_bytes in self._between:
            between[row, moment] += n_bytes
        change += np.cumsum(between, axis=1)
        before = self.timeline.before_by_row + change[:, :-1]
        during = self.timeline.during_by_row + (change + allocated)[:, :-1]
        self._raise(before, during, between)
        return before, during

    def _raise(self, before: Bytes, during: Bytes, between: Bytes) -> None:
        moment, columns = NEVER, []
        for at, _, row, n_bytes in [*sorted(self._between, key=lambda each: each[:2]), (self._ops + 1, 0, 0, 0)]:
            if at != moment:
                if columns and moment <= self._ops:
                    highest = max(columns, key=lambda column: int(column.sum()))
                    to = max(moment - 1, 0)
                    if highest.sum() > during[:, to].sum():
                        during[:, to] = highest
                if at > self._ops:
                    return
                moment, columns = at, [before[:, at] - between[:, at]]
            column = columns[-1].copy()
            column[row] += n_bytes
            columns.append(column)

    def _note(self, moment: int, row: int, n_bytes: int) -> int:
        """Write down a change, and its place among all."""
        order = len(self._between)
        self._between.append((moment, order, row, n_bytes))
        return order
