"""The highest point of a real step: on the CPU by the allocator's own events, on CUDA by its statistics.

Note [Second of two]: the profiler does not see frees of what was allocated before it started, such as gradients that
the step before left. So two steps run inside it, and the second is the one that is measured, from an allocation made
between them. Whatever else is done in the first, such as copying gradients, must not use torch's allocator.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from memfit.capture.environment import no_garbage_collection
from memfit.capture.kernels import AllocatorEvent
from memfit.memory import measured

_MARK_BYTES = 4099


@dataclass(frozen=True, slots=True, kw_only=True)
class Rise:
    """The highest point of a step above its start, and the events of the step before it and of its own.

    There are no events on CUDA. `peak_event` is the index of the event of `events` that reached the highest point, -1
    when memory never rose.
    """

    rise_bytes: int
    before: tuple[AllocatorEvent, ...] = ()
    events: tuple[AllocatorEvent, ...] = ()
    peak_event: int = -1


def measured_rise(run: Callable[[], None], device: torch.device, first: Callable[[], None] | None = None) -> Rise:
    """Run a step twice and measure the second time; `first` is what runs it the first time, `run` itself by default.

    The garbage collector is off meanwhile, or cycles would be freed at other ops each time.
    """
    gc.collect()
    with no_garbage_collection():
        return (_by_statistics if device.type == "cuda" else _by_events)(first or run, run, device)


def _by_events(first: Callable[[], None], run: Callable[[], None], _: torch.device) -> Rise:
    with measured() as truth:
        first()
        mark = torch.empty(_MARK_BYTES, dtype=torch.uint8)
        run()
    address = mark.data_ptr()
    place = next(
        index
        for index in range(len(truth.events) - 1, -1, -1)
        if truth.events[index].address == address and truth.events[index].bytes == _MARK_BYTES
    )
    level, peak, peak_event = 0, 0, -1
    events = truth.events[place + 1 :]
    for index, event in enumerate(events):
        level += event.bytes
        if level > peak:
            peak, peak_event = level, index
    return Rise(rise_bytes=peak, before=truth.events[:place], events=events, peak_event=peak_event)


def _by_statistics(first: Callable[[], None], run: Callable[[], None], device: torch.device) -> Rise:
    """As torch's caching allocator counts on the device of the model."""
    first()
    torch.cuda.synchronize(device)
    start = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return Rise(rise_bytes=max(0, torch.cuda.max_memory_allocated(device) - start))
