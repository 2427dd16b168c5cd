"""A small integer program for steps with many equal layers: how many units of each class take each policy.

Note [Classes]: units of one class share a frontier and lie at the same place of equal layers. Summed over a class, the
rows of checkpoint.py become rows in n[c,k], the number of its units with policy k. A row that sees only m units of a
class may count the m largest of what the class freed: z[k] <= n[k], sum of z <= m. So every plan of the full program is
a plan of this one, and the least time here is a proven bound for it.

The answer is then assigned to the units, the largest policies to the layers that run first: the intervals in which
the bytes that equal layers dropped are missing lie inside one another, so this leaves the least memory at every moment.
Rows that the assigned plan breaks are added, and the program is solved again. When the plan holds every row of the full
program, it has the least time and is optimal there too. When it breaks a row that is here already, only the full
program can tell. Rows of segments inside the forward of a unit are left out here, and what is offloaded counts as gone
from the end of its unit's forward to the begin of its backward, which is longer than it is.

It is for steps whose backward does not mirror their forward, where the dynamic program has only a bound. Two towers of
12 equal layers, each with a backward of its own, are proven in 4 s at half of the budgets' range, and not in 60 s by
the full program alone (docs/design/solve.md has the measurements).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memfit.capture import NO_INDEX
from memfit.solve.checkpoint import SCALE
from memfit.solve.milp import Milp
from memfit.solve.program import Choice, Program, Segment

_ROWS_AT_ONCE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitClass:
    """Candidates that are alike, in forward order, and the class of what is around them."""

    members: tuple[int, ...]
    outer: int


def find_classes(program: Program) -> tuple[UnitClass, ...]:
    """Return the classes, outer ones before those inside them."""
    numbers: dict[tuple[int, bool, int], int] = {}
    of_candidate: list[int] = []
    members: dict[int, list[int]] = defaultdict(list)
    outers: list[int] = []
    for index, candidate in enumerate(program.candidates):
        outer = of_candidate[candidate.outer] if candidate.outer != NO_INDEX else NO_INDEX
        key = (id(candidate.frontier), candidate.forced, outer)
        if key not in numbers:
            numbers[key] = len(numbers)
            outers.append(outer)
        of_candidate.append(numbers[key])
        members[numbers[key]].append(index)
    return tuple(UnitClass(members=tuple(members[number]), outer=outers[number]) for number in range(len(numbers)))


class ClassModel:
    """The relaxed program of Note [Classes]."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.classes = find_classes(program)
        self.milp = Milp()
        self.n = [
            [
                self.milp.variable(cost=policy.added_ms, upper=float(len(each.members)))
                for policy in program.candidates[each.members[0]].policies
            ]
            for each in self.classes
        ]
        self.under = self._members_under()
        self._known: set[tuple[str, int]] = set()
        self.path_rows()
        self.forced_rows()
        self.plain = self._plain_segments()
        if self.plain:
            self.segment_row(max(self.plain, key=lambda segment: segment.peak_bytes))

    def path_rows(self) -> None:
        """Families 1 and 2, summed over the members of each class."""
        for number, each in enumerate(self.classes):
            terms = [(n, 1.0) for n in self.n[number]]
            outer = each.outer
            while outer != NO_INDEX:
                terms += [(n, float(self.under[number][outer])) for n in self.n[outer]]
                outer = self.classes[outer].outer
            self.milp.row(terms, upper=float(len(each.members)))

    def forced_rows(self) -> None:
        """Family 1 for candidates that must be checkpointed."""
        for each, row in zip(self.classes, self.n, strict=True):
            if self.program.candidates[each.members[0]].forced:
                self.milp.row(((n, 1.0) for n in row), lower=float(len(each.members)))

    def segment_row(self, segment: Segment) -> bool:
        """Family 4 for one segment; return whether it is new."""
        return self._row(("segment", segment.begin), segment.peak_bytes, segment.begin, None)

    def recompute_row(self, index: int) -> bool:
        """Family 5 for one candidate; return whether it is new."""
        op = self.program.candidates[index].recompute_at
        return self._row(("recompute", index), int(self.program.before[op]), op - 1, index)

    def _row(self, key: tuple[str, int], level_bytes: int, op: int, recomputed: int | None) -> bool:
        """Require that what is missing while `op` runs makes up for a level above the budget and a recomputed unit."""
        if key in self._known:
            return False
        self._known.add(key)
        terms: list[tuple[int, float]] = []
        counted: dict[int, list[int]] = {}
        seen: dict[int, list[int]] = {}
        for number, each in enumerate(self.classes):
            active = [m for m in each.members if m == recomputed or self._active(m, op)]
            if not active:
                continue
            seen[number] = active
            policies = self.program.candidates[each.members[0]].policies
            own = recomputed is not None and recomputed in active
            if len(active) == len(each.members) and not own:
                counted[number] = self.n[number]
            else:
                counted[number] = self._largest(number, len(active) - own)
            terms += [(n, policy.freed_bytes / SCALE) for n, policy in zip(counted[number], policies, strict=True)]
            if own:
                extra = self._recomputed(number, counted[number])
                terms += extra
                counted[number] = [*counted[number], *(w for w, _ in extra)]
            self._paths_of_part(number, seen, counted)
        self.milp.row(terms, lower=(level_bytes - self.program.budget_bytes) / SCALE)
        return True

    def _paths_of_part(self, number: int, seen: dict[int, list[int]], counted: dict[int, list[int]]) -> None:
        """Family 2 among the units that a row sees: the sum over those of one class of what is chosen on their paths.

        A unit around them is counted as often as units of the class that the row sees lie in it, at least.
        """
        active = seen[number]
        if len(active) == len(self.classes[number].members):
            return
        terms = [(n, 1.0) for n in counted[number]]
        outer = self.classes[number].outer
        while outer != NO_INDEX:
            around = dict.fromkeys(seen.get(outer, ()), 0)
            for path in map(self.program.path, active):
                for each in path:
                    if each in around:
                        around[each] += 1
            terms += [(n, float(min(around.values(), default=0))) for n in counted.get(outer, ())]
            outer = self.classes[outer].outer
        if len(terms) > len(counted[number]):
            self.milp.row(terms, upper=float(len(active)))

    def _active(self, member: int, op: int) -> bool:
        candidate = self.program.candidates[member]
        return candidate.unit.end <= op < candidate.recompute_at

    def _largest(self, number: int, count: int) -> list[int]:
        """Return variables for at most `count` of a class's units."""
        chosen = [self.milp.variable(upper=float(count), integer=False) for _ in self.n[number]]
        for z, n in zip(chosen, self.n[number], strict=True):
            self.milp.row([(z, 1.0), (n, -1.0)], upper=0.0)
        self.milp.row(((z, 1.0) for z in chosen), upper=float(count))
        return chosen

    def _recomputed(self, number: int, others: Sequence[int]) -> list[tuple[int, float]]:
        """Return the terms of the recomputed unit: one more of its class, one for sure when all are checkpointed."""
        policies = self.program.candidates[self.classes[number].members[0]].policies
        members = len(self.classes[number].members)
        chosen = [self.milp.variable(integer=False) for _ in policies]
        for w, z, n in zip(chosen, others, self.n[number], strict=True):
            self.milp.row([(w, 1.0), (z, 1.0), (n, -1.0)], upper=0.0)
        self.milp.row(((w, 1.0) for w in chosen), upper=1.0)
        terms = [(w, 1.0) for w in chosen] + [(n, -1.0) for n in self.n[number]]
        self.milp.row(terms, lower=1.0 - members)
        return [
            (w, (policy.freed_bytes - policy.recompute_peak_bytes) / SCALE)
            for w, policy in zip(chosen, policies, strict=True)
        ]

    def add_broken_rows(self, choice: Choice) -> bool:
        """Add the rows that an assigned plan breaks, the worst ones first; return whether there was a new one."""
        budget = self.program.budget_bytes
        freed = self.program.freed(choice)
        broken = [(segment.peak_bytes - int(freed[segment.begin]) - budget, segment) for segment in self.plain]
        broken = sorted((each for each in broken if each[0] > 0), key=lambda each: (-each[0], each[1].begin))
        added = sum(self.segment_row(segment) for _, segment in broken[:_ROWS_AT_ONCE])
        _, recomputes = self.program.peaks(choice)
        places = {id(candidate): index for index, candidate in enumerate(self.program.candidates)}
        late = [(peak - budget, places[id(candidate)]) for candidate, peak in recomputes if peak > budget]
        added += sum(self.recompute_row(index) for _, index in sorted(late, reverse=True)[:_ROWS_AT_ONCE])
        return added > 0

    def _plain_segments(self) -> list[Segment]:
        """Return segments in which no candidate runs its forward; the rows of others know policies, not classes."""
        units = [candidate.unit for candidate in self.program.candidates]
        return [
            segment
            for segment in self.program.segments
            if not any(unit.begin < segment.end and segment.begin < unit.end for unit in units)
        ]

    def assign(self, values: Sequence[float], *, largest_first: bool = True) -> Choice:
        """Assign the numbers to units (Note [Classes])."""
        choice = np.full(len(self.program.candidates), NO_INDEX, np.int64)
        for each, row in zip(self.classes, self.n, strict=True):
            free = [m for m in each.members if all(choice[outer] == NO_INDEX for outer in self.program.path(m)[1:])]
            hand = [policy for policy, n in enumerate(row) for _ in range(round(values[n]))]
            hand.reverse()  # policies are sorted by what they free
            if not largest_first:
                free.reverse()
            for member, policy in zip(free, hand, strict=False):
                choice[member] = policy
        return choice

    def _members_under(self) -> list[dict[int, int]]:
        """Return, for each class and each class around it, how many members lie in one unit of that class, at least."""
        found: list[dict[int, int]] = []
        for each in self.classes:
            counts: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
            for member in each.members:
                number = each.outer
                for outer in self.program.path(member)[1:]:
                    counts[number][outer] += 1
                    number = self.classes[number].outer
            found.append(
                {
                    number: min(by_unit.values()) if len(by_unit) == len(self.classes[number].members) else 0
                    for number, by_unit in counts.items()
                }
            )
        return found
