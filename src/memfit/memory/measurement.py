"""Measured truth for CPU: the allocator's own events, as torch's profiler records them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from memfit.capture import AllocatorEvent, allocations


@dataclass(slots=True)
class Measurement:
    """What the CPU allocator did in a region. Bytes are relative to those allocated when the region began."""

    events: tuple[AllocatorEvent, ...] = ()
    timeline_bytes: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @property
    def peak_bytes(self) -> int:
        """The highest point above the start, 0 when memory never rose above it."""
        return max(0, int(self.timeline_bytes.max(initial=0)))

    @property
    def peak_event(self) -> int:
        """The index of the event that reached the peak."""
        return int(self.timeline_bytes.argmax()) if len(self.timeline_bytes) else 0

    @property
    def end_bytes(self) -> int:
        """What the region left allocated beyond the start."""
        return int(self.timeline_bytes[-1]) if len(self.timeline_bytes) else 0


@contextlib.contextmanager
def measured() -> Iterator[Measurement]:
    """Record every allocation and free of the CPU allocator inside the block; filled in when the block ends.

    Missing from the profiler's events are frees of what was allocated before the block, so keep a step that frees such
    memory (gradients of the step before) inside it twice, and frees on threads that it does not know (Gloo's).
    """
    measurement = Measurement()
    gc.collect()  # what earlier code left in cycles would be freed at any op of the block, and lower its peak
    with allocations() as events:
        yield measurement
    measurement.events = tuple(events)
    measurement.timeline_bytes = np.cumsum([event.bytes for event in events], dtype=np.int64)
