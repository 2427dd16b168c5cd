"""The smallest budget that any plan meets."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from memfit.capture import NO_INDEX
from memfit.solve.checkpoint import SCALE, CheckpointModel
from memfit.solve.dp import DynamicProgram
from memfit.solve.micro_batches import fold, spread
from memfit.solve.milp import Limits, Status
from memfit.solve.program import Choice, Program
from memfit.solve.requirements import UnitNode

_TOLERANCE_BYTES = 1024
"""A thousandth of a MiB, the unit of the program's rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MinBudget:
    """The lowest peak found, the plan that has it, and the proven bound below which nothing can be."""

    choice: Choice
    peak_bytes: int
    bound_bytes: int

    @property
    def proven(self) -> bool:
        """Whether no plan has a lower peak, to what the solver's tolerances make of a budget."""
        return self.peak_bytes <= self.bound_bytes + _TOLERANCE_BYTES


def min_budget(program: Program, limits: Limits | None = None, *, dp: DynamicProgram | None = None) -> MinBudget | None:
    """Return the plan with the lowest peak; None when the solver found none in its time.

    Of the plans with that peak any is given: solve again at this budget for the fastest of them. `dp` is the dynamic
    program, where it is there already.
    """
    if program.micro_batches is not None:
        folded = min_budget(fold(program, program.micro_batches), limits)
        if folded is None:
            return None
        choice = spread(program.micro_batches, folded.choice, len(program.candidates))
        return replace(folded, choice=choice, peak_bytes=program.peak_bytes(choice))
    dp = dp or DynamicProgram.of(program)
    bisected = None if dp is None else _bisect(program, dp)
    if bisected is not None and bisected.peak_bytes <= bisected.bound_bytes:
        return bisected
    model = CheckpointModel(program, min_budget=True)
    start = None if bisected is None else model.values_of(bisected.choice, bisected.peak_bytes)
    solved = model.milp.solve(replace(limits or Limits(), gap=0.0), start=start)
    if solved.status not in (Status.OPTIMAL, Status.FEASIBLE):
        return bisected
    choice = model.choice_of(solved.values)
    return MinBudget(
        choice=choice,
        peak_bytes=program.peak_bytes(choice),
        bound_bytes=max(math.floor(solved.bound * SCALE), 0 if bisected is None else bisected.bound_bytes),
    )


def can_meet(program: Program, budget_bytes: int, *, dp: DynamicProgram | None = None) -> bool:
    """Return False where it is proven that no plan meets a budget: one pass instead of the bisection for the smallest.

    Where backward does not mirror forward, True may be wrong.
    """
    if program.micro_batches is not None:
        return can_meet(fold(program, program.micro_batches), budget_bytes)
    dp = dp or DynamicProgram.of(program)
    return dp is None or (dp.floor_bytes <= budget_bytes and _plan_within(dp, budget_bytes) is not None)


def _bisect(program: Program, dp: DynamicProgram) -> MinBudget | None:
    """Bisect for the smallest budget whose requirements a plan holds; a bound where backward does not mirror forward.

    When time is free, dropping more is never worse, so one label is enough at every node, or a few where bytes are in
    flight behind it.
    """
    highest = max(
        (int(policy.recompute_peak_bytes) for each in program.candidates for policy in each.policies), default=0
    )
    low, high = dp.floor_bytes, max(dp.floor_bytes, int(program.during.max()) + highest)
    plan = _plan_within(dp, high)
    if plan is None:
        return None
    while low < high:
        middle = (low + high) // 2
        better = _plan_within(dp, middle)
        if better is None:
            low = middle + 1
        else:
            plan, high = better, middle
    return MinBudget(choice=plan, peak_bytes=program.peak_bytes(plan), bound_bytes=high)


@dataclass(frozen=True, slots=True)
class _Picked:
    """A candidate that is checkpointed, its policy, and the one picked before it."""

    before: _Picked | None
    index: int
    policy: int


def _plan_within(dp: DynamicProgram, budget_bytes: int) -> Choice | None:
    """Return the plan that drops the most, None when no plan holds the requirements."""
    choice = np.full(dp.candidate_count, NO_INDEX, np.int64)
    for each in dp.passes:
        states = [_Reached(budget_bytes, 0, None)]
        for node in each.nodes:
            states = _most_dropped(node, states)
        if not states:
            return None
        picks = states[0].picks
        while picks is not None:
            choice[picks.index] = picks.policy
            picks = picks.before
    return choice


@dataclass(frozen=True, slots=True)
class _Reached:
    """What budget and dropped bytes reach, what is in flight beside them, and the plan so far."""

    reached: int
    in_flight: int
    picks: _Picked | None

    def behind(self, node: UnitNode) -> _Reached:
        return _Reached(self.reached + self.in_flight, 0, self.picks) if node.releases else self


def _most_dropped(node: UnitNode, states: list[_Reached]) -> list[_Reached]:
    """Return the most that budget and dropped bytes reach after a node (dp.py, F and P of recurrence 2)."""
    found: list[_Reached] = []
    if not node.forced:
        inner = [state for state in states if state.reached >= node.open_bytes]
        for child in node.children:
            inner = _most_dropped(child, inner)
        found = [state.behind(node) for state in inner]
        found = [state for state in found if state.reached >= node.after_bytes]
    if not node.must_open:
        gone = node.freed - node.in_flight
        for state in states:
            behind = state.behind(node)
            holds = (state.reached >= node.required_bytes) & (behind.reached >= node.required_after)
            for policy in np.flatnonzero(holds)[::-1].tolist():  # by falling bytes
                found.append(
                    _Reached(
                        behind.reached + int(gone[policy]),
                        behind.in_flight + int(node.in_flight[policy]),
                        _Picked(behind.picks, node.index, policy),
                    )
                )
                if not node.in_flight.any():
                    break  # one that drops less is no better
    return _best(found)


def _best(states: list[_Reached]) -> list[_Reached]:
    """Return the states that no other dominates, the one that reaches most in the end first."""
    kept: list[_Reached] = []
    for state in sorted(states, key=lambda each: (-(each.reached + each.in_flight), -each.reached)):
        if not kept or state.reached > kept[-1].reached:
            kept.append(state)
    return kept
