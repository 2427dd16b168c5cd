"""Finds the least recompute time under the budget.

A walk through the forward proves it where backward mirrors forward (Note [Prefixes]), which is the rule. Elsewhere its
time is a bound, and integer programs follow: equal layers together first, all units where that is not enough.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from memfit.capture import NEVER
from memfit.solve.checkpoint import CheckpointModel
from memfit.solve.classes import ClassModel
from memfit.solve.micro_batches import dealt, fold
from memfit.solve.milp import Incumbent, Limits, Status, relative_gap
from memfit.solve.prefixes import PICOSECONDS, Place, Walks, broken_rows, walks_of
from memfit.solve.program import Choice, MicroBatches, Program
from memfit.solve.walk import WIDTHS, best_of

Watch = Callable[[Incumbent], None]
SAME_MS = 1e-5
"""Ten nanoseconds: what the solver's tolerances and the order of sums may make of equal times."""
_ROUNDS = 60
_REPAIRS = 30
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


def infeasible() -> Outcome:
    """The outcome of a program that is known to hold nothing."""
    return Outcome(
        status=Status.INFEASIBLE,
        choice=None,
        recompute_ms=math.inf,
        bound_ms=math.inf,
        seconds=0.0,
        rows=0,
        columns=0,
    )


def search(
    program: Program, limits: Limits | None = None, *, start: Choice | None = None, watch: Watch | None = None
) -> Outcome:
    """The best choice for a program, from a first one if that is known."""
    limits = limits or Limits()
    began = time.perf_counter()
    if program.micro_batches is not None:
        return _folded(program, program.micro_batches, limits, start, watch)
    nothing = np.full(len(program.candidates), NEVER, np.int64)
    if not any(candidate.forced for candidate in program.candidates) and program.fits(nothing):
        return _outcome(program, nothing, Status.OPTIMAL, 0.0, began, 0, 0)
    known = [choice for choice in (start, most_freed(program)) if choice is not None and usable(program, choice)]
    first = min((program.recompute_ms(choice) for choice in known), default=math.inf)
    best_known = min(known, key=program.recompute_ms, default=None)
    walked_bound, walked = _by_walking(program, limits, began, best_known, _with_best(watch, first))
    rows, columns = len(program.segments), sum(len(candidate.policies) for candidate in program.candidates)
    if math.isinf(walked_bound):
        return _outcome(program, None, Status.INFEASIBLE, math.inf, began, rows, columns)
    if walked is not None and _enough(program, limits, walked, walked_bound):
        _tell(program, watch, walked, walked_bound, began)
        return _outcome(program, walked, Status.OPTIMAL, walked_bound, began, rows, columns)
    bound, dealt, rows, columns = _by_classes(program, limits, began, _with_best(watch, first))
    if bound is None:
        return _outcome(program, None, Status.INFEASIBLE, math.inf, began, rows, columns)
    bound = max(bound, walked_bound)
    found = [*known, *dealt] if walked is None else [walked, *known, *dealt]
    best = min(found, key=program.recompute_ms, default=None)
    if best is not None:
        _tell(program, watch, best, bound, began)
        if _enough(program, limits, best, bound):
            return _outcome(program, best, Status.OPTIMAL, bound, began, rows, columns)
    return _full(program, limits, best, bound, began, watch)


def _folded(
    program: Program, micro_batches: MicroBatches, limits: Limits, start: Choice | None, watch: Watch | None
) -> Outcome:
    """The best choice with one policy for all micro-batches."""
    count = len(micro_batches.members)
    heard = None
    if watch is not None:
        tell = watch  # the name is bound for the function below

        def heard(incumbent: Incumbent) -> None:
            tell(replace(incumbent, objective=incumbent.objective * count, bound=incumbent.bound * count))

    first = None if start is None else start[list(micro_batches.members[-1])]
    found = search(fold(program, micro_batches), limits, start=first, watch=heard)
    choice = None if found.choice is None else dealt(micro_batches, found.choice, len(program.candidates))
    recompute_ms = math.inf if choice is None else program.recompute_ms(choice)
    proven = found.recompute_ms <= found.bound_ms + SAME_MS
    return replace(
        found,
        choice=choice,
        recompute_ms=recompute_ms,
        bound_ms=recompute_ms if proven else min(found.bound_ms * count, recompute_ms),
    )


def _enough(program: Program, limits: Limits, choice: Choice, bound_ms: float) -> bool:
    return program.recompute_ms(choice) <= bound_ms + SAME_MS + limits.gap * bound_ms


def _tell(program: Program, watch: Watch | None, choice: Choice, bound_ms: float, began: float) -> None:
    if watch is not None:
        seconds = time.perf_counter() - began
        watch(Incumbent(objective=program.recompute_ms(choice), bound=bound_ms, seconds=seconds))


def _by_walking(
    program: Program, limits: Limits, began: float, start: Choice | None, watch: Watch | None
) -> tuple[float, Choice | None]:
    """A proven bound, infinite when nothing fits, and the best plan of the walks that holds every row.

    Where backward does not mirror forward, the first plan may break rows: more is asked for there, and walked again.
    """
    walks = walks_of(program)
    if walks is None:
        return 0.0, None
    if walks.floor_bytes > program.budget_bytes:
        return math.inf, None
    bound, choice = _walked(program, walks, limits, began, WIDTHS, watch, start)
    raised: dict[int, int] = {}
    for _ in range(_REPAIRS):
        if choice is None or usable(program, choice):
            break
        for index, need in broken_rows(program, choice).items():
            raised[index] = max(need, raised.get(index, need))
        stricter = walks_of(program, raised)
        _, choice = (0.0, None) if stricter is None else _walked(program, stricter, limits, began, WIDTHS[:2], None)
    return bound, choice if choice is not None and usable(program, choice) else None


def _walked(
    program: Program,
    walks: Walks,
    limits: Limits,
    began: float,
    widths: Sequence[int],
    watch: Watch | None,
    start: Choice | None = None,
) -> tuple[float, Choice | None]:
    """The bound and the plan of all walks together."""
    bound, whole = 0.0, True
    choice = np.full(len(program.candidates), NEVER, np.int64)
    for places in walks.walks:
        heard = None if watch is None else partial(_hear, watch, bound, began)
        walked = best_of(
            places,
            gap=limits.gap,
            deadline=began + limits.time_limit_s,
            widths=widths,
            start=None if start is None else _picks_in(places, start),
            watch=heard,
        )
        bound += walked.bound / PICOSECONDS
        whole = whole and walked.picks is not None
        for index, policy in walked.picks or ():
            choice[index] = policy
    return bound, choice if whole else None


def _picks_in(places: Sequence[Place], choice: Choice) -> tuple[tuple[int, int], ...]:
    """The candidates of a walk that a choice checkpoints, each with its policy."""
    found: list[tuple[int, int]] = []
    for place in places:
        if choice[place.index] != NEVER:
            found.append((place.index, int(choice[place.index])))
        else:
            found += _picks_in(place.inside, choice)
    return tuple(found)


def _hear(watch: Watch, before_ms: float, began: float, _: float, bound: float) -> None:
    seconds = time.perf_counter() - began
    watch(Incumbent(objective=math.inf, bound=before_ms + bound / PICOSECONDS, seconds=seconds))


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
    start = None if best is None else full.values_of(best)
    solved = full.milp.solve(left, start=start, target=bound_ms + SAME_MS / 2, watch=watch)
    rows, columns = solved.rows, solved.columns
    if solved.status is Status.INFEASIBLE:
        return _outcome(program, None, Status.INFEASIBLE, math.inf, began, rows, columns)
    bound = max(bound_ms, solved.bound) if math.isfinite(solved.bound) else bound_ms
    if solved.values:
        found = [choice for choice in (best, full.choice_of(solved.values)) if choice is not None]
        best = min((choice for choice in found if usable(program, choice)), key=program.recompute_ms, default=None)
    if best is None:
        return _outcome(program, None, Status.UNKNOWN, bound, began, rows, columns)
    proven = solved.status is Status.OPTIMAL or program.recompute_ms(best) <= bound + SAME_MS
    return _outcome(program, best, Status.OPTIMAL if proven else Status.FEASIBLE, bound, began, rows, columns)


def _outcome(
    program: Program, choice: Choice | None, status: Status, bound_ms: float, began: float, rows: int, columns: int
) -> Outcome:
    recompute_ms = math.inf if choice is None else program.recompute_ms(choice)
    if abs(recompute_ms - bound_ms) <= SAME_MS:
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
