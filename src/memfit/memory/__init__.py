"""Memory of a step: timeline, peaks by category and module, what the allocator reserves, measured truth."""

from memfit.memory.allocations import (
    BETWEEN,
    CATEGORIES,
    AllocationTable,
    Bytes,
    Flags,
    Interval,
    Ints,
    Offload,
    Recompute,
    Stream,
    Unit,
    round_up,
)
from memfit.memory.allocator import FREE, BlockSnapshot, BlockState, CachingAllocator, SegmentSnapshot
from memfit.memory.blocks import Block, BlockPool, ExpandableSegment
from memfit.memory.measurement import Measurement, measured
from memfit.memory.modules import CallMemory, ModuleMemory, Snapshot, call_memory, module_memory
from memfit.memory.room import Reservation, Room, find_room, judge_room, reserved_range
from memfit.memory.steady_state import ProcessEvents, Reserved, Row, allocator_config, events, reserved
from memfit.memory.summary import Fit, MemorySummary, OpLocation, Overhead, StorageAtPeak, summarize
from memfit.memory.timeline import Allocation, PhaseSpan, Timeline

__all__ = [
    "BETWEEN",
    "CATEGORIES",
    "FREE",
    "Allocation",
    "AllocationTable",
    "Block",
    "BlockPool",
    "BlockSnapshot",
    "BlockState",
    "Bytes",
    "CachingAllocator",
    "CallMemory",
    "ExpandableSegment",
    "Fit",
    "Flags",
    "Interval",
    "Ints",
    "Measurement",
    "MemorySummary",
    "ModuleMemory",
    "Offload",
    "OpLocation",
    "Overhead",
    "PhaseSpan",
    "ProcessEvents",
    "Recompute",
    "Reservation",
    "Reserved",
    "Room",
    "Row",
    "SegmentSnapshot",
    "Snapshot",
    "StorageAtPeak",
    "Stream",
    "Timeline",
    "Unit",
    "allocator_config",
    "call_memory",
    "events",
    "find_room",
    "judge_room",
    "measured",
    "module_memory",
    "reserved",
    "reserved_range",
    "round_up",
    "summarize",
]
