"""What a rank has other than the captured step: storages taken away and allocations added, in the order of both."""

from __future__ import annotations

from dataclasses import replace

from memfit.capture import AFTER_STEP, BEFORE_STEP, NO_INDEX, Category, Trace
from memfit.memory import Bytes, Interval, Stream, Timeline
from memfit.sharding.gradients import zeroed_gradients
from memfit.sharding.schedule import EventKind, ShardSchedule


class Levels:
    """Collects changes in the order in which they happen between the same two ops."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self._made: list[Interval] = []
        self._ended: dict[int, tuple[int, int]] = {}
        self._taken: set[int] = set()
        self._noted = 0
        self._built: tuple[Interval, ...] | None = None

    @property
    def removed(self) -> frozenset[int]:
        """The storages that were taken."""
        return frozenset(self._taken)

    @property
    def allocations(self) -> tuple[Interval, ...]:
        """Everything that was made, in that order."""
        if self._built is None:
            self._built = tuple(
                replace(each, end=self._ended[number][0], freed_order=self._ended[number][1])
                if number in self._ended
                else each
                for number, each in enumerate(self._made)
            )
        return self._built

    def has_taken(self, storage: int) -> bool:
        """Whether a storage was taken away."""
        return storage in self._taken

    def take(self, storage: int) -> None:
        """Take a storage of the step away."""
        self._taken.add(storage)

    def add(self, schedule: ShardSchedule) -> None:
        """Make and end what the events of a schedule allocate and free."""
        self._built = None
        first = len(self._made)
        made: list[tuple[int, bool, int]] = [(BEFORE_STEP, False, NO_INDEX)] * len(schedule.buffers)
        for event in schedule.events:
            if event.kind is EventKind.ALLOCATE:
                made[event.number] = event.moment, event.by_op, NO_INDEX if event.by_op else self._next_order()
            elif event.kind is EventKind.FREE and event.by_op:
                self.end_with(first + event.number, event.moment)
            elif event.kind is EventKind.FREE:
                self.end(first + event.number, event.moment)
        self._made += [
            Interval(
                category=buffer.role.category,
                size_bytes=buffer.size_bytes,
                begin=begin,
                end=AFTER_STEP,
                ahead=not by_op,
                made_order=order,
                module=schedule.modules[buffer.unit],
                stream=buffer.stream,
            )
            for buffer, (begin, by_op, order) in zip(schedule.buffers, made, strict=True)
        ]

    def make(
        self,
        category: Category,
        n_bytes: int,
        begin: int,
        *,
        module: str = "",
        by_op: bool = False,
        stream: Stream = Stream.COMPUTE,
    ) -> int:
        """Make an allocation before op `begin`, or by it, and give its number; it stays until it is ended."""
        self._built = None
        order = NO_INDEX
        if not by_op and begin != BEFORE_STEP:
            order = self._next_order()
        self._made.append(
            Interval(
                category=category,
                size_bytes=n_bytes,
                begin=begin,
                end=AFTER_STEP,
                ahead=not by_op,
                made_order=order,
                module=module,
                stream=stream,
            )
        )
        return len(self._made) - 1

    def end(self, allocation: int, moment: int) -> None:
        """Free an allocation before op `moment`, after what was noted there until now."""
        self._built = None
        self._ended[allocation] = (moment, self._next_order())

    def end_with(self, allocation: int, free_after: int) -> None:
        """Free an allocation as the step frees it, after op `free_after` and before anything else."""
        self._built = None
        if free_after != AFTER_STEP:
            self._ended[allocation] = (free_after + 1, NO_INDEX)

    def replace(self, storage: int, category: Category, n_bytes: int, module: str = "") -> None:
        """Put other bytes in the place of a storage, with its life."""
        alloc_at, free_after = int(self.timeline.alloc_at[storage]), int(self.timeline.free_after[storage])
        self.take(storage)
        if free_after == AFTER_STEP or free_after >= alloc_at:
            self.end_with(
                self.make(category, n_bytes, alloc_at, module=module, by_op=alloc_at != BEFORE_STEP), free_after
            )

    def replace_zeroed(self, trace: Trace) -> None:
        """Put in the place of gradients that the step begins with and frees what a step of this rank leaves of them.

        They are whole in the captured step, and `zero_grad` frees all of them at once.
        """
        zeroed = zeroed_gradients(trace)
        left = [each for each in self.allocations if each.category is Category.GRADIENT and each.end == AFTER_STEP]
        for storage in zeroed:
            self.take(storage)
        for each in left if zeroed else ():
            if each.begin != BEFORE_STEP:
                made = self.make(each.category, each.size_bytes, BEFORE_STEP, module=each.module, stream=each.stream)
                self.end_with(made, max(zeroed.values()))

    def levels(self) -> tuple[Bytes, Bytes]:
        """Return the bytes before and during each op, a row for each category (`Timeline.step_levels`)."""
        return self.timeline.under_plan(intervals=self.allocations, removed=self.removed).step_levels()

    def _next_order(self) -> int:
        """Return the place of a change among all that happen between ops."""
        self._noted += 1
        return self._noted - 1
