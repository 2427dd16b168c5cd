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

from memfit.torch_private.profiler import ALLOCATION, TORCH_OP

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
    # torch.profiler.profile would warn or parse every event into Python objects that nobody reads, which takes longer
    # than the step; the tree of events is all that is needed.
    profiler = torch.autograd.profiler.profile(use_kineto=True, profile_memory=True)
    with _without_chatter():
        profiler.__enter__()
    try:
        yield events
    finally:
        with _without_chatter():
            profiler.__exit__(None, None, None)
    assert profiler.kineto_results is not None
    events.extend(_collect(profiler.kineto_results.experimental_event_tree()))


def _collect(roots: list[Any]) -> list[AllocatorEvent]:
    """Return the CPU's events of the profiler's trees in order of time."""
    found: list[tuple[int, AllocatorEvent]] = []
    stack: list[tuple[Any, tuple[str, ...]]] = [(root, ()) for root in reversed(roots)]
    while stack:
        event, ops = stack.pop()
        children = event.children
        if children:
            inner = (*ops, event.name) if event.tag == TORCH_OP else ops
            stack.extend([(child, inner) for child in reversed(children)])
        elif event.tag == ALLOCATION:  # has no children
            fields = event.extra_fields
            if fields.device.type == "cpu":
                record = AllocatorEvent(bytes=fields.alloc_size, address=fields.ptr or 0, ops=ops)
                found.append((event.start_time_ns, record))
    found.sort(key=lambda pair: pair[0])
    return [event for _, event in found]


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
