"""Plans and the caching allocator, which may hold more than the device has, in pieces that do not fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from memfit.memory import Reservation, Room, Timeline, find_room, judge_room
from memfit.solve import Incumbent, Problem, Solved, minimum_budget_bytes, solve
from memfit.units import display_bytes

_LOWERINGS = 6
_HALVINGS = 3
_STEP = 100
"""A budget is lowered by at least one part of this many."""
EXPANDABLE = "PYTORCH_ALLOC_CONF=expandable_segments:True"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tried:
    """A plan, its reservation where the allocator has room for it, and if known what it would reserve with no limit."""

    solved: Solved
    replay: Timeline
    enough: Reservation | None
    wanted_bytes: int | None

    def least_budget(self, usable: int) -> int:
        """Return the budget down to which the plan is the same, where it has far more than it needs."""
        spare = self.solved.budget_bytes - self.replay.peak_bytes
        return self.solved.budget_bytes if spare < usable // _STEP else self.replay.peak_bytes


def reservation_under(problem: Problem, solved: Solved, *, expandable: bool = False) -> Reservation | None:
    """Return what the allocator does with a plan; None without one. `expandable` segments grow and have no pieces."""
    return None if solved.replay is None else judge_room(problem.target, solved.replay, expandable=expandable)


def with_room(
    problem: Problem,
    solved: Solved,
    watch: Callable[[Incumbent], None] | None = None,
    *,
    expandable: bool = False,
    most_ms: float = math.inf,
) -> tuple[Solved, Reservation | None]:
    """Return a plan, for this budget or a lower one, that the allocator has room for, and its reservation.

    What it holds too much is taken off the budget, some times; then the smallest budget is tried. Between a budget that
    has room and one that has none, some more are tried: a plan with more budget is faster.
    Where none will do it is the plan with the most room, and of those alike the one with the most budget. A plan that
    adds `most_ms` or more is of no use: where none with room adds less, the reservation is None.
    """
    usable = problem.target.usable_bytes
    tried: list[_Tried] = []
    slow: list[int] = []

    def able(found: Solved, *, wanted: bool = True) -> bool:
        if found.replay is None:
            return False
        if found.bound_ms >= most_ms:  # and so is every plan with less budget: whether it has room does not matter
            slow.append(found.budget_bytes)
            return True
        enough, wanted_bytes = find_room(problem.target, found.replay, expandable=expandable, wanted=wanted)
        tried.append(_Tried(solved=found, replay=found.replay, enough=enough, wanted_bytes=wanted_bytes))
        return enough is not None

    if solved.replay is None:
        return solved, None
    if not able(solved):
        for _ in range(_LOWERINGS):
            lowest = tried[-1]
            assert lowest.wanted_bytes is not None
            budget_bytes = lowest.least_budget(usable) - max(lowest.wanted_bytes - usable, usable // _STEP)
            if budget_bytes <= 0:
                break
            found = solve(problem, budget_bytes, start=lowest.solved.choice, watch=watch)
            if found.replay is None or able(found):
                break
        _between(problem, usable, tried, partial(able, wanted=False), max(slow, default=None))
    fitting = [each for each in tried if each.enough is not None]
    if fitting:
        most = max(fitting, key=lambda each: each.solved.budget_bytes)
        return most.solved, most.enough
    if slow:
        return solved, None
    judged = [(judge_room(problem.target, each.replay, expandable=expandable), each.solved) for each in tried]
    best, found = min(judged, key=lambda each: (each[0].room.value, -each[1].budget_bytes))
    return found, best


def _between(
    problem: Problem, usable: int, tried: Sequence[_Tried], able: Callable[[Solved], bool], slow: int | None
) -> None:
    """Try some budgets between the highest that has room and the lowest that has none; first the smallest there is.

    At the budget `slow`, if any, plans are too slow.
    """
    low = max((each.solved.budget_bytes for each in tried if each.enough is not None), default=slow)
    high = min(each.least_budget(usable) for each in tried if each.enough is None)
    if low is None:
        low = minimum_budget_bytes(problem)
        if low is None or low >= high or not able(solve(problem, low)):
            return
    for _ in range(_HALVINGS):
        if high - low < usable // _STEP:
            return
        middle = (low + high) // 2
        if able(solve(problem, middle)):
            low = middle
        else:
            high = middle


def note_on_room(
    problem: Problem, solved: Solved, reservation: Reservation | None, asked_bytes: int | None
) -> str | None:
    """Return a note on what the allocator reserves under a plan and what to do about it; None when it has room.

    `asked_bytes` is the budget that was asked for, None when it was left to memfit.
    """
    memory = problem.target.rank_memory
    usable = display_bytes(memory.usable_bytes)
    if reservation is None:
        return None
    if reservation.room is Room.ENOUGH:
        if asked_bytes is not None or solved.budget_bytes == memory.usable_bytes:
            return None
        grows = "" if problem.target.device.allocator.expandable_segments else f"; {EXPANDABLE} avoids the pieces"
        return (
            f"the budget is {display_bytes(solved.budget_bytes)} of the {usable} that the device has for tensors: with "
            "more, the caching allocator would hold more than that, in pieces that do not fit. A budget of your own is "
            f"taken as it is{grows}"
        )
    holds = f"the caching allocator would hold {display_bytes(reservation.reserved_bytes)}"
    remedy = _remedy(problem, solved, asked_bytes)
    if reservation.room is Room.MARGIN and reservation.low_bytes is not None:
        between = f"{display_bytes(reservation.low_bytes)} to {display_bytes(reservation.wanted_bytes)}"
        return (
            f"the caching allocator would hold {between}, by the workspaces that cuDNN chooses for convolutions, and "
            f"the device has {usable}: with the largest it does not fit, and cuDNN takes slower algorithms. {remedy}"
        )
    if reservation.room is Room.MARGIN:
        return (
            f"{holds}, and the device has {usable} with the margin of {memory.margin:.1%} that predictions have been "
            f"off by: it fits only if this one is exact. {remedy}"
        )
    does = "run out" if reservation.room is Room.TOO_LITTLE else "empty its cache in every step, which takes time"
    return f"{holds}, in pieces that do not fit, and {does}: the device has {usable}. {remedy}"


def _remedy(problem: Problem, solved: Solved, asked_bytes: int | None) -> str:
    """Advise a lower budget where there is one that has room; else what to do with expandable segments."""
    if asked_bytes is not None:
        lower, reservation = with_room(problem, solved)
        if _has_room(reservation):
            return f"A budget of {display_bytes(lower.budget_bytes)} has room"
    least = minimum_budget_bytes(problem)
    none = "No lower budget " + ("" if least is None else f"down to {display_bytes(least)} ") + "was found to have room"
    if problem.target.device.allocator.expandable_segments:
        return f"{none}: use another lever, such as a smaller batch"
    grown, reservation = with_room(problem, solved, expandable=True)
    if not _has_room(reservation):
        return f"{none}, nor with {EXPANDABLE}: use another lever, such as a smaller batch"
    if grown.budget_bytes == solved.budget_bytes:
        return f"{none}: the plan fits only with {EXPANDABLE}"
    return f"{none}: with {EXPANDABLE} a budget of {display_bytes(grown.budget_bytes)} has"


def _has_room(reservation: Reservation | None) -> bool:
    return reservation is not None and reservation.room is Room.ENOUGH
