"""A small program for steps with many equal layers: how many units of each class take each policy.

Note [Classes]: units of one class share a frontier and lie at the same place of equal layers. Summed over a class, the
rows of checkpoint.py become rows in n[c,k], the number of its units with policy k. A row that sees only some units of a
class is relaxed: it may count what all of them freed. So every plan of the full program is a plan of this one, and the
least time here is a proven bound for it.

The answer is then dealt out to the units, the largest policies to the layers that run first: the intervals in which
equal layers lack what they dropped lie inside one another, so this leaves the least memory at every moment. When the
plan that comes out holds every row of the full program, it has the least time and is optimal there too. Otherwise the
full program is solved, with the bound known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memfit.solve.checkpoint import SCALE
from memfit.solve.milp import Milp
from memfit.solve.program import Choice, Program
from memfit.trace import NEVER


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitClass:
    """Candidates that are alike, in forward order, and the class of what is around them."""

    members: tuple[int, ...]
    outer: int


def classes_of(program: Program) -> tuple[UnitClass, ...]:
    """The classes, outer ones before those inside them."""
    numbers: dict[tuple[int, bool, int], int] = {}
    of_candidate: list[int] = []
    members: dict[int, list[int]] = defaultdict(list)
    outers: list[int] = []
    for index, candidate in enumerate(program.candidates):
        outer = of_candidate[candidate.outer] if candidate.outer != NEVER else NEVER
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
        self.classes = classes_of(program)
        self.milp = Milp()
        self.n = [
            [
                self.milp.variable(cost=policy.recompute_ms, upper=float(len(each.members)))
                for policy in program.candidates[each.members[0]].policies
            ]
            for each in self.classes
        ]
        self.path_rows()
        self.forced_rows()
        self.segment_rows()

    def path_rows(self) -> None:
        """Families 1 and 2, summed over the members of each class."""
        under = self._members_under()
        for number, each in enumerate(self.classes):
            terms = [(n, 1.0) for n in self.n[number]]
            outer = each.outer
            while outer != NEVER:
                terms += [(n, float(under[number][outer])) for n in self.n[outer]]
                outer = self.classes[outer].outer
            self.milp.row(terms, upper=float(len(each.members)))

    def forced_rows(self) -> None:
        """Family 1 for candidates that must be checkpointed."""
        for each, row in zip(self.classes, self.n, strict=True):
            if self.program.candidates[each.members[0]].forced:
                self.milp.row(((n, 1.0) for n in row), lower=float(len(each.members)))

    def segment_rows(self) -> None:
        """Family 4: of segments that see the same classes, the highest."""
        most: dict[frozenset[int], int] = {}
        spans = [
            [(self.program.candidates[m].unit.end, self.program.candidates[m].again) for m in each.members]
            for each in self.classes
        ]
        first = [min(end for end, _ in span) for span in spans]
        for segment in self.program.segments:
            over = segment.peak_bytes - self.program.budget_bytes
            if over <= 0:
                continue
            seen = frozenset(
                number
                for number, span in enumerate(spans)
                if first[number] <= segment.begin and any(end <= segment.begin < again for end, again in span)
            )
            most[seen] = max(most.get(seen, 0), over)
        for seen, over in most.items():
            terms = []
            for number in sorted(seen):
                policies = self.program.candidates[self.classes[number].members[0]].policies
                terms += [
                    (n, policy.discarded_bytes / SCALE) for n, policy in zip(self.n[number], policies, strict=True)
                ]
            self.milp.row(terms, lower=over / SCALE)

    def deal(self, values: Sequence[float], *, largest_first: bool = True) -> Choice:
        """The numbers dealt out to the units; see Note [Classes]."""
        choice = np.full(len(self.program.candidates), NEVER, np.int64)
        for each, row in zip(self.classes, self.n, strict=True):
            free = [m for m in each.members if all(choice[outer] == NEVER for outer in self.program.path(m)[1:])]
            hand = [policy for policy, n in enumerate(row) for _ in range(round(values[n]))]
            hand.reverse()  # policies are sorted by what they free
            if not largest_first:
                free.reverse()
            for member, policy in zip(free, hand, strict=False):
                choice[member] = policy
        return choice

    def _members_under(self) -> list[dict[int, int]]:
        """For each class and each class around it, how many members lie in one unit of that class, at least."""
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
