"""The smallest budget that any plan fits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from memfit.capture import NEVER
from memfit.solve.checkpoint import CheckpointModel
from memfit.solve.micro_batches import dealt, fold
from memfit.solve.milp import Limits, Status
from memfit.solve.prefixes import Place, Walks, walks_of
from memfit.solve.program import Choice, Program

_TOLERANCE_BYTES = 1024
"""A thousandth of a MiB, the unit of the program's rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastBudget:
    """The lowest peak found, the plan that has it, and the proven bound below which nothing can be."""

    choice: Choice
    peak_bytes: int
    bound_bytes: int

    @property
    def proven(self) -> bool:
        """Whether no plan has a lower peak, to what the solver's tolerances make of a budget."""
        return self.peak_bytes <= self.bound_bytes + _TOLERANCE_BYTES


def least_budget(program: Program, limits: Limits | None = None) -> LeastBudget | None:
    """The plan with the lowest peak; None when the solver found none in its time.

    Of the plans with that peak any is given: solve again at this budget for the fastest of them.
    """
    if program.micro_batches is not None:
        folded = least_budget(fold(program, program.micro_batches), limits)
        if folded is None:
            return None
        choice = dealt(program.micro_batches, folded.choice, len(program.candidates))
        return replace(folded, choice=choice, peak_bytes=program.peak_bytes(choice))
    walked = _by_walking(program)
    if walked is not None and walked.peak_bytes <= walked.bound_bytes:
        return walked
    model = CheckpointModel(program, least_budget=True)
    start = None if walked is None else model.values_of(walked.choice, walked.peak_bytes)
    solved = model.milp.solve(replace(limits or Limits(), gap=0.0), start=start)
    if solved.status not in (Status.OPTIMAL, Status.FEASIBLE):
        return walked
    choice = model.choice_of(solved.values)
    scale = 1 << 20
    return LeastBudget(
        choice=choice,
        peak_bytes=program.peak_bytes(choice),
        bound_bytes=max(math.floor(solved.bound * scale), 0 if walked is None else walked.bound_bytes),
    )


def _by_walking(program: Program) -> LeastBudget | None:
    """The least budget under the rows of Note [Prefixes], by halving: more dropped is never worse when time is free."""
    walks = walks_of(program)
    if walks is None:
        return None
    highest = max(
        (int(policy.recompute_peak_bytes) for each in program.candidates for policy in each.policies), default=0
    )
    low, high = walks.floor_bytes, max(walks.floor_bytes, int(program.during.max()) + highest)
    plan = _plan_within(program, walks, high)
    if plan is None:
        return None
    while low < high:
        middle = (low + high) // 2
        better = _plan_within(program, walks, middle)
        if better is None:
            low = middle + 1
        else:
            plan, high = better, middle
    return LeastBudget(choice=plan, peak_bytes=program.peak_bytes(plan), bound_bytes=high)


@dataclass(frozen=True, slots=True)
class _Picked:
    """A candidate that is checkpointed, its policy, and the one picked before it."""

    before: _Picked | None
    index: int
    policy: int


def _plan_within(program: Program, walks: Walks, budget_bytes: int) -> Choice | None:
    """A plan that drops the most at every place of the walks, None when it does not hold their rows."""
    choice = np.full(len(program.candidates), NEVER, np.int64)
    for places in walks.walks:
        lacking = 0
        picks: _Picked | None = None
        for place in places:
            passed = _most_dropped(place, lacking, budget_bytes - program.budget_bytes, picks)
            if passed is None:
                return None
            lacking, picks = passed
        while picks is not None:
            choice[picks.index] = picks.policy
            picks = picks.before
    return choice


def _most_dropped(place: Place, lacking: int, spare: int, picks: _Picked | None) -> tuple[int, _Picked | None] | None:
    """The most that can be lacking after a place; `spare` is the budget above that of the place's rows."""
    closed = place.forced or lacking + spare < place.open_bytes
    inner: tuple[int, _Picked | None] | None = None if closed else (lacking, picks)
    for each in place.inside:
        if inner is not None:
            inner = _most_dropped(each, inner[0], spare, inner[1])
    if inner is not None and inner[0] + spare < place.need_bytes:
        inner = None
    if place.opened:
        return inner
    for policy in range(len(place.freed) - 1, -1, -1):  # by falling bytes
        if lacking + spare >= place.required_bytes[policy]:
            dropped = lacking + int(place.freed[policy])
            return (
                inner if inner is not None and inner[0] >= dropped else (dropped, _Picked(picks, place.index, policy))
            )
    return inner
