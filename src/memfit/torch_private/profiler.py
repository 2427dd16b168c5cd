"""The profiler: which of its events are allocations."""

from __future__ import annotations

from torch._C._autograd import _profiler_enabled
from torch._C._profiler import _EventType

ALLOCATION = _EventType.Allocation
"""The tag of allocator events in the event tree (torch/csrc/profiler/python/init.cpp), on the CPU
the truth for memory."""

TORCH_OP = _EventType.TorchOp
"""The tag of ops in the event tree (torch/csrc/profiler/python/init.cpp): an allocation belongs to those around it."""


def profiler_enabled() -> bool:
    """Return whether a profiler is at work in this process (torch/csrc/autograd/init.cpp); there can be only one."""
    return bool(_profiler_enabled())
