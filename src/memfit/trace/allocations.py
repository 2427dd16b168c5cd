"""What the CPU allocator does while something runs, as torch's profiler records it."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._profiler import _EventType

_STDERR = 2
_CHATTER = b"SyncActivityProfilerHandler"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorEvent:
    """One allocation (positive bytes) or free (negative) and the ops it happened in, outermost first."""

    bytes: int
    address: int
    ops: tuple[str, ...]


@contextlib.contextmanager
def allocations() -> Iterator[list[AllocatorEvent]]:
    """Every allocation and free of the CPU allocator inside the block, in order of time, once the block has ended.

    Frees on threads that the profiler does not know (Gloo's) are missing.
    """
    events: list[AllocatorEvent] = []
    activities = [torch.profiler.ProfilerActivity.CPU]
    profiler = torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True)
    with _without_chatter():
        profiler.__enter__()
    try:
        yield events
    finally:
        with _without_chatter():
            profiler.__exit__(None, None, None)
    found: list[tuple[int, AllocatorEvent]] = []
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    for root in results.experimental_event_tree():
        _collect(root, found)
    found.sort(key=lambda pair: pair[0])
    events.extend(event for _, event in found)


def _collect(root: Any, found: list[tuple[int, AllocatorEvent]]) -> None:
    stack: list[tuple[Any, tuple[str, ...]]] = [(root, ())]
    while stack:
        event, ops = stack.pop()
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            if fields.device.type == "cpu":
                record = AllocatorEvent(bytes=fields.alloc_size, address=fields.ptr or 0, ops=ops)
                found.append((event.start_time_ns, record))
        inner = (*ops, event.name) if event.tag == _EventType.TorchOp else ops
        stack.extend((child, inner) for child in event.children)


@contextlib.contextmanager
def _without_chatter() -> Iterator[None]:
    """Keep the profiler's two lines a session off the user's terminal; anything else that was written passes."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as written:
        saved = os.dup(_STDERR)
        os.dup2(written.fileno(), _STDERR)
        try:
            yield
        finally:
            os.dup2(saved, _STDERR)
            os.close(saved)
            written.seek(0)
            for line in written:
                if _CHATTER not in line:
                    os.write(_STDERR, line)
