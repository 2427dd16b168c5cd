"""The program that decides which units are checkpointed, and how: one binary for each candidate and policy.

Variables: x[u,k] is 1 when candidate u is checkpointed with policy k; c[j] is what is missing in segment j, in MiB.
Minimise the sum of added_ms[u,k] x[u,k], recompute and exposed copies, subject to five families of rows:

1. choice:     sum over k of x[u,k] <= 1, and = 1 for a candidate that the caller forces
2. path:       sum of x over the candidates of one path of the module tree <= 1: a container or what is inside it
3. cumulative: c[j] = c[j-1] + freed of candidates whose forward ends at boundary j - freed of those whose recompute
               begins there, so that rows grow with the number of candidates and not with its square; likewise what
               is offloaded, at boundaries of its own
4. segment:    highest level in segment j - c[j] - relief[u,k,j] x[u,k] of the units u in whose forward it lies
               <= budget, for segments that may be above the budget; relief is what k's profile lowers the level by
5. recompute:  level just before the recompute of u - what is missing there, u's own part included, without what
               comes back ahead of it + recompute_peak_bytes[u,k] x[u,k] <= budget, where a policy could break it

For the smallest feasible budget the budget is a variable too, and the only one that costs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict

import numpy as np

from memfit.capture import NO_INDEX
from memfit.solve.milp import FREE, Milp
from memfit.solve.program import Choice, Program

SCALE = float(1 << 20)
"""Rows are in MiB: HiGHS likes numbers near one."""


class CheckpointModel:
    """The mixed-integer program of a step."""

    def __init__(self, program: Program, *, min_budget: bool = False) -> None:
        self.program = program
        self.milp = Milp()
        self.x = [
            [self.milp.variable(cost=0.0 if min_budget else policy.added_ms) for policy in candidate.policies]
            for candidate in program.candidates
        ]
        self.budget = self.milp.variable(cost=1.0, upper=FREE, integer=False) if min_budget else None
        most = sum(candidate.policies[-1].freed_bytes for candidate in program.candidates) / SCALE
        self.missing = [
            self.milp.variable(lower=0.0, upper=most if index else 0.0, integer=False)
            for index in range(len(program.segments))
        ]
        self.choice_rows()
        self.path_rows()
        self.cumulative_rows()
        self.segment_rows()
        self.recompute_rows()

    def choice_rows(self) -> None:
        """Family 1."""
        for candidate, row in zip(self.program.candidates, self.x, strict=True):
            if candidate.forced or candidate.outer == NO_INDEX:
                self.milp.row(((x, 1.0) for x in row), lower=1.0 if candidate.forced else -FREE, upper=1.0)

    def path_rows(self) -> None:
        """Family 2."""
        for path in self.program.paths:
            if len(path) > 1:
                self.milp.row(((x, 1.0) for index in path for x in self.x[index]), upper=1.0)

    def cumulative_rows(self) -> None:
        """Family 3."""
        begins = {segment.begin: index for index, segment in enumerate(self.program.segments)}
        terms: list[list[tuple[int, float]]] = [[] for _ in self.missing]
        for candidate, row in zip(self.program.candidates, self.x, strict=True):
            for x, policy in zip(row, candidate.policies, strict=True):
                freed = policy.discarded_bytes / SCALE
                terms[begins[candidate.unit.end]].append((x, freed))
                terms[begins[candidate.recompute_at]].append((x, -freed))
                if candidate.window is not None:
                    offloaded = policy.offloaded_bytes / SCALE
                    terms[begins[candidate.window.gone_at]].append((x, offloaded))
                    terms[begins[candidate.window.back_at]].append((x, -offloaded))
        for index in range(1, len(self.missing)):
            balance = [(self.missing[index], -1.0), (self.missing[index - 1], 1.0), *terms[index]]
            self.milp.row(balance, lower=0.0, upper=0.0)

    def segment_rows(self) -> None:
        """Family 4."""
        relief = self._relief()
        for index, segment in enumerate(self.program.segments):
            terms = [(self.missing[index], 1.0), *((x, bytes_ / SCALE) for x, bytes_ in relief[index])]
            if self.budget is not None:
                self.milp.row([*terms, (self.budget, 1.0)], lower=segment.peak_bytes / SCALE)
                continue
            highest = segment.peak_bytes - min((bytes_ for _, bytes_ in relief[index]), default=0)
            if max(highest, segment.peak_bytes) > self.program.budget_bytes:
                over = segment.peak_bytes - self.program.budget_bytes
                self.milp.row(terms, lower=over / SCALE)

    def _relief(self) -> list[list[tuple[int, int]]]:
        """Return, for each segment, the policies whose first run changes its highest level: variable and bytes."""
        segments = self.program.segments
        starts = [segment.begin for segment in segments]
        found: list[list[tuple[int, int]]] = [[] for _ in segments]
        for number, (candidate, row) in enumerate(zip(self.program.candidates, self.x, strict=True)):
            begin, end = candidate.unit.begin, candidate.unit.end
            levels = self.program.in_forward(number)
            for index in range(bisect_right(starts, begin) - 1, len(segments)):
                segment = segments[index]
                if segment.begin >= end:
                    break
                outside = int(self.program.during[segment.begin : max(segment.begin, begin)].max(initial=0))
                inside = levels[:, max(segment.begin, begin) - begin : segment.end - begin].max(axis=1, initial=0)
                for x, level in zip(row, np.maximum(inside, outside).tolist(), strict=True):
                    if level != segment.peak_bytes:
                        found[index].append((x, segment.peak_bytes - level))
        return found

    def recompute_rows(self) -> None:
        """Family 5. Without a recompute it holds anyway: the level before an op is no higher than during the last."""
        budget = self.program.budget_bytes
        begins = {segment.begin: index for index, segment in enumerate(self.program.segments)}
        back = self._coming_back()
        for candidate, row in zip(self.program.candidates, self.x, strict=True):
            level = int(self.program.before[candidate.recompute_at])
            highest = level + max(policy.recompute_peak_bytes for policy in candidate.policies)
            if self.budget is None and highest <= budget:
                continue
            terms = [(self.missing[begins[candidate.recompute_at] - 1], -1.0), *back[candidate.recompute_at]]
            missing_itself = candidate.unit.end == candidate.recompute_at  # recomputed right where its forward ended
            for x, policy in zip(row, candidate.policies, strict=True):
                own = policy.discarded_bytes if missing_itself else 0
                terms.append((x, (policy.recompute_peak_bytes - own) / SCALE))
            if self.budget is None:
                self.milp.row(terms, upper=(budget - level) / SCALE)
            else:
                self.milp.row([*terms, (self.budget, -1.0)], upper=-level / SCALE)

    def _coming_back(self) -> dict[int, list[tuple[int, float]]]:
        """Return, for each op, the policies whose offloaded bytes come back ahead of it: variable and MiB."""
        found: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for candidate, row in zip(self.program.candidates, self.x, strict=True):
            if candidate.window is not None:
                found[candidate.window.back_at] += [
                    (x, policy.offloaded_bytes / SCALE) for x, policy in zip(row, candidate.policies, strict=True)
                ]
        return found

    def choice_of(self, values: tuple[float, ...]) -> Choice:
        """Return the choice that the solver's values stand for."""
        choice = np.full(len(self.x), NO_INDEX, np.int64)
        for index, row in enumerate(self.x):
            for policy, x in enumerate(row):
                if values[x] > 0.5:
                    choice[index] = policy
        return choice

    def values_of(self, choice: Choice, peak_bytes: int = 0) -> list[float]:
        """Return a full assignment for a choice, to start the solver from; its peak where the budget is a variable."""
        values = [0.0] * self.milp.columns
        if self.budget is not None:
            values[self.budget] = peak_bytes / SCALE
        for index, policy in enumerate(choice.tolist()):
            if policy != NO_INDEX:
                values[self.x[index][policy]] = 1.0
        freed = self.program.freed(choice)
        for variable, segment in zip(self.missing, self.program.segments, strict=True):
            values[variable] = float(freed[segment.begin]) / SCALE
        return values
