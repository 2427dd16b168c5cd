"""Measured truth for CPU: the allocator's own events, as torch's profiler records them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch._C._profiler import _EventType


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorEvent:
    """One allocation (positive bytes) or free (negative) and the ops it happened in, outermost first."""

    bytes: int
    address: int
    ops: tuple[str, ...]


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

    Frees on threads that the profiler does not know (Gloo's) are missing from its events.
    """
    measurement = Measurement()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
        yield measurement
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    found: list[tuple[int, AllocatorEvent]] = []
    for root in results.experimental_event_tree():
        _collect(root, found)
    found.sort(key=lambda pair: pair[0])
    measurement.events = tuple(event for _, event in found)
    measurement.timeline_bytes = np.cumsum([event.bytes for event in measurement.events], dtype=np.int64)


def _collect(root: Any, found: list[tuple[int, AllocatorEvent]]) -> None:
    stack: list[tuple[Any, tuple[str, ...]]] = [(root, ())]
    while stack:
        event, ops = stack.pop()
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            if fields.device.type == "cpu":
                found.append(
                    (
                        event.start_time_ns,
                        AllocatorEvent(bytes=fields.alloc_size, address=fields.ptr or 0, ops=ops),
                    )
                )
        inner = (*ops, event.name) if event.tag == _EventType.TorchOp else ops
        stack.extend((child, inner) for child in event.children)
