"""Plans and the caching allocator, which may hold more than the device has, in pieces that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from memfit.memory import reserved
from memfit.solve import Incumbent, Problem, Solved, minimum_budget_bytes, solve
from memfit.units import display_bytes

_LOWERINGS = 6
_HALVINGS = 3
_STEP = 100
"""A budget is lowered by at least one part of this many."""
EXPANDABLE = "PYTORCH_ALLOC_CONF=expandable_segments:True"


class Room(Enum):
    """How the caching allocator gets on with a plan; better ones first."""

    ENOUGH = 0
    """It holds no more than the device has."""
    TIGHT = 1
    """It empties its cache in every step."""
    TOO_LITTLE = 2
    """It runs out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What the allocator holds at most when nothing limits it, and how it gets on with what the device has."""

    reserved_bytes: int
    room: Room


def held_under(problem: Problem, solved: Solved, *, expandable: bool = False) -> Held | None:
    """What the allocator does with a plan; None without one. `expandable` segments grow and have no pieces."""
    device, usable = problem.target.device, problem.target.usable_bytes
    if solved.replay is None:
        return None
    if expandable:
        device = replace(device, allocator=replace(device.allocator, expandable_segments=True))
    if not device.allocator.caches:
        return Held(reserved_bytes=solved.replay.peak_bytes, room=Room.ENOUGH)
    reserved_bytes = reserved(solved.replay.allocations, device).peak_reserved_bytes
    if reserved_bytes <= usable:
        return Held(reserved_bytes=reserved_bytes, room=Room.ENOUGH)
    fails = reserved(solved.replay.allocations, device, limit_bytes=usable).out_of_memory_op is not None
    return Held(reserved_bytes=reserved_bytes, room=Room.TOO_LITTLE if fails else Room.TIGHT)


def with_room(
    problem: Problem, solved: Solved, watch: Callable[[Incumbent], None] | None = None, *, expandable: bool = False
) -> Solved:
    """A plan for this budget or a lower one with which the allocator, too, stays within the device."""
    return with_room_held(problem, solved, watch, expandable=expandable)[0]


def with_room_held(
    problem: Problem, solved: Solved, watch: Callable[[Incumbent], None] | None = None, *, expandable: bool = False
) -> tuple[Solved, Held | None]:
    """The plan of `with_room`, and what the allocator does with it.

    What it holds too much is taken off the budget, some times; then the smallest budget is tried, and some between.
    Where none will do it is the plan with the most room, and of those alike the one with the most budget.
    """
    usable = problem.target.usable_bytes
    tried: list[tuple[Held, Solved]] = []

    def able(found: Solved) -> bool:
        held = held_under(problem, found, expandable=expandable)
        if held is not None:
            tried.append((held, found))
        return held is not None and held.room is Room.ENOUGH

    if solved.replay is None:
        return solved, None
    if able(solved):
        return solved, tried[0][0]
    for _ in range(_LOWERINGS):
        held, lowest = tried[-1]
        budget_bytes = lowest.budget_bytes - max(held.reserved_bytes - usable, usable // _STEP)
        if budget_bytes <= 0:
            break
        found = solve(problem, budget_bytes, start=lowest.choice, watch=watch)
        if found.replay is None or able(found):
            break
    if tried[-1][0].room is not Room.ENOUGH:
        _between(problem, tried, able)
    held, found = min(tried, key=lambda each: (each[0].room.value, -each[1].budget_bytes))
    return found, held


def _between(problem: Problem, tried: list[tuple[Held, Solved]], able: Callable[[Solved], bool]) -> None:
    """Try the smallest budget; when it will do, also some between it and the lowest that will not."""
    low, high = minimum_budget_bytes(problem), tried[-1][1].budget_bytes
    if low is None or low >= high or not able(solve(problem, low)):
        return
    for _ in range(_HALVINGS):
        middle = (low + high) // 2
        if able(solve(problem, middle)):
            low = middle
        else:
            high = middle


def note_on_room(problem: Problem, solved: Solved, asked_bytes: int | None) -> str | None:
    """What to know of the allocator under a plan, and what to do about it; None when it has room.

    `asked_bytes` is the budget that was asked for, None when it was left to memfit.
    """
    held, usable = held_under(problem, solved), display_bytes(problem.target.usable_bytes)
    if held is None:
        return None
    if held.room is Room.ENOUGH:
        if asked_bytes is not None or solved.budget_bytes == problem.target.usable_bytes:
            return None
        return (
            f"the budget is {display_bytes(solved.budget_bytes)} of the device's {usable}: with more, the caching "
            "allocator would hold more than the device has, in pieces that do not fit. A budget of your own is taken "
            f"as it is; {EXPANDABLE} avoids the pieces"
        )
    does = "run out" if held.room is Room.TOO_LITTLE else "empty its cache in every step, which takes time"
    return (
        f"the caching allocator would hold {display_bytes(held.reserved_bytes)}, in pieces that do not fit, and "
        f"{does}: the device has {usable}. {_remedy(problem, solved, asked_bytes)}"
    )


def _remedy(problem: Problem, solved: Solved, asked_bytes: int | None) -> str:
    """A lower budget where there is one that has room; else what to do with expandable segments."""
    if asked_bytes is not None:
        lower = with_room(problem, solved)
        if _has_room(problem, lower):
            return f"A budget of {display_bytes(lower.budget_bytes)} has room"
    least = minimum_budget_bytes(problem)
    none = "No lower budget " + ("" if least is None else f"down to {display_bytes(least)} ") + "was found to have room"
    grown = with_room(problem, solved, expandable=True)
    if not _has_room(problem, grown, expandable=True):
        return f"{none}, nor with {EXPANDABLE}: use another lever, such as a smaller batch"
    if grown.budget_bytes == solved.budget_bytes:
        return f"{none}: the plan fits only with {EXPANDABLE}"
    return f"{none}: with {EXPANDABLE} a budget of {display_bytes(grown.budget_bytes)} has"


def _has_room(problem: Problem, solved: Solved, *, expandable: bool = False) -> bool:
    held = held_under(problem, solved, expandable=expandable)
    return held is not None and held.room is Room.ENOUGH
