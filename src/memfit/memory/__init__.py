"""Memory of a step: timeline, peaks by category and module, what the allocator reserves, measured truth."""

from memfit.memory.events import Reserved, allocator_config, events, reserved
from memfit.memory.measured import Measurement, measured
from memfit.memory.modules import CallMemory, ModuleMemory, Snapshot, call_memory, module_memory
from memfit.memory.summary import Fit, MemorySummary, Overhead, Place, StorageAtPeak, summarize
from memfit.memory.timeline import CATEGORIES, PhaseSpan, Timeline

__all__ = [
    "CATEGORIES",
    "CallMemory",
    "Fit",
    "Measurement",
    "MemorySummary",
    "ModuleMemory",
    "Overhead",
    "PhaseSpan",
    "Place",
    "Reserved",
    "Snapshot",
    "StorageAtPeak",
    "Timeline",
    "allocator_config",
    "call_memory",
    "events",
    "measured",
    "module_memory",
    "reserved",
    "summarize",
]
