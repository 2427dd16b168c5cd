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


def _bisect(program: Program, dp: DynamicProgram) -> MinBudget | None:
    """Bisect for the smallest budget whose requirements a plan holds; a bound where backward does not mirror forward.

    When time is free, dropping more is never worse, so one label is enough at every node.
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
    """Return the plan that drops the most at every node, None when it does not hold the requirements."""
    choice = np.full(dp.candidate_count, NO_INDEX, np.int64)
    for each in dp.passes:
        reached = budget_bytes
        picks: _Picked | None = None
        for node in each.nodes:
            passed = _most_dropped(node, reached, picks)
            if passed is None:
                return None
            reached, picks = passed
        while picks is not None:
            choice[picks.index] = picks.policy
            picks = picks.before
    return choice


def _most_dropped(node: UnitNode, reached: int, picks: _Picked | None) -> tuple[int, _Picked | None] | None:
    """Return the most that budget and dropped bytes reach after a node (dp.py, F of recurrence 2)."""
    closed = node.forced or reached < node.open_bytes
    inner: tuple[int, _Picked | None] | None = None if closed else (reached, picks)
    for child in node.children:
        if inner is not None:
            inner = _most_dropped(child, inner[0], inner[1])
    if inner is not None and inner[0] < node.after_bytes:
        inner = None
    if node.must_open:
        return inner
    for policy in range(len(node.freed) - 1, -1, -1):  # by falling bytes
        if reached >= node.required_bytes[policy]:
            whole = reached + int(node.freed[policy])
            return inner if inner is not None and inner[0] >= whole else (whole, _Picked(picks, node.index, policy))
    return inner
