"""One policy for all micro-batches of a step, so that a plan does not depend on which of them a call belongs to.

Note [Micro-batches]: a training loop need not keep to the number of micro-batches that was planned: an epoch ends with
three of four, somebody runs a forward for a log. So a unit has the same policy in each. What then decides is, for each
moment of a micro-batch, the highest level in any of them: gradients are there from the second on. The program is folded
onto its last micro-batch, with those levels, and solved there; its answer is spread to all. Nothing is lost: plans
with one policy for all are exactly the plans of the folded program, and their times are the same multiple of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from memfit.capture import NO_INDEX, Phase, Trace
from memfit.memory import Bytes
from memfit.solve.program import Candidate, Choice, MicroBatches, Program


def find_micro_batches(trace: Trace, candidates: Sequence[Candidate]) -> MicroBatches | None:
    """Find the micro-batches of a step; None when it has one pass, or passes that are not alike."""
    spans = _passes(trace)
    members: list[list[int]] = [[] for _ in spans]
    for index, candidate in enumerate(candidates):
        place = next((k for k, (begin, end) in enumerate(spans) if begin <= candidate.unit.begin < end), None)
        if place is None or candidate.recompute_at > spans[place][1]:
            return None
        members[place].append(index)
    used = [(span, tuple(group)) for span, group in zip(spans, members, strict=True) if group]
    if len(used) < 2:
        return None
    found = MicroBatches(spans=tuple(span for span, _ in used), members=tuple(group for _, group in used))
    shapes = [[_shape(candidates, index, group, span[0]) for index in group] for span, group in used]
    alike = all(shape == shapes[-1] for shape in shapes) and all(
        candidates[one].frontier is candidates[other].frontier or candidates[one].policies == candidates[other].policies
        for group in found.members
        for one, other in zip(group, found.members[-1], strict=True)
    )
    order = _order(candidates, found, -1)
    return found if alike and all(_order(candidates, found, k) == order for k in range(len(used))) else None


def count_micro_batches(trace: Trace) -> int | None:
    """Return how many passes of forward and backward a step has; None when they do not call the same modules."""
    calls = [
        [
            (call.module, call.kind, call.begin - begin, call.end - begin)
            for call in trace.calls
            if call.phase in (Phase.FORWARD, Phase.LOSS) and begin <= call.begin < end
        ]
        for begin, end in _passes(trace)
    ]
    return len(calls) if calls and all(each == calls[0] for each in calls) else None


def _passes(trace: Trace) -> list[tuple[int, int]]:
    """Return the ops of each forward and backward, from the first module call on: what comes before makes the batch."""
    begins = []
    before: Phase | None = None
    for index, op in enumerate(trace.ops):
        if op.phase in (Phase.FORWARD, Phase.LOSS) and before not in (Phase.FORWARD, Phase.LOSS):
            begins.append(index)
        before = op.phase
    last = max((index for index, op in enumerate(trace.ops) if op.phase is Phase.BACKWARD), default=-1) + 1
    calls = sorted(call.begin for call in trace.calls if call.phase in (Phase.FORWARD, Phase.LOSS))
    found = []
    for begin, end in pairwise([*(each for each in begins if each < last), last]):
        found.append((next((call for call in calls if begin <= call < end), begin), end))
    return found


def _shape(candidates: Sequence[Candidate], index: int, group: Sequence[int], begin: int) -> tuple[object, ...]:
    """Return what must be the same of a candidate in every micro-batch."""
    candidate = candidates[index]
    outer = group.index(candidate.outer) if candidate.outer in group else NO_INDEX
    unit = candidate.unit
    offloads = candidate.window is not None
    return unit.module, unit.kind, unit.begin - begin, unit.end - begin, outer, candidate.forced, offloads


def _anchors(candidates: Sequence[Candidate], found: MicroBatches, number: int) -> list[int]:
    """Return where candidates of a micro-batch begin, end and are recomputed, and where it begins and ends itself."""
    inside = [candidates[index] for index in found.members[number]]
    begin, end = found.spans[number]
    points = [at for each in inside for at in (each.unit.begin, each.unit.end, each.recompute_at)]
    windows = [each.window for each in inside if each.window is not None]
    return [begin, *points, *(at for window in windows for at in (window.gone_at, window.back_at)), end]


def _order(candidates: Sequence[Candidate], found: MicroBatches, number: int) -> list[int]:
    """Return the rank of each anchor among those of its micro-batch."""
    anchors = _anchors(candidates, found, number)
    ranks = {at: rank for rank, at in enumerate(sorted(set(anchors)))}
    return [ranks[at] for at in anchors]


def fold(program: Program, found: MicroBatches) -> Program:
    """Return the program of the last micro-batch, at the highest levels of all of them."""
    before, during = program.before.copy(), program.during.copy()
    last = sorted(set(_anchors(program.candidates, found, -1)))
    for number, (begin, end) in enumerate(found.spans[:-1]):
        for (a, b), (c, d) in zip(
            pairwise(sorted(set(_anchors(program.candidates, found, number)))), pairwise(last), strict=True
        ):
            before[c] = max(before[c], program.before[a])
            _raise(during, c, d, program.during[a:b])
        before[begin:end] = during[begin:end] = 0
    places = {index: place for place, index in enumerate(found.members[-1])}
    candidates = tuple(
        Candidate(
            unit=each.unit,
            policies=each.policies,
            frontier=each.frontier,
            outer=places.get(each.outer, NO_INDEX),
            forced=each.forced,
            window=each.window,
        )
        for each in (program.candidates[index] for index in found.members[-1])
    )
    return Program(before, during, program.budget_bytes, candidates)


def _raise(during: Bytes, begin: int, end: int, levels: Bytes) -> None:
    """Raise levels between two anchors to those of another micro-batch, where it runs other ops at the highest one."""
    if end - begin == len(levels):
        during[begin:end] = np.maximum(during[begin:end], levels)
    else:
        top = begin + int(during[begin:end].argmax())
        during[top] = max(during[top], levels.max())


def spread(found: MicroBatches, choice: Choice, count: int) -> Choice:
    """Return the choice of all candidates, from that of the last micro-batch."""
    full = np.full(count, NO_INDEX, np.int64)
    for group in found.members:
        full[list(group)] = choice
    return full
