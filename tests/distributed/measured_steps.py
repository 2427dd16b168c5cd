"""How high the steps of a process are: torch's profiler sees each allocation and free of the thread that trains.

Note [Frees on other threads]: a free on a thread of Gloo is not seen. A peak without what such frees gave back is too
low by no more than that, a peak with it too high by no more: a step has two bounds. Whether Gloo's thread or ours is
the last to hold a buffer is chance, so that of several steps most have equal bounds, and those of all steps together
are compared: they have one peak. `check_peak` refuses bounds that are further apart than `GAP` of it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._C._profiler import _EventType

WARMUP, MEASURED = 8, 6
"""A plan compares some values in the 1st, 2nd, 4th, 8th, 16th call of a unit, which takes a few bytes: in between are
the measured steps."""
STEP = "measured step of "
GAP = 0.05
"""Part of a peak. Bounds are equal in nearly all cases; on a busy machine 0.029 was seen."""
_ELSEWHERE = ("c10d::", "gloo:", "aten::_chunk_cat")
"""Copies that Gloo makes of what it sends, and that the CPU's kernel makes of gradients it casts; CUDA makes none."""
_BACKWARD = ("autograd::engine", "aten::ones_like")
"""Where a backward begins: the gradient of the loss is made before the engine runs."""


class Event(NamedTuple):
    """Bytes that are allocated at an address, or freed: then they are negative."""

    time_ns: int
    bytes: int
    address: int
    ops: tuple[str, ...]

    @property
    def counts(self) -> bool:
        return not any(op.startswith(_ELSEWHERE) for op in self.ops)


def profiled(runs: Mapping[str, Callable[[], Any]], count: int = MEASURED) -> torch.profiler.profile:
    """Run each of the steps so many times under the profiler."""
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with profiler:
        for name, run in runs.items():
            for _ in range(count):
                with torch.profiler.record_function(f"{STEP}{name}"):
                    run()
    return profiler


def steps_of(profiler: torch.profiler.profile) -> list[tuple[str, list[Event]]]:
    """Return the allocations and frees of each measured step in order of time, and the name that it was given."""
    events: list[Event] = []
    begins: list[tuple[int, str]] = []
    tree = profiler.profiler.kineto_results.experimental_event_tree()  # type: ignore[union-attr]
    stack: list[tuple[Any, tuple[str, ...]]] = [(event, ()) for event in tree]
    while stack:
        event, ops = stack.pop()
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            events.append(Event(event.start_time_ns, fields.alloc_size, fields.ptr or 0, ops))
        elif event.name.startswith(STEP):
            begins.append((event.start_time_ns, event.name.removeprefix(STEP)))
        stack += [(child, (*ops, event.name)) for child in event.children]
    events.sort()
    begins.sort()
    places = [bisect_left(events, begin, key=lambda event: event.time_ns) for begin, _ in begins]
    return [
        (name, events[begin:end])
        for (_, name), begin, end in zip(begins, places, [*places[1:], len(events)], strict=True)
    ]


def measured(runs: Mapping[str, Callable[[], Any]], count: int = MEASURED) -> dict[str, list[dict[str, Any]]]:
    """Run each of the steps so many times, and return how high they are."""
    steps: dict[str, list[list[Event]]] = {}
    for name, events in steps_of(profiled(runs, count)):
        steps.setdefault(name, []).append(events)
    return {name: levels(each) for name, each in steps.items()}


def levels(steps: Sequence[Sequence[Event]]) -> list[dict[str, Any]]:
    """Return the peaks of steps that follow each other above where each begins, without the first and the last.

    What a step leaves the next one may free: outputs of micro-batches, gradients of FSDP1's original parameters. What
    is not freed by the end of the next step was freed on another thread (Note [Frees on other threads]).
    """
    events = [(number, event) for number, step in enumerate(steps) for event in step]
    alive: dict[int, int] = {}
    missing: set[int] = set()
    for place, (step, event) in enumerate(events):
        if event.bytes > 0:
            missing |= {alive[event.address]} if event.address in alive else set()
            alive[event.address] = place
        elif event.address in alive and events[alive[event.address]][0] >= step - 1:
            del alive[event.address]
    missing |= {place for place in alive.values() if events[place][0] < len(steps) - 1}
    missing = {place for place in missing if events[place][1].counts}
    bounds = [_peaks(steps, missing, counted=counted) for counted in (False, True)]
    return [
        {
            "peak_bytes": [each[number][0] for each in bounds],
            "forward_peak_bytes": [each[number][1] for each in bounds],
        }
        for number in range(1, len(steps) - 1)
    ]


def _peaks(steps: Sequence[Sequence[Event]], missing: set[int], *, counted: bool) -> list[tuple[int, int]]:
    """Return the highest point of each step and of its first forward, above where the step began.

    What is freed unseen is left out, or counted to the end of its step.
    """
    alive: dict[int, int] = {}
    found = []
    place = level = 0
    for step in steps:
        start = peak = forward_peak = level
        in_forward = True
        unseen = []
        for event in step:
            in_forward = in_forward and not any(op.startswith(_BACKWARD) for op in event.ops)
            level -= alive.pop(event.address, 0)
            if event.bytes > 0 and event.counts and (counted or place not in missing):
                alive[event.address] = event.bytes
                level += event.bytes
                if place in missing:
                    unseen.append(event.address)
            peak = max(peak, level)
            forward_peak = peak if in_forward else forward_peak
            place += 1
        level -= sum(alive.pop(address, 0) for address in unseen)
        found.append((peak - start, forward_peak - start))
    return found


def bounds_of(steps: Sequence[dict[str, Any]], of: str = "peak_bytes") -> list[int]:
    """Return between what the peak of steps that are all alike is: above every lower bound, below every upper one."""
    return [max(each[of][0] for each in steps), min(each[of][1] for each in steps)]


def check_peak(
    n_bytes: int, bounds: Sequence[int], about: object = "", *, tolerance: float = 0.0, gap: float = GAP
) -> None:
    """Compare predicted bytes with what was measured, which must be known well (Note [Frees on other threads])."""
    low, high = bounds
    assert low <= high, f"{about}: steps that should be alike have peaks of {low} and {high} bytes"
    assert high - low <= gap * high, f"{about}: {low} to {high} bytes, by frees of other threads, are no measurement"
    within = (1 - tolerance) * low <= n_bytes <= (1 + tolerance) * high
    assert within, f"{about}: {n_bytes} bytes are predicted, {low} to {high} measured"
