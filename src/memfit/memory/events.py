"""A step as mallocs and frees, and what the caching allocator of the target reserves for it.

Note [Steady state]: reserved memory depends on history. A process makes parameters, buffers and the batch;
its first optimizer step makes the optimizer state, and takes it from blocks that activations have just freed;
later steps find those blocks taken and may have to reserve more. So the step is run more than once: the first
time with the state born where the optimizer first uses it, then again with everything in place until a step
reserves nothing more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memfit.capture import NEVER, Category, Phase, Trace
from memfit.hardware import Device
from memfit.memory.allocator import FREE, AllocatorConfig, AllocatorOutOfMemory, CachingAllocator, MemoryEvent
from memfit.memory.timeline import CATEGORIES, Bytes

Ints = npt.NDArray[np.int64]
Row = tuple[int, int, int]
"""An event with its instant: instant, key, requested bytes."""

_ROW = {category: row for row, category in enumerate(CATEGORIES)}
_TEMPORARY = _ROW[Category.TEMPORARY]
_STATE = _ROW[Category.OPTIMIZER_STATE]
MOST_STEPS = 8
"""After so many a process is taken as settled (Note [Steady state])."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """Peaks of a process that has run the step until it settled.

    `peak_allocated_bytes` and `peak_reserved_bytes` are `torch.cuda.max_memory_allocated` and
    `max_memory_reserved`. `steps` is how many steps it took until one reserved nothing more. `retries` counts
    how often the allocator had to give its cache back to the device. `out_of_memory_op` is the op that failed
    under the limit, None when none did.
    """

    peak_requested_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    first_step_reserved_bytes: int
    steps: int
    retries: int
    out_of_memory_op: int | None = None


def allocator_config(device: Device, *, limit_bytes: int | None = None) -> AllocatorConfig:
    """The allocator's constants on a device, and the memory that it may reserve."""
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AllocationTable:
    """Every allocation of a step, and the instants that it lives through.

    Instants are the ops in the order they run; the number after the last is the end of the step. An allocation is
    made at instant `alloc_at` and freed after instant `free_after`, each `NEVER` when that is not in the step; one that
    is freed before it is made was made and freed between two ops and is in no instant. `row` is its category's place in
    `CATEGORIES`, `size_bytes` what is asked of the allocator. `workspace_bytes` has one entry for each op that runs.
    `states_made` is the instant before which a first step makes the optimizer state.
    """

    size_bytes: Bytes
    row: Ints
    alloc_at: Ints
    free_after: Ints
    workspace_bytes: Bytes
    states_made: int

    @classmethod
    def of(cls, trace: Trace) -> AllocationTable:
        """Those of a captured step: an allocation is a storage, an instant an op."""
        storages, count = trace.storages, len(trace.storages)
        row = np.fromiter((_ROW[storage.category] for storage in storages), np.int64, count)
        alloc_at = np.fromiter((storage.alloc_at for storage in storages), np.int64, count)
        return cls(
            size_bytes=np.fromiter((storage.bytes for storage in storages), np.int64, count),
            row=row,
            alloc_at=alloc_at,
            free_after=np.fromiter((storage.free_after for storage in storages), np.int64, count),
            workspace_bytes=np.fromiter((op.workspace_bytes for op in trace.ops), np.int64, len(trace.ops)),
            states_made=_first_reader(trace, set(np.flatnonzero((alloc_at == NEVER) & (row == _STATE)).tolist())),
        )

    @property
    def instants(self) -> int:
        """How many ops run; also the number of the end of the step."""
        return len(self.workspace_bytes)

    def levels(self, rounding_bytes: int = 1) -> tuple[Bytes, Bytes]:
        """Bytes before and during each instant (Note [Moments] of the timeline), a row for each category."""
        size = -(-self.size_bytes // rounding_bytes) * rounding_bytes
        allocated = np.zeros((len(CATEGORIES), self.instants + 1), np.int64)
        freed = np.zeros((len(CATEGORIES), self.instants + 1), np.int64)
        start = np.zeros(len(CATEGORIES), np.int64)
        resident, seen = self.alloc_at == NEVER, self.seen
        made, gone = seen & ~resident, seen & (self.free_after != NEVER)
        np.add.at(start, self.row[resident], size[resident])
        np.add.at(allocated, (self.row[made], self.alloc_at[made]), size[made])
        np.add.at(freed, (self.row[gone], self.free_after[gone] + 1), size[gone])
        before = start[:, None] + np.cumsum(allocated, axis=1) - allocated - np.cumsum(freed, axis=1)
        during = before + allocated
        during[_TEMPORARY, :-1] += -(-self.workspace_bytes // rounding_bytes) * rounding_bytes
        return before, during

    @property
    def seen(self) -> npt.NDArray[np.bool_]:
        """Those that are there at an instant."""
        return (self.alloc_at == NEVER) | (self.free_after == NEVER) | (self.free_after >= self.alloc_at)


def events(trace: Trace) -> Iterator[MemoryEvent]:
    """One steady step from nothing: residents, then each op's outputs, its workspace, and what dies after it.

    The key of a storage is its number; that of the workspace of op k is `len(trace.storages) + k`.
    """
    return allocator_events(AllocationTable.of(trace))


def allocator_events(lives: AllocationTable) -> Iterator[MemoryEvent]:
    """The same of any lives; the key of the workspace of instant k is the number of lives plus k."""
    for _, key, requested_bytes in Replay(lives).alone():
        yield MemoryEvent(key, requested_bytes)


def reserved(trace: Trace, device: Device, *, limit_bytes: int | None = None) -> Reserved:
    """Peaks of the device's allocator (Note [Steady state]); without a cache, reserved equals allocated."""
    return simulate_reserved(AllocationTable.of(trace), device, limit_bytes=limit_bytes)


def simulate_reserved(lives: AllocationTable, device: Device, *, limit_bytes: int | None = None) -> Reserved:
    """The same of any lives; `out_of_memory_op` is then the instant that failed."""
    if not device.allocator.caches:
        peak_bytes = _peak_bytes(lives, device.allocator.rounding_bytes)
        return Reserved(
            peak_requested_bytes=_peak_bytes(lives, 1),
            peak_allocated_bytes=peak_bytes,
            peak_reserved_bytes=peak_bytes,
            first_step_reserved_bytes=peak_bytes,
            steps=1,
            retries=0,
        )
    allocator = CachingAllocator(allocator_config(device, limit_bytes=limit_bytes))
    failed: int | None = None
    reserved_bytes: list[int] = []
    for stream in Replay(lives).steps():
        failed = _run(allocator, stream)
        reserved_bytes.append(allocator.peak_reserved_bytes)
        settled = len(reserved_bytes) > 1 and reserved_bytes[-1] == reserved_bytes[-2]
        if failed is not None or settled:
            break
    return Reserved(
        peak_requested_bytes=allocator.peak_requested_bytes,
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        first_step_reserved_bytes=reserved_bytes[0],
        steps=len(reserved_bytes),
        retries=allocator.retries,
        out_of_memory_op=failed,
    )


def _peak_bytes(lives: AllocationTable, rounding_bytes: int) -> int:
    return int(lives.levels(rounding_bytes)[1].sum(axis=0).max())


def _run(allocator: CachingAllocator, stream: Iterable[Row]) -> int | None:
    """Feed the allocator; gives the instant whose malloc did not fit."""
    for instant, key, requested_bytes in stream:
        if requested_bytes == FREE:
            allocator.free(key)
            continue
        try:
            allocator.malloc(key, requested_bytes)
        except AllocatorOutOfMemory:
            return instant
    return None


class Replay:
    """The events of a step with the instant they belong to, `NEVER` before the first."""

    def __init__(self, lives: AllocationTable) -> None:
        self.lives = lives
        self.size = lives.size_bytes.tolist()
        self.end = lives.instants
        alloc_at, free_after, seen = lives.alloc_at, lives.free_after, lives.seen
        resident, stays = alloc_at == NEVER, free_after == NEVER
        self.residents = np.flatnonzero(resident).tolist()
        self.lost = np.flatnonzero(resident & ~stays).tolist()
        self.left = np.flatnonzero(~resident & stays).tolist()
        late = resident & (lives.row == _STATE) & (stays | (free_after >= lives.states_made))
        self.late = np.flatnonzero(late).tolist()
        self.early = np.flatnonzero(resident & ~late).tolist()
        self.alloc_at = _grouped(alloc_at, seen & ~resident, self.end + 1)
        self.freed = _grouped(free_after, seen & ~stays, self.end + 1)
        self.workspace = lives.workspace_bytes.tolist()

    def steps(self) -> Iterator[list[Row]]:
        """The steps of a process on one allocator, as many as it may take until one reserves nothing more."""
        yield self.first()
        later = self.later()
        for _ in range(MOST_STEPS - 1):
            yield later

    def first(self) -> list[Row]:
        """The first step of a process: optimizer state is made when the optimizer first runs on it."""
        made = self.lives.states_made
        return [
            *self._malloc(NEVER, self.early),
            *self._ops(0, made),
            *self._malloc(made, self.late),
            *self._ops(made, self.end),
            *self._end(),
        ]

    def later(self) -> list[Row]:
        """A step after another on the same allocator."""
        return [*self._malloc(NEVER, self.lost), *self._ops(0, self.end), *self._end()]

    def alone(self) -> list[Row]:
        """A later step as the only one."""
        ops = self._ops(0, self.end)
        return [*self._malloc(NEVER, self.residents), *ops, *self._malloc(self.end, self.alloc_at[-1])]

    def _ops(self, begin: int, end: int) -> list[Row]:
        stream: list[Row] = []
        for instant in range(begin, end):
            stream += self._malloc(instant, self.alloc_at[instant])
            if self.workspace[instant]:
                key = len(self.size) + instant
                stream += ((instant, key, self.workspace[instant]), (instant, key, FREE))
            stream += [(instant, key, FREE) for key in self.freed[instant]]
        return stream

    def _end(self) -> list[Row]:
        """What the step leaves behind is replaced by what the next one leaves."""
        return [*self._malloc(self.end, self.alloc_at[-1]), *((self.end, key, FREE) for key in self.left)]

    def _malloc(self, instant: int, keys: list[int]) -> list[Row]:
        return [(instant, key, self.size[key]) for key in keys]


def _first_reader(trace: Trace, states: set[int]) -> int:
    """The op before which an optimizer makes all its state; the end of the step when none reads it."""
    for index, op in enumerate(trace.ops):
        if op.phase is Phase.OPTIMIZER and any(ref.storage in states for ref in op.inputs):
            return index
    return len(trace.ops)


def _grouped(instant: Ints, chosen: npt.NDArray[np.bool_], count: int) -> list[list[int]]:
    """The chosen allocations by instant, each group in order of number."""
    groups: list[list[int]] = [[] for _ in range(count)]
    numbers = np.flatnonzero(chosen)
    for number, place in zip(numbers.tolist(), instant[numbers].tolist(), strict=True):
        groups[place].append(number)
    return groups
