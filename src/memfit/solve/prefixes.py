"""The program as a walk through the forward: every row asks for what the units before a moment dropped together.

Note [Prefixes]: backward runs the units in the reverse order of forward, so the interval in which a unit lacks what it
dropped contains those of the units after it. What is lacking at a moment is then a prefix sum: what was dropped up to
some unit. Number the candidates by the ends of their forwards, a container after what is inside it, and let `last` of a
row be the greatest number among the candidates that it sees. A plan holds the row only if

    the sum of freed over its units up to `last`  >=  level - budget

since that sum contains what the row sees. It is the row itself where the row sees all of them, which is the rule, and a
relaxation elsewhere. A second run's row is used where it sees nothing after the unit that runs again, and left out
elsewhere. So the least time under these rows is a bound for the program, and a plan that has it and holds the program's
own rows is the best.

A container that is checkpointed stands for its subtree: rows whose `last` lies inside it find what was lacking before
it. So a plan is a walk from place to place, one for each candidate, and all that the rest of the walk must know of its
beginning is one number, the bytes dropped so far. More of them are never worse.

Passes of an accumulated step share no moment: each is a walk of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from memfit.capture import NEVER
from memfit.solve.program import Choice, Program, Segment
from memfit.tradeoff.facts import Ints

PICOSECONDS = 1e9
"""In a millisecond. Times are summed as integers, so that sums do not depend on their order."""
NO_NEED = -(1 << 50)
"""Less than any row asks for, and small enough for sums of floats to be exact."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Place:
    """One candidate of a walk and those inside it, in the order of their ends. Places of one `kind` are equal subtrees.

    `need_bytes` must be lacking when the walk has passed it, `open_bytes` before it when it is not checkpointed,
    `required_bytes` before it for each of its policies, first and second run included, at least `inner_bytes`; with
    `safe_bytes` every way through it is open. `opened` says that something inside it is forced.
    """

    index: int
    kind: int
    inside: tuple[Place, ...]
    forced: bool
    opened: bool
    need_bytes: int
    open_bytes: int
    inner_bytes: int
    safe_bytes: int
    freed: Ints
    time: Ints
    required_bytes: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Walks:
    """The walks of a program, each as the places that lie in no other. No budget below `floor_bytes` can be met."""

    walks: tuple[tuple[Place, ...], ...]
    floor_bytes: int


def walks_of(program: Program, raised: Mapping[int, int] | None = None) -> Walks | None:
    """The walks of a program; None when candidates overlap without lying inside one another.

    `raised` asks for more bytes after some candidates than the rows do; what is found then is a plan and no bound.
    """
    inside = _inside(program)
    order = _by_end(inside)
    ends = [program.candidates[index].unit.end for index in order]
    if ends != sorted(ends):
        return None
    found = _needs(program, order)
    needs = found.after
    for index, need in (raised or {}).items():
        needs[index] = max(needs[index], need)
    kinds: dict[tuple[object, ...], int] = {}
    made: dict[int, Place] = {}
    walks: list[tuple[Place, ...]] = []
    for part in _passes(program, order):
        levels = _rerun_levels(program, part)
        for index in part:
            within = tuple(made[each] for each in inside[index])
            made[index] = _place(program, index, within, found, levels[index], kinds)
        walks.append(tuple(made[index] for index in part if program.candidates[index].outer == NEVER))
    return Walks(walks=tuple(walks), floor_bytes=found.floor_bytes)


@dataclass(slots=True)
class _Needs:
    """What must be lacking: after a candidate, before one that stays open, before one that is checkpointed whole.

    A level inside a candidate's forward, before anything inside it has ended, is there only when it stays open: a
    policy has its own level there. A later one that sees a unit inside a container finds what was lacking before that,
    when the container is checkpointed whole.
    """

    after: dict[int, int]
    open: dict[int, int]
    whole: dict[int, int]
    floor_bytes: int = 0


def _needs(program: Program, order: Sequence[int]) -> _Needs:
    nothing = dict.fromkeys(order, NO_NEED)
    found = _Needs(after=dict(nothing), open=dict(nothing), whole=nothing)
    begins = sorted((candidate.unit.begin, index) for index, candidate in enumerate(program.candidates))
    place = 0
    running: list[int] = []
    for segment, last in _last_seen(program, order):
        at = segment.begin
        seen = program.path(last)
        while at < segment.end:
            running = [index for index in running if program.candidates[index].unit.end > at]
            while place < len(begins) and begins[place][0] <= at:
                if program.candidates[begins[place][1]].unit.end > at:
                    running.append(begins[place][1])
                place += 1
            until = min(segment.end, begins[place][0]) if place < len(begins) else segment.end
            over = int(program.during[at:until].max()) - program.budget_bytes
            if running and running[-1] not in seen:
                found.open[running[-1]] = max(found.open[running[-1]], over)
            elif last == NEVER:
                found.floor_bytes = max(found.floor_bytes, over + program.budget_bytes)
            else:
                found.after[last] = max(found.after[last], over)
                for outer in seen[1:]:
                    if program.candidates[outer].unit.end <= at:
                        found.whole[outer] = max(found.whole[outer], over)
            at = until
    return found


def broken_rows(program: Program, choice: Choice) -> dict[int, int]:
    """For rows that a plan breaks, the candidate that each sees last and the prefix sum that would mend it."""
    order = _by_end(_inside(program))
    freed = [program.candidates[i].policies[choice[i]].discarded_bytes if choice[i] != NEVER else 0 for i in order]
    dropped = dict(zip(order, np.cumsum(np.array(freed, np.int64)).tolist(), strict=True))
    level, reruns = program.peaks(choice)
    over = {segment.begin: int(level[segment.begin : segment.end].max()) for segment in program.segments}
    seen = dict(zip(over, (last for _, last in _last_seen(program, order)), strict=True))
    starts = np.array(list(over), np.int64)
    for candidate, peak in reruns:
        before = int(starts[np.searchsorted(starts, candidate.again - 1, "right") - 1])
        over[before] = max(over[before], peak)
    return {
        seen[begin]: dropped[seen[begin]] + highest - program.budget_bytes
        for begin, highest in over.items()
        if highest > program.budget_bytes and seen[begin] != NEVER
    }


def _inside(program: Program) -> dict[int, list[int]]:
    inside: dict[int, list[int]] = defaultdict(list)
    for index, candidate in enumerate(program.candidates):
        inside[candidate.outer].append(index)
    return inside


def _by_end(inside: dict[int, list[int]]) -> list[int]:
    """Candidates by their ends, containers after what is inside them."""
    order: list[int] = []
    stack = [(index, False) for index in reversed(inside[NEVER])]
    while stack:
        index, visited = stack.pop()
        if visited:
            order.append(index)
        else:
            stack.append((index, True))
            stack += [(each, False) for each in reversed(inside[index])]
    return order


def _passes(program: Program, order: Sequence[int]) -> list[list[int]]:
    """The candidates cut where none is open: before one that begins when all earlier ones have run again."""
    passes: list[list[int]] = []
    part: list[int] = []
    until = 0
    for index in order:
        part.append(index)
        candidate = program.candidates[index]
        if candidate.outer != NEVER:
            continue
        if not passes or min(program.candidates[each].unit.begin for each in part) >= until:
            passes.append([])
        passes[-1] += part
        until = max(until, *(program.candidates[each].again for each in part))
        part = []
    return passes


def _last_seen(program: Program, order: Sequence[int]) -> list[tuple[Segment, int]]:
    """Each segment with the last of the candidates that its row sees, `NEVER` when it sees none."""
    changes: dict[int, list[tuple[int, bool]]] = defaultdict(list)
    for number, index in enumerate(order):
        candidate = program.candidates[index]
        if candidate.unit.end < candidate.again:
            changes[candidate.unit.end].append((number, True))
            changes[candidate.again].append((number, False))
    found = []
    active: set[int] = set()
    for segment in program.segments:
        for number, begins in changes[segment.begin]:
            (active.add if begins else active.discard)(number)
        found.append((segment, order[max(active)] if active else NEVER))
    return found


def _rerun_levels(program: Program, part: Sequence[int]) -> dict[int, int]:
    """What each candidate's second run begins with, above the budget, where its row sees nothing after it."""
    found: dict[int, int] = {}
    latest = NEVER
    at: dict[int, list[int]] = defaultdict(list)
    for index in reversed(part):
        again = program.candidates[index].again
        hidden = latest > again or any(each not in program.path(index) for each in at[again])
        found[index] = NO_NEED if hidden else int(program.before[again]) - program.budget_bytes
        latest = max(latest, again)
        at[again].append(index)
    return found


def _place(
    program: Program,
    index: int,
    inside: tuple[Place, ...],
    needs: _Needs,
    rerun_level: int,
    kinds: dict[tuple[object, ...], int],
) -> Place:
    candidate = program.candidates[index]
    freed = np.array([policy.discarded_bytes for policy in candidate.policies], np.int64)
    time = np.array([round(policy.recompute_ms * PICOSECONDS) for policy in candidate.policies], np.int64)
    peak = np.array([policy.recompute_peak_bytes for policy in candidate.policies], np.int64)
    need = needs.after[index]
    first_run = np.maximum(program.in_forward(index).max(axis=1) - program.budget_bytes, needs.whole[index])
    required = np.maximum(np.maximum(need - freed, first_run), rerun_level + peak - freed)
    kind = (id(candidate.frontier), candidate.forced, *(each.kind for each in inside))
    return Place(
        index=index,
        kind=kinds.setdefault(kind, len(kinds)),
        inside=inside,
        forced=candidate.forced,
        opened=any(each.forced or each.opened for each in inside),
        need_bytes=need,
        open_bytes=needs.open[index],
        inner_bytes=int(first_run.min()),
        safe_bytes=max(need, needs.open[index], int(required.max()), *(each.safe_bytes for each in inside)),
        freed=freed,
        time=time,
        required_bytes=required,
    )
