"""Why ops of a checkpointed unit cannot run again, so that their results are saved whatever they cost."""

from __future__ import annotations

import numpy as np

from memfit.capture.arguments import GENERATOR
from memfit.tradeoff import UPDATES, TraceColumns, Unit, UnitColumns


def forced_ops(facts: TraceColumns, unit: Unit) -> dict[int, str]:
    """The reason of each such op, by its offset from the unit's first op (Note [Rules] of the unit's problem, 4)."""
    offsets = np.flatnonzero(UnitColumns.of(facts, unit).forced).tolist()
    return {offset: _why(facts, unit, unit.begin + offset) for offset in offsets}


def _why(facts: TraceColumns, unit: Unit, op: int) -> str:
    found = facts.trace.ops[op]
    if found.name in UPDATES:
        return "updates running statistics"
    if GENERATOR in found.arguments:
        return "draws from a generator of its own"
    if facts.pinned[op]:
        return "writes in place to host memory"
    written = facts.write_storage[facts.write_op == op]
    if (facts.alloc_at[written] < unit.begin).any():
        return "writes in place to what is older than the unit"
    return "reads what is overwritten before its backward"
