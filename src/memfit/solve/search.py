"""Find the least recompute time under the budget.

The dynamic program proves it where backward mirrors forward (dp.py, Note [Prefix sums]), which is the rule. Elsewhere
its time is a bound, and integer programs follow: equal layers together first, all units where that is not enough.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from memfit.capture import NO_INDEX
from memfit.solve.checkpoint import CheckpointModel
from memfit.solve.classes import ClassModel
from memfit.solve.dp import WIDTHS, DynamicProgram
from memfit.solve.micro_batches import fold, spread
from memfit.solve.milp import Incumbent, Limits, Status, relative_gap
from memfit.solve.program import Choice, MicroBatches, Program
from memfit.solve.requirements import violated_requirements

Watch = Callable[[Incumbent], None]
SAME_MS = 1e-5
"""Ten nanoseconds: what the solver's tolerances and the order of sums may make of equal times."""
_REPAIRS = 30
_ROUNDS = 60
_PROVEN = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
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


def infeasible() -> SearchResult:
    """Return the result for a program that no plan fits."""
    return SearchResult(
        status=Status.INFEASIBLE,
        choice=None,
        recompute_ms=math.inf,
        bound_ms=math.inf,
        seconds=0.0,
        rows=0,
        columns=0,
    )


def search(
    program: Program,
    limits: Limits | None = None,
    *,
    start: Choice | None = None,
    watch: Watch | None = None,
    dp: Callable[[], DynamicProgram | None] | None = None,
    cutoff_ms: float = math.inf,
) -> SearchResult:
    """Return the best choice for a program, from a first one if that is known.

    `dp` gives its dynamic program, which is the same for every budget; unless given it is built where it is needed.
    Plans that add `cutoff_ms` or more are of no use: where it is proven that there are no others, the search ends with
    that bound, and with what it has found by then.
    """
    limits = limits or Limits()
    began = time.perf_counter()
    if program.micro_batches is not None:
        return _search_folded(program, program.micro_batches, limits, start, watch, cutoff_ms)
    nothing = np.full(len(program.candidates), NO_INDEX, np.int64)
    if not any(candidate.forced for candidate in program.candidates) and program.fits(nothing):
        return _result(program, nothing, Status.OPTIMAL, 0.0, began, 0, 0)
    known = [
        choice for choice in (start, choose_most_freed(program)) if choice is not None and is_usable(program, choice)
    ]
    best = min(known, key=program.recompute_ms, default=None)
    best_ms = math.inf if best is None else program.recompute_ms(best)

    def tell(bound_ms: float, objective_ms: float = best_ms) -> None:
        if watch is not None:
            watch(Incumbent(objective=objective_ms, bound=bound_ms, seconds=time.perf_counter() - began))

    def is_proven(best_ms: float, bound_ms: float) -> bool:
        tell(bound_ms, best_ms)
        return best_ms <= bound_ms + SAME_MS + limits.gap * bound_ms + limits.slack_ms  # of several passes, the sum

    found = DynamicProgram.of(program) if dp is None else dp()
    bound_ms, choice = (0.0, None) if found is None else _by_dp(program, found, limits, began, best, cutoff_ms, tell)
    rows, columns = len(program.segments), sum(len(candidate.policies) for candidate in program.candidates)
    if math.isinf(bound_ms):
        return _result(program, None, Status.INFEASIBLE, math.inf, began, rows, columns)
    if choice is not None:
        best = min((choice, *known), key=program.recompute_ms)
    if best is not None:
        best_ms = program.recompute_ms(best)
        if is_proven(best_ms, bound_ms):
            return _result(program, best, Status.OPTIMAL, bound_ms, began, rows, columns)
    if bound_ms >= cutoff_ms - SAME_MS:
        return _result(program, best, _unproven(best), bound_ms, began, rows, columns)
    class_bound_ms, plans, rows, columns = _by_classes(program, limits, began, lambda heard: tell(heard.bound, best_ms))
    if class_bound_ms is None:
        return _result(program, None, Status.INFEASIBLE, math.inf, began, rows, columns)
    bound_ms = max(bound_ms, class_bound_ms)
    best = min(plans if best is None else (best, *plans), key=program.recompute_ms, default=None)
    if best is not None:
        best_ms = program.recompute_ms(best)
        if is_proven(best_ms, bound_ms):
            return _result(program, best, Status.OPTIMAL, bound_ms, began, rows, columns)
    if bound_ms >= cutoff_ms - SAME_MS:
        return _result(program, best, _unproven(best), bound_ms, began, rows, columns)
    return _by_milp(program, limits, best, bound_ms, began, watch)


def _unproven(best: Choice | None) -> Status:
    """Return the status of a search that ends without a proof."""
    return Status.UNKNOWN if best is None else Status.FEASIBLE


def _search_folded(
    program: Program,
    micro_batches: MicroBatches,
    limits: Limits,
    start: Choice | None,
    watch: Watch | None,
    cutoff_ms: float,
) -> SearchResult:
    """Search with one policy for all micro-batches (Note [Micro-batches])."""
    count = len(micro_batches.members)
    heard = None
    if watch is not None:
        tell = watch  # the name is bound for the function below

        def heard(incumbent: Incumbent) -> None:
            tell(replace(incumbent, objective=incumbent.objective * count, bound=incumbent.bound * count))

    first = None if start is None else start[list(micro_batches.members[-1])]
    each = replace(limits, slack_ms=limits.slack_ms / count)
    found = search(fold(program, micro_batches), each, start=first, watch=heard, cutoff_ms=cutoff_ms / count)
    choice = None if found.choice is None else spread(micro_batches, found.choice, len(program.candidates))
    recompute_ms = math.inf if choice is None else program.recompute_ms(choice)
    proven = found.recompute_ms <= found.bound_ms + SAME_MS
    return replace(
        found,
        choice=choice,
        recompute_ms=recompute_ms,
        bound_ms=recompute_ms if proven else min(found.bound_ms * count, recompute_ms),
    )


def _by_dp(
    program: Program,
    dp: DynamicProgram,
    limits: Limits,
    began: float,
    start: Choice | None,
    cutoff_ms: float,
    watch: Callable[[float], None] | None,
) -> tuple[float, Choice | None]:
    """Return a proven bound, infinite when nothing fits, and the dynamic program's best plan that holds every row.

    Where backward does not mirror forward, the first plan may break rows: requirements are raised until one holds.
    """
    deadline = began + limits.time_limit_s
    found = dp.solve(
        program.budget_bytes,
        gap=limits.gap,
        slack_ms=limits.slack_ms,
        deadline=deadline,
        start=start,
        cutoff_ms=cutoff_ms,
        watch=watch,
    )
    choice = None if found.bound_ms >= cutoff_ms - SAME_MS else found.choice
    raised: dict[int, int] = {}
    for _ in range(_REPAIRS):
        if choice is None or is_usable(program, choice):
            break
        for index, needed in violated_requirements(program, choice).items():
            raised[index] = max(needed, raised.get(index, needed))
        stricter = DynamicProgram.of(program, raised)
        choice = None
        if stricter is not None:
            choice = stricter.solve(program.budget_bytes, gap=limits.gap, deadline=deadline, widths=WIDTHS[:2]).choice
    return found.bound_ms, choice if choice is not None and is_usable(program, choice) else None


def _by_classes(
    program: Program, limits: Limits, began: float, watch: Watch
) -> tuple[float | None, list[Choice], int, int]:
    """Return a proven bound, None when nothing fits, and the assigned plans that hold every row (Note [Classes]).

    It may take half of the time that is left: where it proves something it is quick.
    """
    model = ClassModel(program)
    bound, plans = 0.0, []
    deadline = (time.perf_counter() + began + limits.time_limit_s) / 2
    for _ in range(_ROUNDS):
        left = deadline - time.perf_counter()
        if left <= 0:
            break
        relaxed = model.milp.solve(replace(limits, time_limit_s=left), watch=watch)
        if relaxed.status is Status.INFEASIBLE:
            return None, [], relaxed.rows, relaxed.columns
        bound = max(bound, relaxed.bound)
        if not relaxed.values:
            break
        assigned = [model.assign(relaxed.values, largest_first=order) for order in (True, False)]
        plans += [choice for choice in assigned if is_usable(program, choice)]
        if plans or not model.add_broken_rows(assigned[0]):
            break
    return bound, plans, model.milp.rows, model.milp.columns


def choose_most_freed(program: Program) -> Choice:
    """Return the choice that drops the most: a first answer, so that there is one however short the time is."""
    count = len(program.candidates)
    inside: list[list[int]] = [[] for _ in range(count)]
    for index, candidate in enumerate(program.candidates):
        if candidate.outer != NO_INDEX:
            inside[candidate.outer].append(index)
    best = [0] * count
    forced = [candidate.forced for candidate in program.candidates]
    for index in range(count - 1, -1, -1):  # those inside come after those around them
        parts = sum(best[child] for child in inside[index])
        own = program.candidates[index].policies[-1].freed_bytes
        must_open = any(forced[child] for child in inside[index])
        forced[index] = forced[index] or must_open
        best[index] = parts if must_open else max(own, parts) if not program.candidates[index].forced else own
    choice = np.full(count, NO_INDEX, np.int64)
    taken: set[int] = set()
    for index, candidate in enumerate(program.candidates):
        if candidate.outer in taken:
            taken.add(index)
        elif best[index] == candidate.policies[-1].freed_bytes and not any(forced[child] for child in inside[index]):
            choice[index] = len(candidate.policies) - 1
            taken.add(index)
    return choice


def is_usable(program: Program, choice: Choice) -> bool:
    """Return whether a choice holds every row of the full program."""
    forced = all(choice[index] != NO_INDEX for index, candidate in enumerate(program.candidates) if candidate.forced)
    return forced and not program.nested(choice) and program.fits(choice)


def _by_milp(
    program: Program, limits: Limits, best: Choice | None, bound_ms: float, began: float, watch: Watch | None
) -> SearchResult:
    """Solve the mixed-integer program, from the best choice and the bound that are known."""
    full = CheckpointModel(program)
    left = replace(limits, time_limit_s=max(0.1, limits.time_limit_s - (time.perf_counter() - began)))
    start = None if best is None else full.values_of(best)
    solved = full.milp.solve(left, start=start, target=bound_ms + max(SAME_MS / 2, limits.slack_ms), watch=watch)
    rows, columns = solved.rows, solved.columns
    if solved.status is Status.INFEASIBLE:
        return _result(program, None, Status.INFEASIBLE, math.inf, began, rows, columns)
    bound = max(bound_ms, solved.bound) if math.isfinite(solved.bound) else bound_ms
    if solved.values:
        found = [choice for choice in (best, full.choice_of(solved.values)) if choice is not None]
        best = min((choice for choice in found if is_usable(program, choice)), key=program.recompute_ms, default=None)
    if best is None:
        return _result(program, None, Status.UNKNOWN, bound, began, rows, columns)
    proven = solved.status is Status.OPTIMAL or program.recompute_ms(best) <= bound + SAME_MS
    return _result(program, best, Status.OPTIMAL if proven else Status.FEASIBLE, bound, began, rows, columns)


def _result(
    program: Program, choice: Choice | None, status: Status, bound_ms: float, began: float, rows: int, columns: int
) -> SearchResult:
    recompute_ms = math.inf if choice is None else program.recompute_ms(choice)
    if abs(recompute_ms - bound_ms) <= SAME_MS:
        bound_ms = recompute_ms
    if status is Status.OPTIMAL and relative_gap(recompute_ms, bound_ms) > _PROVEN:
        status = Status.FEASIBLE  # within the gap that was asked for, which is not the best
    return SearchResult(
        status=status,
        choice=choice,
        recompute_ms=recompute_ms,
        bound_ms=min(bound_ms, recompute_ms) if choice is not None else bound_ms,
        seconds=time.perf_counter() - began,
        rows=rows,
        columns=columns,
    )
