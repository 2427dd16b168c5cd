"""What a plan decides, and what holds while it runs: levels of memory, candidates, and the moments that matter.

Note [Moments of a plan]: let `during[t]` and `before[t]` be the captured levels (memory.Timeline). A unit u that is
checkpointed with policy k lacks `freed[u,k]` bytes from the end of its forward to the beginning of its backward, op
`end(u)` up to (not including) op `again(u)`. There its forward runs again, on top of the level just before that op,
which still lacks what u and the units before it dropped. So a plan x fits the budget B when

    during[t] - sum of freed[u,k] x[u,k] over units u with end(u) <= t < again(u)  <=  B   for every op t
    before[again(u)] - sum of freed over units active there, u included + rerun[u,k]  <=  B   where x[u,k] = 1

While u itself runs for the first time, its `profile` holds: dropped results leave as soon as only autograd would hold
them, saved results and inputs stay. So inside its forward

    during[t] + profile[u,k](t) - sum of freed over units active at t  <=  B

All of this is linear. Between two neighbouring boundaries (ends and agains) the sum does not change, so one row for
each segment with the highest `during` in it says all of the first family.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from memfit.capture import NEVER
from memfit.memory.timeline import Bytes
from memfit.tradeoff import Frontier, Policy, Unit

Choice = npt.NDArray[np.int64]
"""For each candidate the index of its policy, or `NEVER` when it is not checkpointed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A unit that a plan may checkpoint, with the policies that free something. `outer` is the candidate around it."""

    unit: Unit
    policies: tuple[Policy, ...]
    frontier: Frontier
    outer: int
    forced: bool = False

    @property
    def again(self) -> int:
        """The op before which the unit runs again."""
        return self.unit.backward_begin


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Ops `begin` up to (not including) `end` in which the set of active candidates does not change."""

    begin: int
    end: int
    peak_bytes: int
    peak_op: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatches:
    """The ops of each micro-batch, and its candidates; those at the same place of each take the same policy."""

    windows: tuple[tuple[int, int], ...]
    members: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Program:
    """A step to be planned: levels with everything that no decision changes, the budget, and the candidates."""

    before: Bytes
    during: Bytes
    budget_bytes: int
    candidates: tuple[Candidate, ...]
    micro_batches: MicroBatches | None = None
    """Those that take the same policies (Note [Micro-batches]); None when every candidate is free."""

    @cached_property
    def boundaries(self) -> tuple[int, ...]:
        """Ops at which a candidate begins or stops to lack what it dropped."""
        points = {candidate.unit.end for candidate in self.candidates}
        points |= {candidate.again for candidate in self.candidates}
        return tuple(sorted(points))

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The step cut at the boundaries; the first segment is before all of them."""
        points = [0, *(point for point in self.boundaries if 0 < point < len(self.during)), len(self.during)]
        found = []
        for begin, end in pairwise(points):
            peak = begin + int(self.during[begin:end].argmax())
            found.append(Segment(begin=begin, end=end, peak_bytes=int(self.during[peak]), peak_op=peak))
        return tuple(found)

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Candidates that lie inside one another, innermost first, for each innermost one."""
        outer = {candidate.outer for candidate in self.candidates}
        return tuple(self.path(index) for index in range(len(self.candidates)) if index not in outer)

    def path(self, index: int) -> tuple[int, ...]:
        """A candidate and those around it."""
        chain = []
        while index != NEVER:
            chain.append(index)
            index = self.candidates[index].outer
        return tuple(chain)

    def freed(self, choice: Choice) -> Bytes:
        """What is lacking while each op runs, and at the end of the step."""
        change = np.zeros(len(self.during) + 1, np.int64)
        for candidate, policy in self.chosen(choice):
            change[candidate.unit.end] += policy.discarded_bytes
            change[candidate.again] -= policy.discarded_bytes
        return np.cumsum(change)[:-1]

    def chosen(self, choice: Choice) -> list[tuple[Candidate, Policy]]:
        """The candidates that are checkpointed, each with its policy."""
        return [
            (self.candidates[index], self.candidates[index].policies[policy])
            for index, policy in enumerate(choice.tolist())
            if policy != NEVER
        ]

    def in_forward(self, index: int) -> Bytes:
        """Levels while a candidate runs for the first time, a row for each of its policies, nothing else dropped."""
        candidate = self.candidates[index]
        begin, end = candidate.unit.begin, candidate.unit.end
        levels = np.repeat(self.during[None, begin:end], len(candidate.policies), axis=0)
        for row, policy in zip(levels, candidate.policies, strict=True):
            row += policy_profile(policy, end - begin)
        return levels

    def recompute_ms(self, choice: Choice) -> float:
        """The time that a choice adds to the step, summed in the order of the candidates."""
        return float(sum(policy.recompute_ms for _, policy in self.chosen(choice)))

    def peaks(self, choice: Choice) -> tuple[Bytes, list[tuple[Candidate, int]]]:
        """The level while each op runs, and the highest point of each second run."""
        freed = self.freed(choice)
        level = self.during - freed
        for candidate, policy in self.chosen(choice):
            begin, end = candidate.unit.begin, candidate.unit.end
            level[begin:end] += policy_profile(policy, end - begin)
        reruns = []
        for candidate, policy in self.chosen(choice):
            lacks_itself = candidate.unit.end == candidate.again  # dropped and run again between the same two ops
            active = int(freed[candidate.again - 1]) + (policy.discarded_bytes if lacks_itself else 0)
            reruns.append((candidate, int(self.before[candidate.again]) - active + policy.recompute_peak_bytes))
        return level, reruns

    def peak_bytes(self, choice: Choice) -> int:
        """The highest point of the step under a choice."""
        level, reruns = self.peaks(choice)
        return max(int(level.max()), *(peak for _, peak in reruns), 0)

    def fits(self, choice: Choice) -> bool:
        """Whether nothing of the step is above the budget."""
        return self.peak_bytes(choice) <= self.budget_bytes

    def nested(self, choice: Choice) -> bool:
        """Whether a checkpointed candidate lies inside another, which no plan may have."""
        return any(sum(choice[index] != NEVER for index in path) > 1 for path in self.paths)


def policy_profile(policy: Policy, ops: int) -> Bytes:
    """What a policy changes while each op of its unit runs for the first time."""
    change = np.zeros(ops, np.int64)
    for op, n_bytes in policy.profile:
        if op + 1 < ops:
            change[op + 1] += n_bytes
    return np.cumsum(change)


def build_candidates(
    units: Sequence[Unit],
    frontiers: Sequence[Frontier],
    *,
    forced: frozenset[str] = frozenset(),
    second_run_ms: float = 0.0,
) -> tuple[Candidate, ...]:
    """Units that can free something, outer ones before those inside them.

    `second_run_ms` is what the host takes for each op of a unit that runs again, beyond the ops themselves.
    """
    useful = []
    for unit, frontier in zip(units, frontiers, strict=True):
        extra_ms = second_run_ms * (unit.end - unit.begin)
        policies = tuple(
            replace(policy, recompute_ms=policy.recompute_ms + extra_ms) if extra_ms else policy
            for policy in frontier.policies
            if policy.discarded_bytes > 0
        )
        if policies:
            useful.append((unit, frontier, policies))
    useful.sort(key=lambda each: (each[0].begin, -each[0].end))
    found: list[Candidate] = []
    open_units: list[int] = []
    for unit, frontier, policies in useful:
        while open_units and found[open_units[-1]].unit.end < unit.end:
            open_units.pop()
        while open_units and found[open_units[-1]].unit.end <= unit.begin:
            open_units.pop()
        outer = open_units[-1] if open_units else NEVER
        open_units.append(len(found))
        found.append(
            Candidate(unit=unit, policies=policies, frontier=frontier, outer=outer, forced=unit.name in forced)
        )
    return tuple(found)
