"""The orders in which modules run: before and after their forward, before and after their backward."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.capture import NEVER, Phase, Trace
from memfit.cost.repeats import repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOrders:
    """Indices of module calls. Calls of which nothing runs in backward are missing from the last two."""

    fw_pre_order: tuple[int, ...]
    fw_post_order: tuple[int, ...]
    bw_pre_order: tuple[int, ...]
    bw_post_order: tuple[int, ...]

    @classmethod
    def of(cls, trace: Trace) -> CallOrders:
        """The orders of one step. What a checkpoint runs again in backward is not a call of its own here."""
        calls = trace.calls
        forward = [index for index, call in enumerate(calls) if call.phase is not Phase.BACKWARD]
        depth = [0] * len(calls)
        for index, call in enumerate(calls):
            if call.parent != NEVER:
                depth[index] = depth[call.parent] + 1
        begin = {index: calls[index].backward_begin for index in forward if calls[index].backward_begin != NEVER}
        end = {index: calls[index].backward_end for index in begin}
        for again, first in repeats(trace).items():
            if calls[again].backward_begin != NEVER:
                begin[first] = min(begin.get(first, calls[again].backward_begin), calls[again].backward_begin)
                end[first] = max(end.get(first, NEVER), calls[again].backward_end)
        return cls(
            fw_pre_order=tuple(forward),
            fw_post_order=_post_order(trace, forward),
            bw_pre_order=tuple(sorted(begin, key=lambda i: (begin[i], depth[i], -i))),
            bw_post_order=tuple(sorted(end, key=lambda i: (end[i], -depth[i], -i))),
        )


def _post_order(trace: Trace, forward: list[int]) -> tuple[int, ...]:
    order: list[int] = []
    open_calls: list[int] = []
    for index in forward:
        while open_calls and open_calls[-1] != trace.calls[index].parent:
            order.append(open_calls.pop())
        open_calls.append(index)
    return (*order, *reversed(open_calls))
