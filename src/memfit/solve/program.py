"""What a plan decides, and what holds while it runs: memory levels, candidates, and the rows that a plan must hold.

Note [Rows of a plan]: let `during[t]` and `before[t]` be the captured levels (memory.Timeline). The bytes `freed[u,k]`
that a unit u drops under policy k are missing from the end of its forward to the begin of its backward: from op
`end(u)` up to (not including) op `recompute_at(u)`, where u is active. There its forward is recomputed, on top of the
level just before that op, where what u and the units before it dropped is still missing. A plan x fits budget B when

    during[t] - sum of freed[u,k] x[u,k] over units u with end(u) <= t < recompute_at(u)  <=  B   for every op t
    before[recompute_at(u)] - sum of freed over units active there, u included + peak[u,k]  <=  B   where x[u,k] = 1

While u itself runs for the first time, its `profile` holds: dropped results leave as soon as only autograd would hold
them, saved results and inputs stay. So inside its forward

    during[t] + profile[u,k](t) - sum of freed over units active at t  <=  B

What u offloads under k, `offloaded[u,k]`, is missing for a shorter time (tradeoff, Note [Offload]): from op
`gone_at(u)`, the end of the next unit's forward, up to op `back_at(u)`, the begin of its backward, ahead of its
recompute. It is one more interval of the same sum, and a recompute at `back_at(u)` does not miss it any longer.

All of this is linear. Between two neighbouring boundaries (ends of forwards, begins of recomputes) the sum does not
change, so one row for each segment with the highest `during` in it says all of the first family.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from memfit.capture import NO_INDEX
from memfit.hardware import OffloadLink
from memfit.memory import Bytes
from memfit.tradeoff import Frontier, OffloadWindow, Policy, Unit

Choice = npt.NDArray[np.int64]
"""For each candidate the index of its policy, or `NO_INDEX` when it is not checkpointed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A unit that a plan may checkpoint, with the policies that free something. `outer` is the candidate around it.

    Policies are by growing `freed_bytes`. `window` says when what they offload is gone; None where none of them does.
    """

    unit: Unit
    policies: tuple[Policy, ...]
    frontier: Frontier
    outer: int
    forced: bool = False
    window: OffloadWindow | None = None

    @property
    def recompute_at(self) -> int:
        """The op before which the unit is recomputed."""
        return self.unit.backward_begin


def offload_what_is_hidden(candidates: Sequence[Candidate], link: OffloadLink) -> tuple[Candidate, ...]:
    """Return the units, each of which offloads all that compute hides, and may drop more besides.

    As they are stay those of which nothing is hidden, and those around or inside a unit that is forced already.
    """
    kept: set[int] = set()
    for index, candidate in enumerate(candidates):
        outer = candidate.outer
        while outer != NO_INDEX:
            if candidate.forced:
                kept.add(outer)
            if candidates[outer].forced:
                kept.add(index)
            outer = candidates[outer].outer
    return tuple(each if index in kept else _offloading(each, link) for index, each in enumerate(candidates))


def _offloading(candidate: Candidate, link: OffloadLink) -> Candidate:
    if candidate.window is None:
        return candidate
    hidden = candidate.window.hidden_bytes(link)
    within = [policy for policy in candidate.policies if policy.offloaded_bytes <= hidden]
    most = max((policy.offloaded_bytes for policy in within if policy.stop < 0), default=0)
    if not most:
        return candidate
    policies = tuple(policy for policy in within if policy.offloaded_bytes >= most)
    return replace(candidate, policies=policies, forced=True)


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

    spans: tuple[tuple[int, int], ...]
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
        """Ops at which a candidate becomes active or stops to be."""
        points = {candidate.unit.end for candidate in self.candidates}
        points |= {candidate.recompute_at for candidate in self.candidates}
        windows = [candidate.window for candidate in self.candidates if candidate.window is not None]
        points |= {window.gone_at for window in windows} | {window.back_at for window in windows}
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
        """Return a candidate and those around it, innermost first."""
        chain = []
        while index != NO_INDEX:
            chain.append(index)
            index = self.candidates[index].outer
        return tuple(chain)

    def freed(self, choice: Choice) -> Bytes:
        """Return the bytes missing while each op runs, and at the end of the step."""
        change = np.zeros(len(self.during) + 1, np.int64)
        for candidate, policy in self.chosen(choice):
            change[candidate.unit.end] += policy.discarded_bytes
            change[candidate.recompute_at] -= policy.discarded_bytes
            if candidate.window is not None:
                change[candidate.window.gone_at] += policy.offloaded_bytes
                change[candidate.window.back_at] -= policy.offloaded_bytes
        return np.cumsum(change)[:-1]

    def chosen(self, choice: Choice) -> list[tuple[Candidate, Policy]]:
        """Return the candidates that are checkpointed, each with its policy."""
        return [
            (self.candidates[index], self.candidates[index].policies[policy])
            for index, policy in enumerate(choice.tolist())
            if policy != NO_INDEX
        ]

    def in_forward(self, index: int) -> Bytes:
        """Return the levels of a candidate's first run, a row for each of its policies, nothing else dropped."""
        candidate = self.candidates[index]
        begin, end = candidate.unit.begin, candidate.unit.end
        levels = np.repeat(self.during[None, begin:end], len(candidate.policies), axis=0)
        for row, policy in zip(levels, candidate.policies, strict=True):
            row += policy_profile(policy, end - begin)
        return levels

    def recompute_ms(self, choice: Choice) -> float:
        """Return the time that a choice adds to the step, exposed copies included, in the order of the candidates."""
        return float(sum(policy.added_ms for _, policy in self.chosen(choice)))

    def peaks(self, choice: Choice) -> tuple[Bytes, list[tuple[Candidate, int]]]:
        """Return the level while each op runs, and the highest point of each recompute."""
        freed = self.freed(choice)
        level = self.during - freed
        for candidate, policy in self.chosen(choice):
            begin, end = candidate.unit.begin, candidate.unit.end
            level[begin:end] += policy_profile(policy, end - begin)
        recomputes = []
        back: dict[int, int] = defaultdict(int)
        for candidate, policy in self.chosen(choice):
            if candidate.window is not None:
                back[candidate.window.back_at] += policy.offloaded_bytes
        for candidate, policy in self.chosen(choice):
            # A unit that is recomputed right where its forward ended (the loss) is in the sum of no op.
            own = policy.discarded_bytes if candidate.unit.end == candidate.recompute_at else 0
            begin = int(self.before[candidate.recompute_at]) - int(freed[candidate.recompute_at - 1]) - own
            begin += back[candidate.recompute_at]
            recomputes.append((candidate, begin + policy.recompute_peak_bytes))
        return level, recomputes

    def peak_bytes(self, choice: Choice) -> int:
        """Return the highest point of the step under a choice."""
        level, recomputes = self.peaks(choice)
        return max(int(level.max()), *(peak for _, peak in recomputes), 0)

    def fits(self, choice: Choice) -> bool:
        """Return whether nothing of the step is above the budget."""
        return self.peak_bytes(choice) <= self.budget_bytes

    def nested(self, choice: Choice) -> bool:
        """Return whether a checkpointed candidate lies inside another, which no plan may have."""
        return any(sum(choice[index] != NO_INDEX for index in path) > 1 for path in self.paths)


def policy_profile(policy: Policy, ops: int) -> Bytes:
    """Return what a policy changes while each op of its unit runs for the first time."""
    change = np.zeros(ops, np.int64)
    for op, n_bytes in policy.profile:
        if op + 1 < ops:
            change[op + 1] += n_bytes
    return np.cumsum(change)


def _known_windows(
    units: Sequence[Unit], frontiers: Sequence[Frontier], windows: Mapping[str, OffloadWindow]
) -> Mapping[str, OffloadWindow]:
    """Return the windows beside candidates, or beside units without any inside."""
    while True:
        able = [
            unit
            for unit, frontier in zip(units, frontiers, strict=True)
            if any(
                policy.freed_bytes > 0 and (not policy.offload or unit.name in windows) for policy in frontier.policies
            )
        ]
        names = {unit.name for unit in able}
        left = {
            name: window
            for name, window in windows.items()
            if window.next.name in names
            or not any(window.next.begin <= unit.begin and unit.end <= window.next.end for unit in able)
        }
        if len(left) == len(windows):
            return windows
        windows = left  # a unit that may not offload may be no candidate any longer


def build_candidates(
    units: Sequence[Unit],
    frontiers: Sequence[Frontier],
    *,
    forced: frozenset[str] = frozenset(),
    second_run_ms: float = 0.0,
    windows: Mapping[str, OffloadWindow] | None = None,
) -> tuple[Candidate, ...]:
    """Return the units that can free something, outer ones before those inside them.

    `second_run_ms` is what the host takes for each op of a unit that is recomputed, beyond the ops themselves.
    `windows` are those of units that may offload. The dynamic program knows when copies are gone by the next unit, as a
    candidate or as one without any inside; others do not offload.
    """
    windows = _known_windows(units, frontiers, windows or {})
    useful = []
    for unit, frontier in zip(units, frontiers, strict=True):
        extra_ms = second_run_ms * (unit.end - unit.begin)
        policies = tuple(
            replace(policy, recompute_ms=policy.recompute_ms + extra_ms) if extra_ms and policy.stop >= 0 else policy
            for policy in frontier.policies
            if policy.freed_bytes > 0 and (not policy.offload or unit.name in windows)
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
        outer = open_units[-1] if open_units else NO_INDEX
        open_units.append(len(found))
        found.append(
            Candidate(
                unit=unit,
                policies=policies,
                frontier=frontier,
                outer=outer,
                forced=unit.name in forced,
                window=windows.get(unit.name),
            )
        )
    return tuple(found)
