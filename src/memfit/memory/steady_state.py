"""A step as mallocs and frees, and what the caching allocator of the target reserves for it.

Note [Steady state]: reserved memory depends on history. A process makes parameters, buffers and the batch;
its first products make the workspaces of cuBLAS, which lie among activations and stay there;
its first optimizer step makes the optimizer state, and takes it from blocks that activations have just freed;
later steps find those blocks taken and may have to reserve more. So the step is run more than once: the first
time with the state allocated where the optimizer first uses it, then again with everything in place until a step
reserves nothing more.

Gradients are the same: a new process has none. Those that a captured step begins with and frees (`zero_grad` before the
forward or the backward) are not in the first step, and in a later one they are what the step before has left, where it
left it. Those that stay (`zero_grad` never, or without `set_to_none`) are made by the first backward. So where a loop
calls `zero_grad`, first or last, makes no difference, as it makes none on a device.

What a process runs before its first step (`Step.warm_up`) leaves its segments in the cache, where parameters have been
made and optimizer state has not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from memfit.capture import AFTER_STEP, BEFORE_STEP, NO_INDEX, Category, Trace, no_garbage_collection
from memfit.hardware import Device
from memfit.memory.allocations import ROW, AllocationTable, Flags, Ints
from memfit.memory.allocator import FREE, AllocatorConfig, AllocatorOutOfMemory, CachingAllocator, MemoryEvent

Row = tuple[int, int, int]
"""An event with its instant: instant, key, requested bytes."""

MOST_STEPS = 8
"""After so many a process is taken as settled (Note [Steady state])."""
STEPS_AT_LIMIT = 4
"""At least so many are run under a limit: a cache that is emptied in every step reserves no more than the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """Peaks of a process that has run the step until it settled.

    `peak_allocated_bytes` and `peak_reserved_bytes` are `torch.cuda.max_memory_allocated` and
    `max_memory_reserved`. `steps` is how many steps it took until one reserved nothing more. `retries` counts
    how often the allocator had to give its cache back to the device, `later_retries` those of them in later steps than
    the first. `out_of_memory_op` is the op that failed under the limit, also when it was recomputed, None when none
    did.
    """

    peak_requested_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    first_step_reserved_bytes: int
    steps: int
    retries: int
    later_retries: int = 0
    out_of_memory_op: int | None = None

    @property
    def runs_freely(self) -> bool:
        """Whether no allocation failed, and no step after the first emptied the cache."""
        return self.out_of_memory_op is None and not self.later_retries


def allocator_config(device: Device, *, limit_bytes: int | None = None) -> AllocatorConfig:
    """Return the allocator's constants on a device, and the memory that it may reserve."""
    rules = device.allocator
    return AllocatorConfig(
        round_bytes=rules.rounding_bytes,
        small_limit_bytes=rules.small_limit_bytes,
        small_segment_bytes=rules.small_segment_bytes,
        large_segment_bytes=rules.large_segment_bytes,
        min_large_alloc_bytes=rules.large_limit_bytes,
        round_large_bytes=rules.large_rounding_bytes,
        expandable_segments=rules.expandable_segments,
        limit_bytes=limit_bytes,
    )


def events(step: Trace | AllocationTable) -> Iterator[MemoryEvent]:
    """Yield the events of one steady step: residents, then each op's outputs, its workspace, and what it frees.

    The key of an allocation is its number (of a captured step: its storage's); that of the workspace of instant k is
    the number of allocations plus k.
    """
    process = ProcessEvents(_table(step))
    for _, key, requested_bytes in process.alone():
        yield MemoryEvent(key, requested_bytes, process.streams[key])


@no_garbage_collection()  # thousands of lists are made, none of them in a cycle
def reserved(
    step: Trace | AllocationTable, device: Device, *, limit_bytes: int | None = None, freely: bool = False
) -> Reserved:
    """Return the peaks of the device's allocator (Note [Steady state]), which keeps free blocks of each stream apart.

    Without a cache, reserved equals allocated. With a limit, at least `STEPS_AT_LIMIT` steps are run, but with
    `freely` none behind one after which `runs_freely` is known to be false.
    """
    table = _table(step)
    if not device.allocator.caches:
        peak_bytes = _peak_bytes(table, device.allocator.rounding_bytes)
        return Reserved(
            peak_requested_bytes=_peak_bytes(table, 1),
            peak_allocated_bytes=peak_bytes,
            peak_reserved_bytes=peak_bytes,
            first_step_reserved_bytes=peak_bytes,
            steps=1,
            retries=0,
        )
    allocator = CachingAllocator(allocator_config(device, limit_bytes=limit_bytes))
    failed: int | None = None
    first_retries = 0
    reserved_bytes: list[int] = []
    least_steps = 2 if limit_bytes is None else STEPS_AT_LIMIT
    process = _process(table)
    for rows in process.steps():
        failed = _run(allocator, rows, process)
        reserved_bytes.append(allocator.peak_reserved_bytes)
        first_retries = allocator.retries if len(reserved_bytes) == 1 else first_retries
        settled = len(reserved_bytes) >= least_steps and reserved_bytes[-1] == reserved_bytes[-2]
        if failed is not None or settled or (freely and allocator.retries > first_retries):
            break
    return Reserved(
        peak_requested_bytes=allocator.peak_requested_bytes,
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        first_step_reserved_bytes=reserved_bytes[0],
        steps=len(reserved_bytes),
        retries=allocator.retries,
        later_retries=allocator.retries - first_retries,
        out_of_memory_op=failed if failed is None or failed == BEFORE_STEP else int(table.op[failed]),
    )


def _table(step: Trace | AllocationTable) -> AllocationTable:
    return step if isinstance(step, AllocationTable) else AllocationTable.of(step)


def _peak_bytes(table: AllocationTable, rounding_bytes: int) -> int:
    return int(table.levels(rounding_bytes)[1].sum(axis=0).max())


def _run(allocator: CachingAllocator, rows: Iterable[Row], process: ProcessEvents) -> int | None:
    """Run the allocator on the events; return the instant whose malloc did not fit, None when all did."""
    malloc, free, streams = allocator.malloc, allocator.free, process.streams
    for instant, key, requested_bytes in rows:
        if requested_bytes == FREE:
            free(key)
            continue
        try:
            malloc(key, requested_bytes, streams[key])
        except AllocatorOutOfMemory:
            return instant
    return None


class ProcessEvents:
    """The events of a process that repeats a step, with their instants, `BEFORE_STEP` before the first.

    `streams` has the number of the stream on which each key is allocated; workspaces are on compute.
    """

    def __init__(self, table: AllocationTable) -> None:
        self.table = table
        self.size = table.size_bytes.tolist()
        self.end = table.instants
        self.streams = [*table.stream.tolist(), *[0] * self.end]
        alloc_at, free_after, seen = table.alloc_at, table.free_after, table.seen
        resident, stays = alloc_at == BEFORE_STEP, free_after == AFTER_STEP
        state, gradient = table.row == ROW[Category.OPTIMIZER_STATE], table.row == ROW[Category.GRADIENT]
        self.residents = np.flatnonzero(resident).tolist()
        carried = self._carried(resident & gradient & ~stays, ~resident & gradient & stays)
        old = np.isin(np.arange(len(alloc_at)), list(carried))
        self.lost = np.flatnonzero(resident & ~stays & ~old).tolist()
        self.left = [key for key in np.flatnonzero(~resident & stays).tolist() if key not in set(carried.values())]
        late = resident & state & (stays | (free_after >= table.states_made))
        late_gradients = resident & gradient & stays & (table.first_use >= 0)
        self.late = np.flatnonzero(late).tolist()
        lazy = table.first_made_at != BEFORE_STEP
        self.lazy = np.flatnonzero(lazy).tolist()
        self.early = np.flatnonzero(resident & ~late & ~lazy & ~late_gradients & ~(gradient & ~stays)).tolist()
        self.alloc_at = _grouped(alloc_at, seen & ~resident, self.end + 1)
        self.freed = _grouped(free_after, seen & ~stays, self.end + 1)
        self.workspace = table.workspace_bytes.tolist()
        # In the first step some gradients are made that a later one begins with, and others are not there.
        made = np.where(late_gradients, table.first_use, alloc_at)
        self._first_alloc_at = _grouped(made, (seen & ~resident) | late_gradients, self.end + 1)
        self._first_freed = _grouped(free_after, seen & ~stays & ~(resident & gradient), self.end + 1)
        # In a later one gradients of the step before are freed.
        zeroed = np.flatnonzero((table.run == NO_INDEX) & (table.op == 0))[0] if table.zeroed_first else NO_INDEX
        self._zeroed = [carried[key] for key in carried if free_after[key] <= zeroed]
        kept = seen & ~stays & ~(old & (free_after <= zeroed))
        self._later_freed = [
            [carried.get(key, key) for key in keys] for keys in _grouped(free_after, kept, self.end + 1)
        ]

    def steps(self) -> Iterator[list[Row]]:
        """Yield the steps of a process on one allocator, as many as it may take until one reserves nothing more."""
        yield self._first_rows
        for _ in range(MOST_STEPS - 1):
            yield self._later_rows

    @cached_property
    def _first_rows(self) -> list[Row]:
        return self._with_workspaces(self.first())

    @cached_property
    def _later_rows(self) -> list[Row]:
        return self.later()

    def first(self) -> list[Row]:
        """Return the events of a process's first step (Note [Steady state])."""
        made, alloc_at, freed = self.table.states_made, self._first_alloc_at, self._first_freed
        return [
            *self._malloc(BEFORE_STEP, self.early),
            *self._warm_up(),
            *self._ops(0, made, alloc_at, freed),
            *self._malloc(made, self.late),
            *self._ops(made, self.end, alloc_at, freed),
            *self._end(),
        ]

    def _warm_up(self) -> list[Row]:
        """Return the events of what runs before the first step, all freed at its end."""
        until, frees, rows = self.table.warmed_until, self.table.warm_up_frees, list[Row]()
        there: dict[int, None] = {}
        ends: dict[int, list[int]] = defaultdict(list)
        for instant in range(until):
            for key in self.alloc_at[instant]:
                there[key] = None
                ends[int(frees[key])].append(key)
            rows += self._malloc(BEFORE_STEP, self.alloc_at[instant])
            if self.workspace[instant]:
                key = len(self.size) + instant
                rows += ((BEFORE_STEP, key, self.workspace[instant]), (BEFORE_STEP, key, FREE))
            for key in ends.pop(instant, ()):
                del there[key]
                rows.append((BEFORE_STEP, key, FREE))
        return [*rows, *((BEFORE_STEP, key, FREE) for key in there)]

    def _with_workspaces(self, rows: list[Row]) -> list[Row]:
        """Return the events of a first step with the workspaces that its first products make, after their results."""
        made_at = self.table.first_made_at
        for key in self.lazy:
            instant = int(made_at[key])
            # `bisect` by instant, then past what the op makes and keeps; copies for cuBLAS are there at that time
            place = bisect_left(rows, instant, key=lambda row: row[0])
            while place < len(rows) and rows[place][0] == instant and rows[place][2] != FREE:
                place += 1
            rows.insert(place, (instant, key, self.size[key]))
        return rows

    def later(self) -> list[Row]:
        """Return the events of a step after another on the same allocator."""
        return [
            *((BEFORE_STEP, key, FREE) for key in self._zeroed),
            *self._malloc(BEFORE_STEP, self.lost),
            *self._ops(0, self.end, self.alloc_at, self._later_freed),
            *self._end(),
        ]

    def alone(self) -> list[Row]:
        """Return the events of a later step as the only one."""
        ops = self._ops(0, self.end, self.alloc_at, self.freed)
        return [*self._malloc(BEFORE_STEP, self.residents), *ops, *self._malloc(self.end, self.alloc_at[-1])]

    def _carried(self, begun_with: Flags, left: Flags) -> dict[int, int]:
        """Return, of the gradients that a step begins with and frees, those of the step before that they are.

        They are told by size and stream: which of two alike is freed first makes no difference. One that is still
        there when the step makes its own again is none of them.
        """
        table, free = self.table, defaultdict[tuple[int, int], list[int]](list)
        for key in np.flatnonzero(left)[::-1].tolist():
            free[self.size[key], self.streams[key]].append(key)
        found: dict[int, int] = {}
        for key in np.flatnonzero(begun_with).tolist():
            same = free[self.size[key], self.streams[key]]
            if same and table.alloc_at[same[-1]] > table.free_after[key]:
                found[key] = same.pop()
        return found

    def _ops(self, begin: int, end: int, alloc_at: list[list[int]], freed: list[list[int]]) -> list[Row]:
        rows: list[Row] = []
        for instant in range(begin, end):
            rows += self._malloc(instant, alloc_at[instant])
            if self.workspace[instant]:
                key = len(self.size) + instant
                rows += ((instant, key, self.workspace[instant]), (instant, key, FREE))
            rows += [(instant, key, FREE) for key in freed[instant]]
        return rows

    def _end(self) -> list[Row]:
        """Return the events of the end: what the step leaves behind is replaced by what the next one leaves."""
        return [*self._malloc(self.end, self.alloc_at[-1]), *((self.end, key, FREE) for key in self.left)]

    def _malloc(self, instant: int, keys: list[int]) -> list[Row]:
        return [(instant, key, self.size[key]) for key in keys]


_process = lru_cache(maxsize=1)(ProcessEvents)
"""The events of a table: a plan is run at several limits, one after the other."""


def _grouped(instant: Ints, chosen: Flags, count: int) -> list[list[int]]:
    """Return the chosen allocations by instant, each group in order of number."""
    groups: list[list[int]] = [[] for _ in range(count)]
    numbers = np.flatnonzero(chosen)
    for number, place in zip(numbers.tolist(), instant[numbers].tolist(), strict=True):
        groups[place].append(number)
    return groups
