"""Recurrence 1 of the dynamic program (dp.py): rows as levels that the budget and dropped bytes must reach."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from memfit.capture import NO_INDEX
from memfit.memory import Ints
from memfit.solve.program import Choice, Program, Segment
from memfit.tradeoff import PICOSECONDS

NO_REQUIREMENT = -(1 << 50)
"""Less than any requirement, and small enough for sums of floats to be exact."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class UnitNode:
    """A candidate with those inside it, in post-order, and its requirements (recurrence 1).

    `first_run_bytes` is the least that any policy requires for its first run. From `safe_bytes` on no requirement in
    the subtree binds. `must_open` says that a candidate inside is forced. Nodes of one `kind` have equal subtrees.

    `freed` is all that a policy frees in the end; `in_flight` is the part of it that is gone only after the next node,
    which `releases` it. `required_bytes` is for the budget and what was gone before the node, `required_after` for that
    and what the node releases.
    """

    index: int
    kind: int
    children: tuple[UnitNode, ...]
    forced: bool
    must_open: bool
    releases: bool
    after_bytes: int
    open_bytes: int
    first_run_bytes: int
    safe_bytes: int
    freed: Ints
    in_flight: Ints
    time: Ints
    required_bytes: Ints
    required_after: Ints


def build_passes(
    program: Program, raised: Mapping[int, int] | None = None
) -> tuple[tuple[tuple[UnitNode, ...], ...], int] | None:
    """Return the root nodes of each pass and the budget below which nothing fits, whatever is dropped.

    None when candidates overlap without lying inside one another. `raised` are stricter `after` requirements of some
    candidates (recurrence 8).
    """
    children, order = _post_order(program)
    ends = [program.candidates[index].unit.end for index in order]
    if ends != sorted(ends):
        return None
    requirements = _Requirements.of(program, order)
    released_by = _released_by(program)
    for index, needed in (raised or {}).items():
        requirements.after[index] = max(requirements.after[index], needed)
    kinds: dict[tuple[object, ...], int] = {}
    nodes: dict[int, UnitNode] = {}
    passes: list[tuple[UnitNode, ...]] = []
    for part in _split_passes(program, order):
        levels = _recompute_levels(program, part)
        for index in part:
            inside = tuple(nodes[child] for child in children[index])
            nodes[index] = _build_node(program, index, inside, requirements, levels[index], released_by, kinds)
        passes.append(tuple(nodes[index] for index in part if program.candidates[index].outer == NO_INDEX))
    return tuple(passes), requirements.floor_bytes


@dataclass(slots=True)
class _Requirements:
    """What budget and dropped bytes must reach: up to a candidate, before one left open, before one checkpointed whole.

    A level inside a candidate's forward, before anything inside it has ended, is there only when it stays open: each
    policy has levels of its own. A later row whose last active candidate lies inside a container finds only what was
    dropped before the container when that is checkpointed as a whole. `copying` is `after` while what the candidate
    itself offloads is still there, or there again.
    """

    after: dict[int, int]
    copying: dict[int, int]
    open: dict[int, int]
    whole: dict[int, int]
    floor_bytes: int = 0

    @classmethod
    def of(cls, program: Program, order: Sequence[int]) -> _Requirements:
        """Go through the ops once, with the units whose forward runs and the last active candidate."""
        nothing = dict.fromkeys(order, NO_REQUIREMENT)
        found = cls(after=dict(nothing), copying=dict(nothing), open=dict(nothing), whole=nothing)
        begins = sorted((candidate.unit.begin, index) for index, candidate in enumerate(program.candidates))
        begun = 0
        running: list[int] = []
        for segment, last in _last_active(program, order):
            at = segment.begin
            around = program.path(last)
            while at < segment.end:
                running = [index for index in running if program.candidates[index].unit.end > at]
                while begun < len(begins) and begins[begun][0] <= at:
                    if program.candidates[begins[begun][1]].unit.end > at:
                        running.append(begins[begun][1])
                    begun += 1
                until = min(segment.end, begins[begun][0]) if begun < len(begins) else segment.end
                level = int(program.during[at:until].max())
                if running and running[-1] not in around:
                    found.open[running[-1]] = max(found.open[running[-1]], level)
                elif last == NO_INDEX:
                    found.floor_bytes = max(found.floor_bytes, level)
                else:
                    window = program.candidates[last].window
                    gone = window is None or window.gone_at <= at < window.back_at
                    levels = found.after if gone else found.copying
                    levels[last] = max(levels[last], level)
                    for outer in around[1:]:
                        if program.candidates[outer].unit.end <= at:
                            found.whole[outer] = max(found.whole[outer], level)
                at = until
        return found


def _post_order(program: Program) -> tuple[dict[int, list[int]], list[int]]:
    """Return the children of each candidate, roots under `NO_INDEX`, and all candidates in post-order."""
    children: dict[int, list[int]] = defaultdict(list)
    for index, candidate in enumerate(program.candidates):
        children[candidate.outer].append(index)
    order: list[int] = []

    def visit(index: int) -> None:
        for child in children[index]:
            visit(child)
        order.append(index)

    for root in children[NO_INDEX]:
        visit(root)
    return children, order


def _released_by(program: Program) -> dict[int, int]:
    """Return, for candidates that offload, the candidate after which it is gone: their next unit, where it is one.

    A next unit that is no candidate has none inside. What is offloaded is then gone before the next candidate begins.
    """
    places = {candidate.unit.name: index for index, candidate in enumerate(program.candidates)}
    return {
        index: places[candidate.window.next.name]
        for index, candidate in enumerate(program.candidates)
        if candidate.window is not None and candidate.window.next.name in places
    }


def _split_passes(program: Program, order: Sequence[int]) -> list[list[int]]:
    """Split the candidates where none is active: before one that begins when all earlier ones have been recomputed."""
    passes: list[list[int]] = []
    part: list[int] = []
    until = 0
    for index in order:
        part.append(index)
        if program.candidates[index].outer != NO_INDEX:
            continue
        if not passes or min(program.candidates[each].unit.begin for each in part) >= until:
            passes.append([])
        passes[-1] += part
        until = max(until, *(program.candidates[each].recompute_at for each in part))
        part = []
    return passes


def _last_active(program: Program, order: Sequence[int]) -> list[tuple[Segment, int]]:
    """Return each segment with the last candidate in post-order that is active there, `NO_INDEX` when none is."""
    changes: dict[int, list[tuple[int, bool]]] = defaultdict(list)
    for number, index in enumerate(order):
        candidate = program.candidates[index]
        if candidate.unit.end < candidate.recompute_at:
            changes[candidate.unit.end].append((number, True))
            changes[candidate.recompute_at].append((number, False))
    found = []
    active: set[int] = set()
    for segment in program.segments:
        for number, begins in changes[segment.begin]:
            (active.add if begins else active.discard)(number)
        found.append((segment, order[max(active)] if active else NO_INDEX))
    return found


def _recompute_levels(program: Program, part: Sequence[int]) -> dict[int, int]:
    """Return the level at which each candidate's recompute begins.

    Where its row sees candidates after it, the prefix sum would be no relaxation: such a row is left out.
    """
    found: dict[int, int] = {}
    latest = -1
    at: dict[int, list[int]] = defaultdict(list)
    for index in reversed(part):
        op = program.candidates[index].recompute_at
        hidden = latest > op or any(each not in program.path(index) for each in at[op])
        found[index] = NO_REQUIREMENT if hidden else int(program.before[op])
        latest = max(latest, op)
        at[op].append(index)
    return found


def _build_node(
    program: Program,
    index: int,
    children: tuple[UnitNode, ...],
    requirements: _Requirements,
    recompute_level: int,
    released_by: Mapping[int, int],
    kinds: dict[tuple[object, ...], int],
) -> UnitNode:
    candidate = program.candidates[index]
    dropped = np.array([policy.discarded_bytes for policy in candidate.policies], np.int64)
    offloaded = np.array([policy.offloaded_bytes for policy in candidate.policies], np.int64)
    freed = dropped + offloaded
    time = np.array([round(policy.added_ms * PICOSECONDS) for policy in candidate.policies], np.int64)
    peak = np.array([policy.recompute_peak_bytes for policy in candidate.policies], np.int64)
    after, copying, open_bytes = requirements.after[index], requirements.copying[index], requirements.open[index]
    first_run = np.maximum(program.in_forward(index).max(axis=1), requirements.whole[index])
    required = np.maximum(first_run, recompute_level + peak - dropped)  # by then copies are back
    required_after = np.maximum(after - freed, copying - dropped)
    after = max(after, copying)
    later, releases = index in released_by, index in released_by.values()
    kind = (id(candidate.frontier), candidate.forced, later, releases, *(child.kind for child in children))
    return UnitNode(
        index=index,
        kind=kinds.setdefault(kind, len(kinds)),
        children=children,
        forced=candidate.forced,
        must_open=any(child.forced or child.must_open for child in children),
        releases=releases,
        after_bytes=after,
        open_bytes=open_bytes,
        first_run_bytes=int(first_run.min()),
        safe_bytes=max(
            after,
            open_bytes,
            int(required.max()),
            int(required_after.max()),
            *(child.safe_bytes for child in children),
        ),
        freed=freed,
        in_flight=offloaded if later else np.zeros_like(offloaded),
        time=time,
        required_bytes=required,
        required_after=required_after,
    )


def violated_requirements(program: Program, choice: Choice) -> dict[int, int]:
    """Return, for the rows that a plan breaks, the last active candidate and the `after` that would mend the row."""
    _, order = _post_order(program)
    dropped: dict[int, int] = {}
    for part in _split_passes(program, order):
        taken = [(program.candidates[index].policies, choice[index]) for index in part]
        freed = [policies[policy].freed_bytes if policy != NO_INDEX else 0 for policies, policy in taken]
        dropped |= zip(part, accumulate(freed), strict=True)
    level, recomputes = program.peaks(choice)
    highest = {segment.begin: int(level[segment.begin : segment.end].max()) for segment in program.segments}
    last = dict(zip(highest, (index for _, index in _last_active(program, order)), strict=True))
    starts = np.array(list(highest), np.int64)
    for candidate, peak in recomputes:
        before = int(starts[np.searchsorted(starts, candidate.recompute_at - 1, "right") - 1])
        highest[before] = max(highest[before], peak)
    return {
        last[begin]: dropped[last[begin]] + peak
        for begin, peak in highest.items()
        if peak > program.budget_bytes and last[begin] != NO_INDEX
    }
