"""Results that Python holds and nothing reads: logits behind a name, hidden states in a list."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.analysis.levers.case import Case
from memfit.analysis.levers.lever import Lever
from memfit.analysis.levers.lives import held_for_nothing, with_lives
from memfit.capture import NEVER
from memfit.memory import BETWEEN

_PART = 1000
"""Results that are smaller than the largest by this are not worth a name."""


def holding(case: Case) -> Iterator[Lever]:
    """The step in which such results go with their last use."""
    trace, timeline = case.trace, case.timeline
    instant = timeline.peak_instant
    now = int(timeline.op[instant]) - (int(timeline.run[instant]) == BETWEEN)
    lives = held_for_nothing(trace)
    there = [
        number
        for number, used in lives.items()
        if used < now and (trace.storages[number].free_after == NEVER or trace.storages[number].free_after >= now)
    ]
    if not case.matters(sum(trace.storages[number].bytes for number in there)):
        return
    largest = max(there, key=lambda number: trace.storages[number].bytes)
    there = [number for number in there if _PART * trace.storages[number].bytes >= trace.storages[largest].bytes]
    module = trace.storages[largest].module or "the model"
    changed = with_lives(trace, {number: (trace.storages[number].alloc_at, used) for number, used in lives.items()})
    yield case.lever(
        f"let go of results that nothing reads: {module}",
        "loss = model(...).loss; del output before loss.backward(): keep no name for what only the loss reads",
        case.effect(changed),
        "estimated",
        assumes=f"nothing needs {'it' if len(there) == 1 else f'these {len(there)} results'} after the loss",
        units=sorted({trace.storages[number].module for number in there}),
    )
