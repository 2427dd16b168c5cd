"""Traces in which storages live from and until other ops, and when their last use is."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from memfit.capture import NEVER, Phase, Trace


def with_lives(trace: Trace, lives: Mapping[int, tuple[int, int]]) -> Trace:
    """The trace with other births and deaths of these storages."""
    storages = list(trace.storages)
    for number, (alloc_at, free_after) in lives.items():
        storages[number] = msgspec.structs.replace(
            storages[number], alloc_at=alloc_at, free_after=free_after, released=free_after
        )
    return msgspec.structs.replace(trace, storages=tuple(storages))


def last_reads(trace: Trace) -> NDArray[np.int64]:
    """For each storage the last op that reads it, `NEVER` for none."""
    found = np.full(len(trace.storages), NEVER)
    for index, op in enumerate(trace.ops):
        for ref in op.inputs:
            if ref.storage != NEVER:
                found[ref.storage] = index
    return found


def last_backward_ops(trace: Trace) -> dict[int, int]:
    """For each forward op the last op of its backward."""
    return {
        op.forward_op: index
        for index, op in enumerate(trace.ops)
        if op.phase is Phase.BACKWARD and op.forward_op != NEVER
    }


def held_for_nothing(trace: Trace) -> dict[int, int]:
    """Results of the forward that are held in backward when no op reads them any more, each with the op after which it
    could go: its last use, or the last op before the backward.

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
        saved_until = max((ends.get(op, NEVER) for op in storage.saved_by), default=NEVER)
        used = max(int(reads[number]), saved_until, backward[place] - 1)
        if trace.ops[storage.alloc_at].phase is not Phase.BACKWARD and (
            storage.free_after == NEVER or storage.free_after > used
        ):
            found[number] = used
    return found


def with_sizes(trace: Trace, sizes: Mapping[int, int]) -> Trace:
    """The trace with other bytes of these storages."""
    storages = list(trace.storages)
    for number, size_bytes in sizes.items():
        storages[number] = msgspec.structs.replace(storages[number], bytes=size_bytes)
    return msgspec.structs.replace(trace, storages=tuple(storages))
