"""A step as mallocs and frees, and what the caching allocator of the target reserves for it.

Note [Steady state]: reserved memory depends on history. A process makes parameters, buffers and the batch;
its first optimizer step makes the optimizer state, and takes it from blocks that activations have just freed;
later steps find those blocks taken and may have to reserve more. So the step is run more than once: the first
time with the state born where the optimizer first uses it, then again with everything in place until a step
reserves nothing more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memfit.hardware import Device
from memfit.memory.allocator import FREE, AllocatorConfig, AllocatorOutOfMemory, CachingAllocator, MemoryEvent
from memfit.memory.timeline import Timeline
from memfit.trace import NEVER, Category, Phase, Trace

_MOST_STEPS = 8


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


def events(trace: Trace) -> Iterator[MemoryEvent]:
    """One steady step from nothing: residents, then each op's outputs, its workspace, and what dies after it.

    The key of a storage is its number; that of the workspace of op k is `len(trace.storages) + k`.
    """
    for _, event in _Replay(trace).steady(fresh=True):
        yield event


def reserved(trace: Trace, device: Device, *, limit_bytes: int | None = None) -> Reserved:
    """Peaks of the device's allocator (Note [Steady state]); without a cache, reserved equals allocated."""
    if not device.allocator.caches:
        peak_bytes = Timeline.of(trace, device.allocator.rounding_bytes).peak_bytes
        return Reserved(
            peak_requested_bytes=Timeline.of(trace).peak_bytes,
            peak_allocated_bytes=peak_bytes,
            peak_reserved_bytes=peak_bytes,
            first_step_reserved_bytes=peak_bytes,
            steps=1,
            retries=0,
        )
    replay = _Replay(trace)
    allocator = CachingAllocator(allocator_config(device, limit_bytes=limit_bytes))
    failed = _run(allocator, replay.first())
    first_bytes = allocator.peak_reserved_bytes
    steps = 1
    while failed is None and steps < _MOST_STEPS:
        earlier_bytes = allocator.peak_reserved_bytes
        failed = _run(allocator, replay.steady(fresh=False))
        steps += 1
        if allocator.peak_reserved_bytes == earlier_bytes:
            break
    return Reserved(
        peak_requested_bytes=allocator.peak_requested_bytes,
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        first_step_reserved_bytes=first_bytes,
        steps=steps,
        retries=allocator.retries,
        out_of_memory_op=failed,
    )


def _run(allocator: CachingAllocator, stream: Iterator[tuple[int, MemoryEvent]]) -> int | None:
    """Feed the allocator; gives the op whose malloc did not fit."""
    for op, (key, requested_bytes) in stream:
        if requested_bytes == FREE:
            allocator.free(key)
            continue
        try:
            allocator.malloc(key, requested_bytes)
        except AllocatorOutOfMemory:
            return op
    return None


class _Replay:
    """The events of a step with the op they belong to, `NEVER` before the first."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.size = [storage.bytes for storage in trace.storages]
        moments = len(trace.ops) + 1
        birth = np.array([storage.birth for storage in trace.storages], np.int64)
        death = np.array([storage.death for storage in trace.storages], np.int64)
        self.residents = np.flatnonzero(birth == NEVER).tolist()
        self.lost = np.flatnonzero((birth == NEVER) & (death != NEVER)).tolist()
        self.left = np.flatnonzero((birth != NEVER) & (death == NEVER)).tolist()
        unseen = (birth != NEVER) & (death != NEVER) & (death < birth)
        self.born = _grouped(birth, (birth != NEVER) & ~unseen, moments)
        self.freed = _grouped(death, (death != NEVER) & ~unseen, moments)

    def first(self) -> Iterator[tuple[int, MemoryEvent]]:
        """The first step of a process: optimizer state is made when the optimizer first runs on it."""
        storages = self.trace.storages
        states = [s for s in self.residents if storages[s].category is Category.OPTIMIZER_STATE]
        made_at = self._first_reader(set(states))
        late = [s for s in states if storages[s].death == NEVER or storages[s].death >= made_at]
        yield from self._malloc(NEVER, sorted(set(self.residents).difference(late)))
        for op in range(len(self.trace.ops)):
            if op == made_at:
                yield from self._malloc(op, late)
            yield from self._op(op)
        if made_at == len(self.trace.ops):
            yield from self._malloc(made_at, late)
        yield from self._end()

    def steady(self, *, fresh: bool) -> Iterator[tuple[int, MemoryEvent]]:
        """A later step; with `fresh` as the only one, else after another on the same allocator."""
        if fresh:
            yield from self._malloc(NEVER, self.residents)
        else:
            yield from self._malloc(NEVER, self.lost)
        for op in range(len(self.trace.ops)):
            yield from self._op(op)
        if fresh:
            yield from self._malloc(len(self.trace.ops), self.born[-1])
        else:
            yield from self._end()

    def _op(self, op: int) -> Iterator[tuple[int, MemoryEvent]]:
        yield from self._malloc(op, self.born[op])
        workspace_bytes = self.trace.ops[op].workspace_bytes
        if workspace_bytes:
            key = len(self.size) + op
            yield op, MemoryEvent(key, workspace_bytes)
            yield op, MemoryEvent(key, FREE)
        for storage in self.freed[op]:
            yield op, MemoryEvent(storage, FREE)

    def _end(self) -> Iterator[tuple[int, MemoryEvent]]:
        """What the step leaves behind is replaced by what the next one leaves."""
        end = len(self.trace.ops)
        yield from self._malloc(end, self.born[-1])
        for storage in self.left:
            yield end, MemoryEvent(storage, FREE)

    def _malloc(self, op: int, storages: list[int]) -> Iterator[tuple[int, MemoryEvent]]:
        for storage in storages:
            yield op, MemoryEvent(storage, self.size[storage])

    def _first_reader(self, states: set[int]) -> int:
        """The op before which an optimizer makes all its state; the end of the step when none reads it."""
        for index, op in enumerate(self.trace.ops):
            if op.phase is Phase.OPTIMIZER and any(ref.storage in states for ref in op.inputs):
                return index
        return len(self.trace.ops)


def _grouped(index: npt.NDArray[np.int64], chosen: npt.NDArray[np.bool_], count: int) -> list[list[int]]:
    """The chosen storages by op index, each group in order of number."""
    groups: list[list[int]] = [[] for _ in range(count)]
    for storage in np.flatnonzero(chosen).tolist():
        groups[index[storage]].append(storage)
    return groups
