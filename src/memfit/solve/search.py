"""Finds the least recompute time under the budget: equal layers together first, all units where that is not enough."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from memfit.solve.checkpoint import CheckpointModel
from memfit.solve.classes import ClassModel
from memfit.solve.milp import Incumbent, Limits, Status, relative_gap
from memfit.solve.program import Choice, Program
from memfit.trace import NEVER

Watch = Callable[[Incumbent], None]
_SAME_MS = 1e-5
"""Ten nanoseconds: what the solver's tolerances and the order of sums may make of equal times."""
_ROUNDS = 60
_PROVEN = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The best choice found and what is proven of it; an infeasible program has none."""

    status: Status
    choice: Choice | None
    recompute_ms: float
    bound_ms: float
    seconds: float
    rows: int
    columns: int

    @property
    def gap(self) -> float:
        """How far the time may be from the least possible, as a part of itself."""
        return relative_gap(self.recompute_ms, self.bound_ms)


def search(
    program: Program, limits: Limits | None = None, *, start: Choice | None = None, watch: Watch | None = None
) -> Outcome:
    """The best choice for a program, from a first one if that is known."""
    limits = limits or Limits()
    began = time.perf_counter()
    nothing = np.full(len(program.candidates), NEVER, np.int64)
    if not any(candidate.forced for candidate in program.candidates) and program.fits(nothing):
        return _outcome(program, nothing, Status.OPTIMAL, 0.0, began, 0, 0)
    known = [choice for choice in (start, most_freed(program)) if choice is not None and usable(program, choice)]
    first = min((program.recompute_ms(choice) for choice in known), default=math.inf)
    bound, dealt, rows, columns = _by_classes(program, limits, began, _with_best(watch, first))
    if bound is None:
        return _outcome(program, None, Status.INFEASIBLE, math.inf, began, rows, columns)
    best = min([*known, *dealt], key=program.recompute_ms, default=None)
    if watch is not None and best is not None:
        watch(Incumbent(objective=program.recompute_ms(best), bound=bound, seconds=time.perf_counter() - began))
    if best is not None and program.recompute_ms(best) <= bound + _SAME_MS + limits.gap * bound:
        return _outcome(program, best, Status.OPTIMAL, bound, began, rows, columns)
    return _full(program, limits, best, bound, began, watch)


def _with_best(watch: Watch | None, best_ms: float) -> Watch | None:
    """Hears of a relaxation: its bound holds for the program, its answer is none."""
    return None if watch is None else lambda heard: watch(replace(heard, objective=best_ms))


def _by_classes(
    program: Program, limits: Limits, began: float, watch: Watch | None
) -> tuple[float | None, list[Choice], int, int]:
    """A proven bound, None when nothing fits, and the plans dealt out that hold every row."""
    model = ClassModel(program)
    bound, usable_plans = 0.0, []
    for _ in range(_ROUNDS):
        left = limits.time_limit_s - (time.perf_counter() - began)
        if left <= 0:
            break
        relaxed = model.milp.solve(replace(limits, time_limit_s=left), watch=watch)
        if relaxed.status is Status.INFEASIBLE:
            return None, [], relaxed.rows, relaxed.columns
        bound = max(bound, relaxed.bound)
        if not relaxed.values:
            break
        dealt = [model.deal(relaxed.values, largest_first=order) for order in (True, False)]
        usable_plans += [choice for choice in dealt if usable(program, choice)]
        if usable_plans or not model.add_broken_rows(dealt[0]):
            break
    return bound, usable_plans, model.milp.rows, model.milp.columns


def most_freed(program: Program) -> Choice:
    """The choice that drops the most: a first answer, so that there is one however short the time is."""
    count = len(program.candidates)
    inside: list[list[int]] = [[] for _ in range(count)]
    for index, candidate in enumerate(program.candidates):
        if candidate.outer != NEVER:
            inside[candidate.outer].append(index)
    best = [0] * count
    forced = [candidate.forced for candidate in program.candidates]
    for index in range(count - 1, -1, -1):  # those inside come after those around them
        parts = sum(best[child] for child in inside[index])
        own = program.candidates[index].policies[-1].discarded_bytes
        must_open = any(forced[child] for child in inside[index])
        forced[index] = forced[index] or must_open
        best[index] = parts if must_open else max(own, parts) if not program.candidates[index].forced else own
    choice = np.full(count, NEVER, np.int64)
    taken: set[int] = set()
    for index, candidate in enumerate(program.candidates):
        if candidate.outer in taken:
            taken.add(index)
        elif best[index] == candidate.policies[-1].discarded_bytes and not any(
            forced[child] for child in inside[index]
        ):
            choice[index] = len(candidate.policies) - 1
            taken.add(index)
    return choice


def usable(program: Program, choice: Choice) -> bool:
    """Whether a choice holds every row of the full program."""
    forced = all(choice[index] != NEVER for index, candidate in enumerate(program.candidates) if candidate.forced)
    return forced and not program.nested(choice) and program.fits(choice)


def _full(
    program: Program, limits: Limits, best: Choice | None, bound_ms: float, began: float, watch: Watch | None
) -> Outcome:
    full = CheckpointModel(program)
    left = replace(limits, time_limit_s=max(0.1, limits.time_limit_s - (time.perf_counter() - began)))
    solved = full.milp.solve(left, start=None if best is None else full.values_of(best), watch=watch)
    rows, columns = solved.rows, solved.columns
    if solved.status is Status.INFEASIBLE:
        return _outcome(program, None, Status.INFEASIBLE, math.inf, began, rows, columns)
    bound = max(bound_ms, solved.bound) if math.isfinite(solved.bound) else bound_ms
    if solved.values:
        best = min((c for c in (best, full.choice_of(solved.values)) if c is not None), key=program.recompute_ms)
    if best is None:
        return _outcome(program, None, Status.UNKNOWN, bound, began, rows, columns)
    proven = solved.status is Status.OPTIMAL
    return _outcome(program, best, Status.OPTIMAL if proven else Status.FEASIBLE, bound, began, rows, columns)


def _outcome(
    program: Program, choice: Choice | None, status: Status, bound_ms: float, began: float, rows: int, columns: int
) -> Outcome:
    recompute_ms = math.inf if choice is None else program.recompute_ms(choice)
    if abs(recompute_ms - bound_ms) <= _SAME_MS:
        bound_ms = recompute_ms
    if status is Status.OPTIMAL and relative_gap(recompute_ms, bound_ms) > _PROVEN:
        status = Status.FEASIBLE  # within the gap that was asked for, which is not the best
    return Outcome(
        status=status,
        choice=choice,
        recompute_ms=recompute_ms,
        bound_ms=min(bound_ms, recompute_ms) if choice is not None else bound_ms,
        seconds=time.perf_counter() - began,
        rows=rows,
        columns=columns,
    )
