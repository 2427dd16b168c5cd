"""Levers on lifetimes: results that are held and read no more, gradients that are kept between steps."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from memfit.analysis.levers.case import Case, Lever
from memfit.capture import AFTER_STEP, BEFORE_STEP, NO_INDEX, Phase, Trace
from memfit.memory import BETWEEN


def with_lifetimes(trace: Trace, lifetimes: Mapping[int, tuple[int, int]]) -> Trace:
    """Return the trace with these storages allocated and freed at other ops."""
    storages = list(trace.storages)
    for number, (alloc_at, free_after) in lifetimes.items():
        storages[number] = msgspec.structs.replace(
            storages[number], alloc_at=alloc_at, free_after=free_after, released=free_after
        )
    return msgspec.structs.replace(trace, storages=tuple(storages))


def last_reads(trace: Trace) -> NDArray[np.int64]:
    """Return, for each storage, the last op that reads it, `NO_INDEX` for none."""
    found = np.full(len(trace.storages), NO_INDEX)
    for index, op in enumerate(trace.ops):
        for ref in op.inputs:
            if ref.storage != NO_INDEX:
                found[ref.storage] = index
    return found


def last_backward_ops(trace: Trace) -> dict[int, int]:
    """Return, for each forward op, the last op of its backward."""
    return {
        op.forward_op: index
        for index, op in enumerate(trace.ops)
        if op.phase is Phase.BACKWARD and op.forward_op != NO_INDEX
    }


def held_for_nothing(trace: Trace) -> dict[int, int]:
    """Return forward results that are held in backward though no op reads them, each with the last op that needs it.

    That is the op of its last use, or the last op before the backward.

    Autograd holds what it saved until the backward of the op that saved it; what outlives that is held by Python: a
    name for the model's output, a list of hidden states, an attribute.
    """
    reads, ends = last_reads(trace), last_backward_ops(trace)
    backward = [index for index, op in enumerate(trace.ops) if op.phase is Phase.BACKWARD]
    found = {}
    for number, storage in enumerate(trace.storages):
        if not 0 <= storage.alloc_at < len(trace.ops) or storage.released != storage.free_after:
            continue
        place = bisect_left(backward, storage.alloc_at)
        if trace.ops[storage.alloc_at].phase is Phase.OPTIMIZER or place == len(backward):
            continue
        saved_until = max((ends.get(op, NO_INDEX) for op in storage.saved_by), default=NO_INDEX)
        used = max(int(reads[number]), saved_until, backward[place] - 1)
        if trace.ops[storage.alloc_at].phase is not Phase.BACKWARD and (
            storage.free_after == AFTER_STEP or storage.free_after > used
        ):
            found[number] = used
    return found


def with_sizes(trace: Trace, sizes: Mapping[int, int]) -> Trace:
    """Return the trace with other bytes of these storages."""
    storages = list(trace.storages)
    for number, size_bytes in sizes.items():
        storages[number] = msgspec.structs.replace(storages[number], bytes=size_bytes)
    return msgspec.structs.replace(trace, storages=tuple(storages))


# Results that Python holds and nothing reads: logits behind a name, hidden states in a list


_PART = 1000
"""Results that are smaller than the largest by this are not worth a name."""


def holding(case: Case) -> Iterator[Lever]:
    """Yield the lever of freeing such results after their last use."""
    trace, timeline = case.trace, case.timeline
    instant = timeline.peak_instant
    now = int(timeline.op[instant]) - (int(timeline.run[instant]) == BETWEEN)
    last_uses = held_for_nothing(trace)
    there = [
        number
        for number, used in last_uses.items()
        if used < now and (trace.storages[number].free_after == AFTER_STEP or trace.storages[number].free_after >= now)
    ]
    if not case.matters(sum(trace.storages[number].bytes for number in there)):
        return
    largest = max(there, key=lambda number: trace.storages[number].bytes)
    there = [number for number in there if _PART * trace.storages[number].bytes >= trace.storages[largest].bytes]
    module = trace.storages[largest].module or "the model"
    changed = with_lifetimes(
        trace, {number: (trace.storages[number].alloc_at, used) for number, used in last_uses.items()}
    )
    yield case.lever(
        f"let go of results that nothing reads: {module}",
        "loss = model(...).loss; del output before loss.backward(): keep no name for what only the loss reads",
        case.effect(changed),
        "estimated",
        assumes=f"nothing needs {'it' if len(there) == 1 else f'these {len(there)} results'} after the loss",
        units=sorted({trace.storages[number].module for number in there}),
    )


# Gradients that are freed between steps instead of set to zero


_NAME = "gradients freed by zero_grad"
_HOW = "optimizer.zero_grad(set_to_none=True)"


def gradients(case: Case) -> Iterator[Lever]:
    """Yield the lever of `set_to_none`, where gradients are there before the step begins."""
    kept = [
        each.gradient
        for each in case.trace.parameters
        if each.gradient != NO_INDEX and case.trace.storages[each.gradient].alloc_at == BEFORE_STEP
    ]
    if not kept:
        return
    if case.step is not None and case.step.run is None:
        captured = case.captured(replace(case.step, zero_grad=True, set_to_none=True), what=_NAME)
        if captured is not None:
            yield case.lever(_NAME, _HOW, case.effect(captured), "captured")
        return
    effect = case.effect(_freed(case.trace, kept))
    yield case.lever(_NAME, _HOW, effect, "estimated", assumes="nothing else reads gradients between steps")


def _freed(trace: Trace, kept: list[int]) -> Trace:
    """Return the trace in which gradients live from their first write in backward to the optimizer's last read."""
    wanted = set(kept)
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, op in enumerate(trace.ops):
        zeroes = "zero" in op.name
        for ref in op.inputs:
            if ref.storage in wanted and not zeroes:
                if op.phase is Phase.BACKWARD:
                    first.setdefault(ref.storage, index)
                last[ref.storage] = index
    return with_lifetimes(trace, {each: (first[each], last[each]) for each in kept if each in first})
