"""How long the numbers live that autograd saves, as the 2.0 of `x * 2.0`: tensors of eight bytes that no hook sees.

Where the backward reads one, it is freed there. Where it does not, because the result is no part of the loss, the
number goes with the graph around it: when all that was computed from it is gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memfit.capture.storages import StorageDraft
from memfit.capture.trace_types import AFTER_STEP, Op, Phase


def end_unread_numbers(ops: Sequence[Op], drafts: Sequence[StorageDraft], numbers: Iterable[tuple[int, int]]) -> None:
    """Free the numbers that no backward has read, each given as its op and its storage."""
    for index, number in numbers:
        if drafts[number].free_after == AFTER_STEP:
            drafts[number].free_after = _last_use(ops, drafts, index)


def _last_use(ops: Sequence[Op], drafts: Sequence[StorageDraft], index: int) -> int:
    """Return the op after which nothing is left that was computed from the results of an op."""
    reached: set[int] = set()
    for op in ops[index:]:
        if op.phase in (Phase.BACKWARD, Phase.OPTIMIZER):
            break
        if op is ops[index] or any(ref.storage in reached for ref in op.inputs):
            reached.update(ref.storage for ref in op.outputs if ref.storage >= 0)
    ends = [drafts[storage].free_after for storage in reached]
    return AFTER_STEP if AFTER_STEP in ends else max(ends, default=AFTER_STEP)
