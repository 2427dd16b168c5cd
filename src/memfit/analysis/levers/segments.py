"""The lever that lowers what the allocator reserves, not what tensors take: segments that grow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from memfit.analysis.levers.case import Case, Effect, Lever
from memfit.memory import reserved
from memfit.plans import EXPANDABLE
from memfit.units import display_bytes


def segments(case: Case) -> Iterator[Lever]:
    """Yield the lever of expandable segments, where the allocator's pieces take much."""
    device = case.target.device
    if case.hopeless or not device.allocator.caches or device.allocator.expandable_segments:
        return
    grown = device.with_expandable_segments()
    now, then = (reserved(case.timeline.allocations, each).peak_reserved_bytes for each in (device, grown))
    if then >= now:
        return
    found = case.lever(
        "expandable segments, of what is reserved",
        f"{EXPANDABLE} in the environment of the process",
        Effect(peak_bytes=case.peak_bytes, step_ms=case.step_ms),
        "captured",
        assumes=(
            f"tensors take what they did: the allocator reserves {display_bytes(then)} for them instead of "
            f"{display_bytes(now)}, and a plan may have that much more budget"
        ),
        option="--expandable-segments",
    )
    yield replace(found, saves_bytes=now - then, of_reserved=True)
