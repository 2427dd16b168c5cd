"""Gradients that are freed between steps instead of set to zero."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from memfit.analysis.levers.case import Case
from memfit.analysis.levers.lever import Lever
from memfit.analysis.levers.lives import with_lives
from memfit.capture import NEVER, Phase, Trace

_NAME = "gradients freed by zero_grad"
_HOW = "optimizer.zero_grad(set_to_none=True)"


def gradients(case: Case) -> Iterator[Lever]:
    """`set_to_none`, where gradients are there before the step begins."""
    kept = [
        each.gradient
        for each in case.trace.parameters
        if each.gradient != NEVER and case.trace.storages[each.gradient].alloc_at == NEVER
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
    """Gradients from the backward op that first writes to each until the optimizer's last op that reads it."""
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
    return with_lives(trace, {each: (first[each], last[each]) for each in kept if each in first})
