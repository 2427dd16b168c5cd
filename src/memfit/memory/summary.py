"""What a person wants to know about the memory of a step: how much, of what, where, and does it fit."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from memfit.capture import BEFORE_STEP, NO_INDEX, Category, Trace
from memfit.errors import InputError
from memfit.hardware import Device, RankMemory, Target
from memfit.memory.modules import ModuleMemory, module_memory
from memfit.memory.room import Room, judge_room
from memfit.memory.steady_state import reserved
from memfit.memory.timeline import Timeline


class Fit(str, enum.Enum):
    """Whether the step runs on the device."""

    FITS = "fits"
    MARGIN = "fits if the allocator reserves no more than predicted"
    TIGHT = "fits only while the allocator keeps emptying its cache"
    TOO_LARGE = "does not fit"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpLocation:
    """An op of the step as people find it; `module` is None outside any module call, as in a loss function.

    `op` may be before or after those of the step, and then has no name.
    """

    op: int
    name: str
    phase: str
    module: str | None
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageAtPeak:
    """A storage alive at the peak. `name` is the parameter's it belongs to, or the op's that made it."""

    storage: int
    bytes: int
    category: Category
    name: str
    module: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Device memory that no tensor of the step uses."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySummary:
    """The memory of one step on one device.

    `peak_bytes` is the sum of the tensors alive, rounded as the allocator rounds them, and `peak_by_category`
    adds up to it. `peak_allocated_bytes` also counts the ends of blocks that the allocator does not split
    off, and `peak_reserved_bytes` what it holds from the device (Note [Steady state]). Overheads
    are in none of them; `needed_bytes` has them all. When the step does not fit, `failing` is the op that runs out of
    memory and `failing_step` the step of the process that it does so in, counted from 1.
    """

    device: str
    device_title: str
    device_bytes: int
    usable_bytes: int
    start_bytes: int
    peak_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_by_category: dict[Category, int]
    peak: OpLocation
    overheads: tuple[Overhead, ...]
    fit: Fit
    retries: int
    failing: OpLocation | None
    failing_step: int | None
    modules: tuple[ModuleMemory, ...]
    largest: tuple[StorageAtPeak, ...]
    notes: tuple[str, ...]

    @property
    def overhead_bytes(self) -> int:
        """All of them together."""
        return sum(overhead.bytes for overhead in self.overheads)

    @property
    def needed_bytes(self) -> int:
        """What the process takes of the device when nothing limits it."""
        return self.peak_reserved_bytes + self.overhead_bytes

    @property
    def free_bytes(self) -> int:
        """What is left of the device; negative by what is missing."""
        return self.device_bytes - self.needed_bytes


def summarize(trace: Trace, *, target: str | Device | Target | None = None, largest: int = 10) -> MemorySummary:
    """Return the summary of a trace on the device it was captured for, or on another of the same type."""
    aim = Target.parse(target if target is not None else trace.hardware)
    device, memory = aim.device, aim.rank_memory
    if device.type != trace.device_type:
        raise InputError(
            f"the trace was captured for a {trace.device_type} device and {device.name} is a {device.type} one: "
            "capture the step again"
        )
    timeline = Timeline.of(trace, device.allocator.rounding_bytes)
    free = reserved(trace, device)
    room = judge_room(aim, timeline).room
    limited = free
    if room in (Room.TIGHT, Room.TOO_LITTLE) and device.allocator.caches:
        limited = reserved(trace, device, limit_bytes=memory.available_bytes)
    there = timeline.alive_at(timeline.peak_op)
    order = np.argsort(-timeline.allocation_bytes[there], kind="stable")  # older first among equals
    return MemorySummary(
        device=device.name,
        device_title=device.title,
        device_bytes=device.memory_total_bytes,
        usable_bytes=memory.usable_bytes,
        start_bytes=timeline.start_bytes,
        peak_bytes=timeline.peak_bytes,
        peak_allocated_bytes=free.peak_allocated_bytes,
        peak_reserved_bytes=free.peak_reserved_bytes,
        peak_by_category=timeline.peak_by_category,
        peak=locate_op(timeline, timeline.peak_op),
        overheads=_overheads(memory),
        fit=_FITS[room],
        retries=limited.retries,
        failing=None if limited.out_of_memory_op is None else locate_op(timeline, limited.out_of_memory_op),
        failing_step=None if limited.out_of_memory_op is None else limited.steps,
        modules=tuple(module_memory(timeline).values()),
        largest=tuple(_storage_at_peak(timeline, int(storage)) for storage in there[order[:largest]]),
        notes=trace.notes,
    )


def locate_op(timeline: Timeline, op: int) -> OpLocation:
    """Return where an op is; an index outside the ops is the start or the end of the step."""
    trace = timeline.trace
    if not 0 <= op < len(trace.ops):
        return OpLocation(
            op=op, name="", phase="before the step" if op < 0 else "end of the step", module=None, source=""
        )
    return OpLocation(
        op=op,
        name=trace.ops[op].name,
        phase=trace.ops[op].phase.value,
        module=timeline.module_of(op) if trace.ops[op].call != NO_INDEX else None,
        source=trace.source_of(op),
    )


_FITS = {Room.ENOUGH: Fit.FITS, Room.MARGIN: Fit.MARGIN, Room.TIGHT: Fit.TIGHT, Room.TOO_LITTLE: Fit.TOO_LARGE}


def _overheads(memory: RankMemory) -> tuple[Overhead, ...]:
    named = (("context", memory.context.expected_bytes), ("NCCL", memory.nccl.expected_bytes))
    return tuple(Overhead(name=name, bytes=n_bytes) for name, n_bytes in named if n_bytes)


def _storage_at_peak(timeline: Timeline, number: int) -> StorageAtPeak:
    trace = timeline.trace
    storage = trace.storages[number]
    made = 0 <= storage.alloc_at < len(trace.ops)
    return StorageAtPeak(
        storage=number,
        bytes=int(timeline.allocation_bytes[number]),
        category=storage.category,
        name=storage.name or (trace.ops[storage.alloc_at].name if made else ""),
        module=storage.module,
        source=trace.source_of(storage.alloc_at) if storage.alloc_at != BEFORE_STEP and made else "",
    )
