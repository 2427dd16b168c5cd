"""The time of a sharded step's collectives, and how much of it compute does not hide."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.cost import Collective, CollectiveModel, Runtime
from memfit.hardware import Target
from memfit.solve.shard_runtime import Transfer


def communication(
    runtime: Runtime, target: Target, transfers: Sequence[Transfer], program: Sequence[tuple[bool, int]]
) -> tuple[float, float]:
    """Milliseconds of all collectives, and those for which the device waits.

    Collectives run one after another, beside the ops. A gather of the forward begins when the unit before it has its
    parameters, one of the backward when the backward of the unit before it begins, and both are waited for where the
    unit's own run begins: each hides behind the compute of its neighbour. A reduction begins when its unit's backward
    ends and is waited for when that of the next unit ends, or the pass does.
    """
    model = CollectiveModel(target)
    cost: dict[tuple[Collective, int], float] = {}
    times = runtime.cumulative_ms
    total = waited = free = copied_out = 0.0
    done = [0.0] * len(transfers)
    for waits, number in program:
        transfer = transfers[number]
        if waits:
            now = float(times[transfer.needed]) + waited
            waited += max(0.0, done[number] - now)
            copied_out = max(now, done[number])
            continue
        key = transfer.kind, transfer.size_bytes
        if key not in cost:
            cost[key] = model.collective_ms(*key)
        now = float(times[transfer.issued]) + waited
        done[number] = free = max(free, copied_out if transfer.ahead else now) + cost[key]
        total += cost[key]
    return total, waited
